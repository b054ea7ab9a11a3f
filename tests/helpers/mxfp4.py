"""Tiny checkpoints of gpt-oss whose experts are stored in mxfp4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fastspec.kernels.common.codes import E2M1

FILE = "model.safetensors"


def rewritten(path: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    """Tensors in place of those of a directory, and other fields of its config."""
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / FILE, {"format": "pt"})
    if config:
        raw = json.loads((path / "config.json").read_text()) | config
        (path / "config.json").write_text(json.dumps(raw))


def in_mxfp4(tensors: dict[str, Tensor], seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The experts of gpt-oss as random codes and scales, and the same values as 16-bit checkpoints have them."""
    generator = torch.Generator().manual_seed(seed)
    stored, plain = dict(tensors), dict(tensors)
    table = torch.tensor([*E2M1, *(-each for each in E2M1)])
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        count, width, rows = tensors[name].shape
        codes = torch.randint(16, (count, rows, width), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, (count, rows, width // 32), generator=generator, dtype=torch.uint8)
        values = table[codes.long()] * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
        pairs = codes.unflatten(-1, (width // 32, 16, 2))
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = pairs[..., 0] | pairs[..., 1] << 4, scales
        del stored[name]
        plain[name] = values.transpose(1, 2)
    return stored, plain


MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
