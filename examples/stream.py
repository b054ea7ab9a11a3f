"""Show text while it is decoded, and stop early."""

from fastspec import FastSpecGenerator, demo_pair
from fastspec.text import TextStream


def main() -> None:
    """Streams one prompt until the text holds a second function."""
    with FastSpecGenerator(*demo_pair(), max_length=256, progress=False) as generator:
        prompt = generator.tokenizer("def main():\n")["input_ids"]
        text = TextStream(generator.tokenizer, context=prompt)
        shown = ""
        for step in generator.stream([prompt], max_new_tokens=48):
            piece = text.push(step.get(0, []))  # tokens of prompt 0; one to k + 1 of them
            print(piece, end="", flush=True)
            shown += piece
            if "def " in shown:
                break  # ends the call; the generator stays usable
        print(text.finish())


if __name__ == "__main__":
    main()
