"""Chooses the weight format of a draft for `draft_quantization="auto"`. The choice changes speed, not the text.

A pass over few rows is limited by reading weights. Its estimated time is the bytes of the weights, divided by the share
of the memory bandwidth that matrix products in that format reach. Acceptance is assumed to be equal in every format.
`format_trial` measures it later, for a draft model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from fastspec.config import Config
from fastspec.engine.settings import device_of, dtype_of
from fastspec.kernels.common.codes import CodeFormat
from fastspec.kernels.common.rounding import FORMATS, kind_for
from fastspec.kernels.select import ops_for
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.pair import AS_STORED, rounded_to
from fastspec.models.heads.checkpoint import HeadCheckpoint

# format -> (largest number of rows, share of an H100's memory bandwidth that its matrix products reach) in ascending
# order. The last share holds for more rows, too (perf/LOG.md, "Quantised weights")
SHARES: Final[Mapping[CodeFormat | None, tuple[tuple[int, float], ...]]] = {
    None: ((1, 0.99), (4, 0.99), (8, 0.98), (32, 0.90), (64, 0.86)),
    "fp8": ((1, 0.93), (4, 0.92), (8, 0.92), (32, 0.79), (64, 0.66), (128, 0.33)),
    "int8": ((1, 0.94), (4, 0.93), (8, 0.92), (32, 0.75), (64, 0.63), (128, 0.31)),
    "int4": ((1, 0.71), (4, 0.69), (8, 0.67), (16, 0.54), (32, 0.41), (64, 0.36), (128, 0.18)),
}


_ALIKE: Final = "no format is read with fewer bytes here"
_SOME: Final = (128, 128)  # (N, K) of an example matrix, to ask if `ops` stores any matrix in codes
# bytes of weights of a pass: fewer stay in the L2 cache of large GPUs and are not read from memory
LEAST: Final = 32 * 2**20


def with_format(
    target: Checkpoint,
    draft: Checkpoint | HeadCheckpoint | None,
    config: Config,
    *,
    alone: bool = True,
) -> Checkpoint | HeadCheckpoint | None:
    """Returns the draft checkpoint, set to be quantised to the format with the shortest estimated pass.

    Its attribute `stored` is a text with the format and the reason. A checkpoint that is already quantised is returned
    unchanged. None if there is no draft.

    Args:
        target: the resolved checkpoint of the target.
        draft: the resolved checkpoint of the draft model or head. None: there is neither.
        config: arguments of the generator.
        alone: True if no other rank shares the models.
    """
    if draft is None or draft.stored:  # a quantised checkpoint keeps its format
        return draft
    if kind := _never_rounded(draft, ours=alone and not config.compile):
        return replace(draft, stored=f'{AS_STORED}: "auto" leaves a draft that is {kind}')
    on = device_of(config.device, target)
    run_in, ops = dtype_of(config.dtype, draft.spec, on), ops_for(on)
    if not any(ops.keeps_codes(_SOME, some, run_in, on) for form in FORMATS if (some := kind_for(form, _SOME))):
        return replace(draft, stored=f'{AS_STORED}: "auto" found that {_ALIKE}')
    made: dict[CodeFormat | None, Checkpoint | HeadCheckpoint] = {form: rounded_to(draft, form) for form in FORMATS}
    made[None] = draft
    unread = 0  # bytes that a pass does not read: the head's own embedding
    if isinstance(draft, HeadCheckpoint) and draft.spec.own_embed:
        unread = run_in.itemsize * math.prod(draft.spec.tensors["embed_tokens.weight"])
    sizes = {form: one.bytes_loaded(run_in, on, ops) - unread for form, one in made.items()}
    best = best_of(sizes, config.max_batch_size) if sizes[None] >= LEAST else None
    if best is None:
        why = (
            f"at {config.max_batch_size} rows it is fastest"
            if sizes[None] >= LEAST
            else "reading so few bytes takes almost no time"
        )
        why = _ALIKE if min(sizes.values()) == sizes[None] else why
        return replace(draft, stored=f'{AS_STORED}, {sizes[None] / 2**20:.0f} MiB a pass: "auto" found that {why}')
    text = (
        f'; chosen by "auto": {sizes[best] / 2**20:.0f} MiB a pass, and {sizes[None] / 2**20:.0f} MiB as it is stored'
    )
    rounded = replace(made[best], stored=made[best].stored + text)
    return replace(rounded, chosen=True) if isinstance(rounded, Checkpoint) else rounded


def _never_rounded(draft: Checkpoint | HeadCheckpoint, *, ours: bool) -> str:
    """Returns the reason why a draft must keep its stored format. An empty text: it may be quantised.

    Args:
        draft: checkpoint of the draft.
        ours: True if fastspec's own kernels run the models, in this process alone.
    """
    if not ours:
        return "compiled by torch, or beside a target that ranks share"
    if isinstance(draft, HeadCheckpoint):
        return "a mixture of experts" if draft.spec.decoder.routed_elements else ""
    if draft.spec.hosting:
        return "hosted"
    if draft.native.routed_elements:
        return "a mixture of experts"
    return ""


def best_of(sizes: Mapping[CodeFormat | None, int], rows: int) -> CodeFormat | None:
    """Returns the weight format with the shortest estimated pass. None: the stored format is as fast or faster.

    Args:
        sizes: format -> bytes of the weights in that format. The key None is the stored format.
        rows: number of rows (tokens) of the matrix products of a pass.
    """
    return min(sizes, key=lambda form: (sizes[form] / share(form, rows), form is not None))


def share(form: CodeFormat | None, rows: int) -> float:
    """Returns the share (0 to 1) of an H100's memory bandwidth that matrix products reach.

    Args:
        form: format of the weights. None: the format as stored, 16 bits.
        rows: number of rows (tokens) of the products.
    """
    return next((value for up_to, value in SHARES[form] if rows <= up_to), SHARES[form][-1][1])
