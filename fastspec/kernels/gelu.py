"""gelu(gate) * up in one launch, for matrix products whose epilogue does not compute it.

| argument | shape, dtype                       | notes                                                     |
|----------|------------------------------------|-----------------------------------------------------------|
| gate_up  | [..., 2 I] bf16, fp16 or fp32      | gate first; or 8 columns of gate and 8 of up, alternating |
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch

BLOCK = 1024
ROOT = tl.constexpr((2 / 3.141592653589793) ** 0.5)


@triton.jit
def _gelu_kernel(
    gate_up_ptr, out_ptr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Computes BLOCK columns of one row of gelu(gate) * up. WIDTH: number of columns of the result.

    INTERLEAVED: True if 8 columns of the gate and 8 of up alternate. Otherwise all gate columns come first.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    place = at + at // 8 * 8 if INTERLEAVED else at
    behind = 8 if INTERLEAVED else WIDTH
    gate = tl.load(gate_up_ptr + row * (2 * WIDTH) + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * WIDTH) + behind + place, mask=inside, other=0.0).to(tl.float32)
    inner = ROOT * (gate + 0.044715 * gate * gate * gate)
    activated = gate / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh(inner)) / 2
    activated = activated.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, (activated * up).to(out_ptr.dtype.element_ty), mask=inside)


def gelu_tanh_mul(gate_up: Tensor, *, interleaved: bool = False) -> Tensor:
    """Computes gelu(gate) * up with the tanh formula of GELU, as `Ops.gelu_tanh_mul`, with a Triton kernel in fp32.

    Args:
        gate_up: [..., 2 I].
        interleaved: True if 8 columns of the gate and 8 of up alternate, as the rows of a packed gated weight do.

    Returns:
        [..., I] in gate_up's dtype.
    """
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width).contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    if len(rows) > 0:
        grid = (len(rows), triton.cdiv(width, BLOCK))
        launch(
            _gelu_kernel,
            grid,
            rows,
            out,
            WIDTH=width,
            INTERLEAVED=interleaved,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
