"""Compiles what groups of calls launch on one CUDA architecture, without a GPU; prints a JSON line each.

Usage: python -m tests.helpers.compile_launches 90 attention_long
       python -m tests.helpers.compile_launches 86 attention_long,steps 80    without the launches of sm_80
       python -m tests.helpers.compile_launches 80 steps,prompts --sample     one launch of each kind
       python -m tests.helpers.compile_launches 90 steps --sample prompts     of kinds that the last ones do not have
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tests.helpers import recorder
from tests.helpers.compile_some import kind
from tests.helpers.launches import GROUPS
from tests.helpers.machine_code import assembled, one_by_one, spilled_bytes
from tests.helpers.recorder import Launch, first_of_each

MMA = ("mma.sync", "wgmma", "tcgen05.mma")
PACKED = ("products", "tails")  # groups of the packed products
SIZES = {"K", "KT", "M", "N", "OWN", "S", "STAGES"}  # how often a packed product does what it does
FUSED = {"DTYPE", "GATED", "PAIRWISE", "PDL", "REGROUP", "STAY"}  # what it does with its sums


def report(launch: Launch, arch: int) -> dict[str, Any]:
    """What a launch is, and what its machine code is made of."""
    (code, said), arguments = assembled(lambda: recorder.compiled(launch)), launch.arguments
    ptx, out = code.asm["ptx"], arguments.get("out_ptr", arguments.get("out"))
    return {
        "call": launch.call,
        "kernel": launch.name,
        "element": element(launch),
        "constants": {name: value for name, value in launch.constants.items() if not isinstance(value, tuple)},
        "programs": math.prod(launch.grid),
        "registers": launch.options.get("maxnreg"),
        "threads": 32 * code.metadata.num_warps,
        "shared": code.metadata.shared,
        "spills": spilled_bytes(code.asm["cubin"]),
        "one_by_one": one_by_one(ptx, arch, said),
        "mma": any(kind in ptx for kind in MMA),
        "tf32": "tf32" in ptx,
        "waits_first": 0 <= ptx.find("griddepcontrol.wait") < ptx.find("griddepcontrol.launch_dependents"),
        "vector": ".v4.b32" in ptx or "cp.async.cg.shared.global [" in ptx,
        "apart": arguments.get("parts_ptr") is not None,
        "last": out is not None and out.dtype.itemsize > 2,
        "norm": arguments.get("gamma_ptr") is not None,
        "factors": arguments.get("squares_ptr") is not None,
        "narrow_waits": len(re.findall(r"ld\.volatile\.global\.b", ptx)),
        "bf16": out is not None and out.dtype == torch.bfloat16,
    }


def element(launch: Launch) -> int:
    """Bytes of the smallest elements of a launch that are floating-point numbers. 8 if it has none."""
    tensors = [getattr(value, "base", value) for value in launch.arguments.values()]  # of a descriptor its tensor
    sizes = [each.element_size() for each in tensors if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return min(sizes, default=8)


def order(launch: Launch) -> list[str]:
    """What the order of a product's sums follows from: its matrix instructions, or where they reduce in fp32."""
    code = recorder.compiled(launch).asm
    if launch.name.startswith(("tile_", "expert_")):
        return sorted(set(re.findall(r"(?:wgmma|tcgen05)\.mma[\w.:]*|mma\.sync[\w.:]*", code["ptx"])))
    return _reductions(code["ttgir"])


