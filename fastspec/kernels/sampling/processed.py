"""Processed logits in three launches: after logit processors, temperature, top-k, top-p and min-p.

Rows sample from their softmax, and may have their log-probabilities recorded. The definition is
`reference.processed_logits`. distribution.py finds the distribution of each logits row. Then a CTA takes CHUNK ids of a
logits row. It stores their scaled logits, and -inf for ids that top-k, top-p or min-p removes. Logits of rows whose
`processed` is False are copied. Each logits row of the result depends only on the same one of the input.

| argument | shape, dtype     | notes                                                       |
|----------|------------------|-------------------------------------------------------------|
| logits   | [B, k+1, V] fp32 | V < 2^19; contiguous, or positions at one common stride     |
| work     | sampled_work     | counters are zero between launches                          |
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch
from fastspec.kernels.reference.sampled import SampledRows
from fastspec.kernels.sampling import logits as sampled_parts
from fastspec.kernels.sampling.distribution import find_distributions, load_distribution
from fastspec.kernels.sampling.logits import GREEDY, RECORD, check_source, kept, key_of, scaled, view_of

LAUNCH = {"num_warps": 8}
_RECORD = tl.constexpr(RECORD)


@triton.jit(do_not_specialize=["places", "first"])
def _processed_kernel(
    source,
    processed_ptr,
    records_ptr,
    out_ptr,
    places,
    first,
    CHUNK: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, line = tl.program_id(0), tl.program_id(1)
    row, place = (line // places).to(tl.int64), first + line % places
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    known, vocab = index < source.vocab, source.vocab
    x = tl.load(source.logits + line * tl.cast(source.logits_stride, tl.int64) + index, mask=known, other=0.0)
    if tl.load(processed_ptr + row) != 0:
        dist = load_distribution(records_ptr + line * _RECORD)
        x = scaled(view_of(source, line, row, place), index, STOPS)
        if dist.kind < GREEDY:
            mass = tl.exp(x - dist.largest)
            keeps = kept(key_of(x), index, mass, dist.key, dist.cut, tl.load(source.min_p + row))
            x = tl.where(keeps, x, -float("inf"))
    tl.store(out_ptr + line.to(tl.int64) * vocab + index, x, mask=known)


def processed_logits(logits: Tensor, rows: SampledRows, work: Any) -> Tensor:
    """Returns the logits [B, k+1, V] from whose softmax rows sample, as `reference.processed_logits`.

    Raises:
        ValueError: a layout other than in the table above, or the scratch memory is too small.
    """
    check_source(logits, rows, work)
    batch, places, vocab = logits.shape
    find_distributions(logits, rows, work)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    launch(
        _processed_kernel,
        (triton.cdiv(vocab, sampled_parts.CHUNK), batch * places),
        sampled_parts.source_of(logits, rows),
        *(rows.processed, work.records, out),
        *(places, 0),
        CHUNK=sampled_parts.CHUNK,
        STOPS=rows.stop_ids.shape[1],
        **LAUNCH,
        **sampled_parts.OPTIONS,
    )
    return out
