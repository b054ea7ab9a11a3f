"""Says what int4, rounded to nearest, costs the text of a small model.

The perplexities are rows of perf/results/perplexity.jsonl, on 2040 tokens of this project's guides. No model above 270
million parameters was measured. The cost is larger at 270 million than at 135 million, so nothing shows that it ends
soon above. `SMALL` is therefore several times 270 million.
"""

from __future__ import annotations

from typing import Final

SMALL: Final = 10**9  # number of parameters below which a model is small
MEASURED: Final = {  # model -> perplexity as stored, in int4 to nearest, in int4 calibrated, in int8
    "SmolLM2-135M": (62, 96, 70, 61),
    "Gemma 3 270M": (67, 149, 77, 67),
}


def cost_of_int4(parameters: int) -> str | None:
    """Returns a text about the quality that a model loses in int4, rounded to nearest, and about better formats.

    Args:
        parameters: number of the model's parameters. A matrix that is used twice counts once.

    Returns:
        The text. None: the model is not small.
    """
    if parameters >= SMALL:
        return None
    shown = [
        f"perplexity of {name}: {stored} as stored, {nearest} in int4, {calibrated} in int4 calibrated, {eight} in int8"
        for name, (stored, nearest, calibrated, eight) in MEASURED.items()
    ]
    return (
        f"a model of {parameters / 1e6:.0f} million parameters loses much of its quality in int4 rounded to nearest "
        f"({'; '.join(shown)})"
    )