def _reductions(ttgir: str) -> list[str]:
    """How the numbers that sums over threads are made of lie in them: the layouts of fp32 operands of reductions."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    operands = re.findall(r"\}\) : \(tensor<\d+x(\d+)xf32, (#\w+)>\) ->", ttgir)
    assert operands
    assert "convert_layout" not in ttgir[ttgir.index("scf.for") : ttgir.index("scf.yield")]
    return sorted({f"{size} {layouts[name]}" for size, name in operands})


def of_keys(launch: Launch) -> list[str]:
    """How the elements of a key lie in threads where they are added up: what a token's bits follow from.

    Each is elements of a thread, threads of a warp, and warps, along the key.
    """
    ttgir, keys = recorder.compiled(launch).asm["ttgir"], launch.constants["KEY_DIM"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    wide = 1 << (keys - 1).bit_length()
    operands = re.findall(rf"\}}\) : \(tensor<\d+x{wide}xf32, (#\w+)>\) ->", ttgir)
    return sorted({" ".join(re.findall(r"\[\d+, (\d+)\]", layouts[name])[:3]) for name in operands})


def packed_facts(kernel: str, ptx: str) -> dict[str, Any]:
    """Of a kernel of the packed products: when it waits, and how it reads weights."""
    wait, next_one = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
    before = ptx[: max(wait, 0)]
    if kernel == "tma_kernel":  # the warps that multiply wait for what is fetched: their code may stand in front
        before = before[before.rfind("st.global") + 1 :]
    found = {
        "starts_early": wait > 0,
        "lets_next": "no" if next_one < 0 else "first" if next_one < wait else "later",
        "stays": re.search(r"st\.global\.L1::evict_last\.L2::cache_hint", ptx) is not None,
        "waits": ptx.count("griddepcontrol.wait"),
        "single_stores": len(re.findall(r"st\.global[\w.:]*\.b16", ptx)),
        "product": kernel in ("few_rows_kernel", "many_rows_kernel", "tma_kernel"),
    }
    if not found["product"]:
        return found
    weights = r"ld\.global\.L1::evict_first\.L2::cache_hint\.v4\.b32|cp\.async\.cg\.shared\.global [^;]*, 0x10"
    weights += r"|cp\.async\.bulk\.tensor\.3d"
    return found | {
        "mma": re.search(r"mma.sync.aligned.m16n8k16|wgmma.mma_async.sync.aligned.m64n\d+k16", ptx) is not None,
        "wide_loads": len(re.findall(weights, ptx)),
        "narrow_loads": len(re.findall(r"evict_first\.L2::cache_hint\.(?:v2\.)?b32|cp\.async\.ca", ptx)),
        "weights_before": len(re.findall(weights, before)),
        "others_before": len(re.findall(r"ld\.global(?!\.L1::evict_first)|bulk\.tensor\.2d", before)),
    }


def recorded(arch: int, group: str) -> Iterator[Launch]:
    """The launches of a group, each that runs other code than those before it."""
    recorder.use(recorder.cuda(arch))
    yield from first_of_each(recorder.record(arch, lambda: GROUPS[group](arch)), recorder.specialised)


def kinds(launch: Launch) -> set[object]:
    """What a sample of launches has one of: kernels, by type and size of their elements."""
    return {(kind(launch), element(launch))}


def parts(launch: Launch) -> set[object]:
    """What a sample of packed products has one of: tiles, and what is done with their sums."""
    tile, fused = [("warps", launch.options.get("num_warps"))], list[tuple[str, object]]()
    tile.append(("registers", launch.options.get("maxnreg")))
    for name, value in launch.arguments.items():
        if name.endswith("_desc"):  # a tile has one for each width that it is made of
            tile.append((name, value is not None))
        elif not name.isupper():
            fused.append((name, value is not None))
        elif name not in SIZES:
            (fused if name in FUSED else tile).append((name, str(value)))
    return {(launch.name, *tile), (launch.name, *fused)}


def sample(arch: int, groups: list[str], beside: list[str]) -> Iterator[tuple[str, Launch]]:
    """(group, launch) of launches of a kind that no earlier one has, nor one of the groups `beside`."""
    seen = set[object]()
    for group in (*beside, *groups):
        for launch in recorded(arch, group):
            found = parts(launch) if group.startswith(PACKED) else kinds(launch)
            if group in groups and not found <= seen:
                yield group, launch
            seen |= found


def main() -> None:
    arch, groups, more = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    if more[:1] == ["--sample"]:
        for group, launch in sample(arch, groups, more[1].split(",") if more[1:] else []):
            describe(launch, arch, group)
        return
    others = map(int, more)
    known = {recorder.specialised(launch) for other in others for group in groups for launch in recorded(other, group)}
    for group in groups:
        for launch in recorded(arch, group):
            if recorder.specialised(launch) not in known:
                describe(launch, arch, group)


def describe(launch: Launch, arch: int, group: str) -> None:
    """Prints what one launch compiles to."""
    found = report(launch, arch)
    if group.startswith(PACKED) or group == "quantised":
        found |= packed_facts(launch.name, recorder.compiled(launch).asm["ptx"])
    if group == "portable_whole":
        product = launch.name not in ("norm_kernel", "_norm_kernel")
        found["order"] = order(launch) if product else None
    if group == "experts":
        found["order"] = order(launch) if launch.name == "expert_kernel" and found["element"] == 2 else None
    if launch.name == "_delta_kernel":
        found["order"] = of_keys(launch)
    if launch.name == "_hopper_kernel":
        ptx = recorder.compiled(launch).asm["ptx"]
        found["mma"] = f"wgmma.mma_async.sync.aligned.m64n{launch.arguments['COLUMNS']}k16" in ptx
        found["vector"] = "st.global.v4.b32" in ptx and "st.global.b" not in ptx
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
