"""Find out how many drafts pay on your prompts, then let the generator choose."""

from fastspec import FastSpecGenerator, demo_pair


def main() -> None:
    """Tries every k on two prompts, and decodes them with k chosen step by step."""
    with FastSpecGenerator(
        *demo_pair(), num_speculative_tokens="auto", max_batch_size=2, max_length=256, progress=False
    ) as generator:
        prompts = generator.tokenizer(["import os\n", "def push(self, item):\n"])["input_ids"]
        found = generator.calibrate(prompts, max_new_tokens=16)
        print(found)
        print("fastest k:", found.best, "- limited by:", found.limit)
        output = generator.generate(prompts, max_new_tokens=32, return_dict_in_generate=True)
        print(output.stats)


if __name__ == "__main__":
    main()
