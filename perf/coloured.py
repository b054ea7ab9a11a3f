"""A picture of a text that `Suffix` drafts: each token has the colour of the source that drafted it.

`python -m perf.coloured FILE` writes it as SVG. The text is given, as in `perf repeats`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import torch
from transformers import AutoTokenizer

from fastspec import demo_pair
from fastspec.kernels.reference.lookup import LookUp, Predictions, RepeatedText, follow, look_up

OLD = """def area(w, h):
    return w * h

def edge(w, h):
    return 2 * w + 2 * h

def show(w, h):
    print("area", area(w, h))
    print("edge", edge(w, h))
"""
NEW = """def area(width, height):
    return width * height

def edge(width, height):
    return 2 * width + 2 * height

def show(width, height):
    print("area", area(width, height))
    print("edge", edge(width, height))
"""
DRAFTS = 8
COLOURS = {"prediction": "#9fd3a8", "the row itself": "#f4c77b", "the target's own": "#e4e4e4"}
LETTER, LINE, LEFT = 8.4, 22, 10  # width of a letter, height of a line, and margin, in pixels


def sources_of(old: Sequence[int], new: Sequence[int], k: int) -> Iterator[tuple[int, str]]:
    """Yields the tokens of `new`, each with its source, where `old` is the prediction of a row without a prompt."""
    done = 1
    yield new[0], "the target's own"
    while done < len(new):
        length = torch.tensor([done])
        given = Predictions(torch.tensor([old]), torch.tensor([len(old)]), torch.zeros(1, dtype=torch.int64))
        call = LookUp(torch.tensor([new]), length, 2, 16, given, per_match=2)
        drafts, counts = look_up(call, k)
        place, predicted = follow(call, RepeatedText(given.tokens, given.lengths, length))
        _, repeated = follow(call, RepeatedText(call.tokens, length, length))
        of_prediction = int(predicted) > 0 and int(place) < len(old) and 2 * int(predicted) >= int(repeated)
        source = "prediction" if of_prediction else "the row itself"
        for draft in drafts[0, : int(counts)].tolist()[: len(new) - done - 1]:
            if draft != new[done]:
                break
            yield draft, source
            done += 1
        yield new[done], "the target's own"
        done += 1


def drawn(tokens: Sequence[tuple[str, str]]) -> str:
    """Draws texts of tokens with their sources, and a legend, as SVG."""
    shapes, x, y = [], 0, 1
    for text, source in [*((f" {name} ", name) for name in COLOURS), ("\n\n", ""), *tokens]:
        for piece in text.splitlines(keepends=True):
            if shown := piece.rstrip("\n"):
                left, top = LEFT + x * LETTER, y * LINE
                box = f'x="{left:.1f}" y="{top - 16}" width="{len(shown) * LETTER - 1:.1f}" height="20"'
                shapes.append(f'<rect {box} rx="2" fill="{COLOURS[source]}"/>')
                shapes.append(f'<text x="{left:.1f}" y="{top}" xml:space="preserve">{escape(shown)}</text>')
                x += len(shown)
            if piece.endswith("\n"):
                x, y = 0, y + 1
    size = f'width="560" height="{(y + 1) * LINE}" font-family="monospace" font-size="14"'
    back = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{back}{"".join(shapes)}</svg>\n'


def picture() -> str:
    """The picture of NEW, with OLD as its prediction and the shipped pair's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(demo_pair()[0])
    old, new = (tokenizer(text)["input_ids"] for text in (OLD, NEW))
    return drawn([(str(tokenizer.decode([token])), source) for token, source in sources_of(old, new, DRAFTS)])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
