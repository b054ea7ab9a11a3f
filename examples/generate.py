"""Decode one prompt plainly and with drafts: the same text, with fewer passes of the target."""

from fastspec import FastSpecGenerator, demo_pair


def main() -> None:
    """Runs the shipped pair of tiny models on one prompt."""
    with FastSpecGenerator(*demo_pair(), num_speculative_tokens=4, max_length=256, progress=False) as generator:
        ids = generator.tokenizer("class Stack:\n    def push(self, item):\n", return_tensors="pt")["input_ids"]
        plain = generator.generate(ids, max_new_tokens=32, num_speculative_tokens=0, return_dict_in_generate=True)
        drafted = generator.generate(ids, max_new_tokens=32, return_dict_in_generate=True)
        print(generator.tokenizer.decode(drafted.sequences[0]))
        print("the same text:", plain.new_tokens == drafted.new_tokens)
        print("plain:  ", plain.stats)
        print("drafted:", drafted.stats)


if __name__ == "__main__":
    main()
