"""Tiny mixtures with quantised experts, under the names and settings with which their publishers write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.helpers import quantised
from tests.helpers.hybrid import make_hybrid, make_states, save_published
from tests.helpers.mxfp4 import FILE, rewritten

Pack = Callable[[str], Callable[[Tensor], quantised.Written] | None]  # by module; None: it stays as it is
Made = tuple[dict[str, Any], Pack]
QWEN = "model.language_model.layers."
SIZES = {
    **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4},
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


def _experts(pack: Callable[[Tensor], quantised.Written]) -> Pack:
    return lambda module: pack if ".experts." in module else None


def fp8() -> Made:
    """Qwen3.5-35B-A3B-FP8: blocks, in attention and experts."""
    kept = ["lm_head", "model.visual", "mtp.fc"]
    for layer in range(4):
        kept += [f"{QWEN}{layer}.mlp.{part}" for part in ("gate", "shared_expert_gate")]
        kept += [f"{QWEN}{layer}.linear_attn.{part}" for part in ("conv1d", "in_proj_a", "in_proj_b")]
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}

    def pack(module: str) -> Callable[[Tensor], quantised.Written] | None:
        left = "mtp" in module or "visual" in module or "norm" in module
        return None if left or module in kept or "_proj" not in module else quantised.fp8_blocks

    return {**settings, "modules_to_not_convert": kept}, pack


def gptq() -> Made:
    """Qwen3.5-35B-A3B-GPTQ-Int4: only routed experts are quantised."""
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    left = ("attn", "shared_expert", "mtp", "visual")
    dynamic = {"lm_head": {}, **{f"-:.*{part}.*": {} for part in left}}
    return {**settings, "dynamic": dynamic}, _experts(quantised.gptq(4, 32, symmetric=True, v2=False))


def awq() -> Made:
    """AWQ, whose zero points differ."""
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return settings, _experts(quantised.awq(32))


def nvfp4() -> Made:
    """Qwen3.5-35B-A3B-NVFP4 of ModelOpt."""
    ignored = ["lm_head", "mtp*", "model.visual*", *(f"{QWEN}{layer}.linear_attn*" for layer in range(4))]
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "ignore": ignored}
    return {**settings, "config_groups": {}}, _experts(quantised.modelopt_fp4)


def mixed() -> Made:
    """NVIDIA-Nemotron-3 of ModelOpt: experts in NVFP4, shared experts and Mamba's products in FP8."""

    def pack(module: str) -> Callable[[Tensor], quantised.Written] | None:
        if ".experts." in module:
            return quantised.modelopt_fp4
        return quantised.fp8_tensor if ".shared_experts." in module or ".in_proj" in module else None

    layers = {f"backbone.layers.{at}.mixer.in_proj": {"quant_algo": "FP8"} for at in (0, 4)}
    for at in (1, 5):
        layers[f"backbone.layers.{at}.mixer.shared_experts.up_proj"] = {"quant_algo": "FP8"}
        layers[f"backbone.layers.{at}.mixer.shared_experts.down_proj"] = {"quant_algo": "FP8"}
        layers |= {
            f"backbone.layers.{at}.mixer.experts.{expert}.{part}_proj": {"quant_algo": "NVFP4", "group_size": 16}
            for expert in range(6)
            for part in ("up", "down")
        }
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    return {**settings, "quantized_layers": layers, "ignore": ["lm_head", "backbone.layers.2.mixer*"]}, pack


FORMS: dict[str, Callable[[], Made]] = {"fp8": fp8, "gptq": gptq, "awq": awq, "nvfp4": nvfp4, "mixed": mixed}


def save(form: str, path: Path, std: float = 0.3, **sizes: Any) -> tuple[Path, Path]:
    """Writes a model twice: quantised, and with the values that the codes mean. Returns both directories."""
    if form == "mixed":
        live = make_states("nemotron_h", std=std, **{"moe_intermediate_size": 64, **sizes})
        live.save_pretrained(path / "quantised")
    else:
        live = make_hybrid("qwen3_5_moe", std=std, **{**SIZES, **sizes})
        save_published(live, path / "quantised")
    tensors = _apart({_published(form, name): each for name, each in load_file(path / "quantised" / FILE).items()})
    shutil.copytree(path / "quantised", path / "meant")
    (settings, pack), packed, meant = FORMS[form](), {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        packer = pack(module) if name.endswith(".weight") and tensor.dim() == 2 else None
        if packer is None:
            packed[name] = meant[name] = tensor
            continue
        parts, values = packer(tensor)
        packed |= {f"{module}.{part}": each for part, each in parts.items()}
        meant[name] = values.float()
    rewritten(path / "quantised", packed, quantization_config=settings)
    rewritten(path / "meant", meant)
    return path / "quantised", path / "meant"


def _published(form: str, name: str) -> str:
    """The name of a tensor of Nemotron as it is published."""
    if form != "mixed":
        return name
    for here, there in (
        ("model.", "backbone."),
        ("embed_tokens", "embeddings"),
        ("backbone.norm.", "backbone.norm_f."),
    ):
        name = name.replace(here, there)
    return name


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every expert's matrices under their own names."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name or tensor.dim() != 3:
            found[name] = tensor
            continue
        at, _, part = name.rpartition(".")
        for expert, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if part == "gate_up_proj" else (matrix,)
            for half, piece in zip(("gate_proj", "up_proj") if len(halves) == 2 else (part,), halves, strict=True):
                found[f"{at}.{expert}.{half}.weight"] = piece.clone()
    return found


def config_of(path: Path) -> dict[str, Any]:
    """Returns the config of a directory."""
    raw: dict[str, Any] = json.loads((path / "config.json").read_text())
    return raw
