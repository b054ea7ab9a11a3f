"""Launch entries of the prompt's product, for `compile_kernels`."""

from __future__ import annotations

from collections.abc import Iterator

from fastspec.kernels.linear import prefill
from tests.helpers.budgets import SHARED_LIMIT
from tests.helpers.compile_kernels import Entry


def entries(arch: int) -> Iterator[Entry]:
    """(kernel, signature, constants, options, element size): the tiles of a device, whole, gated and masked."""
    table = next(table for least, table in prefill.LAUNCH.items() if SHARED_LIMIT[arch] >= least)
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "out_ptr"), "*bf16")
    for _, each in table:
        tile = {"BLOCK_M": each.block_m, "BLOCK_N": each.block_n, "BLOCK_K": each.block_k, "GROUP": prefill.GROUP}
        options = {"num_warps": each.num_warps, "num_stages": each.num_stages}
        for width, gated in ((4096, False), (4096, True), (4112, False)):
            missing = dict.fromkeys(("bias_ptr", "residual_ptr")) if gated else {}
            signature = {name: kind for name, kind in pointers.items() if name not in missing} | {"num_rows": "i32"}
            constants = {"N": width, "K": 4096, "GATED": gated, **tile, **missing}
            yield prefill._prefill_kernel, signature, constants, options, 2
    signature = {**dict.fromkeys(("x_ptr", "gamma_ptr", "out_ptr"), "*bf16"), "eps": "fp32"}
    yield prefill._rms_norm_kernel, signature, {"K": 4096, "BLOCK": 4096}, {"num_warps": 4}, 2
