"""Quantised copies of a checkpoint, written as the tools that publish them write them, and the values they mean.

Compressed-tensors ones by its own compressors; AWQ, GPTQ, fp8 and ModelOpt ones by packers written from their layouts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]
Written = tuple[Parts, Tensor]  # the parts of a matrix, and its values
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns lies in nibble i


def write(
    source: Path, path: Path, settings: dict[str, Any], pack: Callable[[Tensor], Written], *, keep: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """A copy of a checkpoint whose linear layers, but for those named in `keep`, are packed; returns what they mean."""
    shutil.copytree(source, path)
    stored, meant = load_file(source / "model.safetensors"), {}
    packed: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or "proj" not in name or any(each in name for each in keep):
            packed[name] = meant[name] = tensor
            continue
        parts, values = pack(tensor)
        packed |= {f"{module}.{part}": each for part, each in parts.items()}
        meant[name] = values.to(tensor.dtype).contiguous()
    save_file(
        {name: each.contiguous() for name, each in packed.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return meant


def compressed(layout: str, **arguments: Any) -> tuple[dict[str, Any], Callable[[Tensor], Written]]:
    """Settings, and a packer, of compressed-tensors' own compressor for this layout and these arguments of weights."""
    pytest.importorskip("compressed_tensors", reason="its own compressors write these")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def pack(weight: Tensor) -> Written:
        rows, columns = weight.shape
        blocks = _blocks(weight, arguments)
        low, high = blocks.amin(-1), blocks.amax(-1)
        state, overall = {"weight": weight}, None
        if args.strategy == "tensor_group":
            overall = (448.0 * 6.0 / weight.abs().max()).float().reshape(1)
            state["weight_global_scale"] = overall
        scale, zero = calculate_qparams(low, high, args, global_scale=overall)
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        parts = compressor.compress(state, scheme)
        values = compressor.decompress(parts, scheme)["weight"]
        assert values.shape == (rows, columns)
        if overall is not None:  # computed there in bf16, with two or three roundings of 2^-9
            codes = unpack_fp4_from_uint8(parts["weight_packed"], rows, columns, dtype=torch.float32)
            wide = codes * (parts["weight_scale"].float() / overall).repeat_interleave(16, 1)
            assert bool(((wide - values).abs() <= 2**-7 * wide.abs()).all())
            values = wide
        return parts, values

    weights = args.model_dump(mode="json", exclude_none=True)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    settings = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*down_proj"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }
    return settings, pack


def _blocks(weight: Tensor, arguments: dict[str, Any]) -> Tensor:
    """What shares a scale, along the last dimension."""
    strategy = arguments["strategy"]
    if strategy == "tensor":
        return weight.reshape(1, -1)
    if strategy == "channel":
        return weight[:, None, :]
    if strategy == "block":
        rows, columns = arguments["block_structure"]
        n, k = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
        return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    return weight.unflatten(1, (-1, arguments["group_size"]))


def fp8_blocks(weight: Tensor) -> Written:
    """`quant_method: fp8` in blocks of 128 x 128, of which those at the edges are partial."""
    blocks = _blocks(weight, {"strategy": "block", "block_structure": (128, 128)})
    scales = (blocks.abs().amax(-1).float() / 448).clamp(min=1e-12)
    each = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
    codes = (weight.float() / each).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * each


def fp8_tensor(weight: Tensor) -> Written:
    """One scale for all, and one of activations."""
    scale = weight.abs().max().float() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, codes.float() * scale


def fp8_of_transformers(weight: Tensor) -> Written:
    """As `fp8_tensor`, under the names of transformers 5."""
    names = {"weight": "weight", "weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    parts, values = fp8_tensor(weight)
    return {names[name]: each for name, each in parts.items()}, values


def modelopt_fp4(weight: Tensor) -> Written:
    """ModelOpt's NVFP4: e4m3 scales of 16 values, and an fp32 one that multiplies."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    overall = weight.abs().max().float() / (448 * 6)
    groups = weight.float().unflatten(1, (-1, 16))
    scales = (groups.abs().amax(-1) / 6 / overall).to(torch.float8_e4m3fn)
    wide = scales.float() * overall
    nearest = ((groups / wide[..., None].clamp(min=1e-12)).abs()[..., None] - table).abs().argmin(-1)
    values = table[nearest] * groups.sign() * wide[..., None]
    codes = (nearest + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    parts = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales, "weight_scale_2": overall}
    return {**parts, "input_scale": torch.tensor(0.5)}, values.flatten(1)


def _affine(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], scales fp16 [K/G, N] and zero points [K/G, N]."""
    most = (1 << bits) - 1
    groups = weight.float().t().unflatten(0, (-1, group))  # [K/G, G, N]
    low, high = groups.amin(1), groups.amax(1)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / most).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, most)
    if symmetric:
        zeros = torch.full_like(zeros, (most + 1) / 2)
    codes = ((groups / scales.float()[:, None]).round() + zeros[:, None]).clamp(0, most)
    return codes.flatten(0, 1).to(torch.int64), scales, zeros.to(torch.int64)


def _words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int64 [..., W * 32 / bits] -> int32 [..., W], the first in the lowest bits, or those of `order`."""
    per_word = 32 // bits
    lanes = values.unflatten(-1, (-1, per_word))
    if order is not None:
        lanes = lanes[..., list(order)]
    words = sum(lanes[..., lane] << bits * lane for lane in range(per_word))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _meant(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    wide = (codes.unflatten(0, (-1, group)) - zeros[:, None]).float() * scales.float()[:, None]
    return wide.flatten(0, 1).t()


def awq(group: int) -> Callable[[Tensor], Written]:
    def pack(weight: Tensor) -> Written:
        codes, scales, zeros = _affine(weight, 4, group, symmetric=False)
        parts = {"qweight": _words(codes, 4, AWQ_COLUMNS), "qzeros": _words(zeros, 4, AWQ_COLUMNS), "scales": scales}
        return parts, _meant(codes, scales, zeros, group)

    return pack


def gptq(bits: int, group: int, *, symmetric: bool, v2: bool) -> Callable[[Tensor], Written]:
    def pack(weight: Tensor) -> Written:
        codes, scales, zeros = _affine(weight, bits, group, symmetric)
        stored = zeros if v2 else zeros - 1 & (1 << bits) - 1
        parts = {
            "qweight": _words(codes.t(), bits).t(),
            "qzeros": _words(stored, bits),
            "scales": scales,
            "g_idx": (torch.arange(weight.shape[1]) // group).int(),
        }
        return parts, _meant(codes, scales, zeros, group)

    return pack
