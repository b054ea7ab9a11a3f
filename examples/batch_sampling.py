"""Sample a batch with options and seeds per row; the same seeds give the same texts."""

from fastspec import FastSpecGenerator, demo_pair


def main() -> None:
    """Samples three prompts together, then one of them alone."""
    with FastSpecGenerator(*demo_pair(), verification="coupled", max_length=256, progress=False) as generator:
        prompts = generator.tokenizer(["import os\n", "class Stack:\n    def", "x = [\n"])["input_ids"]
        output = generator.generate(
            prompts,
            max_new_tokens=24,
            do_sample=True,
            temperature=[0.0, 0.7, 1.0],  # 0 is greedy
            top_p=0.95,
            seed=[1, 2, 3],
            return_dict_in_generate=True,
        )
        for ids, reason in zip(output.new_tokens, output.finish_reasons, strict=True):
            print(reason, repr(generator.tokenizer.decode(ids)))
        alone = generator.generate(
            [prompts[1]], max_new_tokens=24, do_sample=True, temperature=0.7, top_p=0.95, seed=[2],
            num_speculative_tokens=0, return_dict_in_generate=True,
        )  # fmt: skip
        print("row 1 alone, without drafts, is the same:", alone.new_tokens[0] == output.new_tokens[1])


if __name__ == "__main__":
    main()
