"""Checkpoints of real shape without weights: files that take no room on disk, and values drawn on the device.

A step's time depends on shapes, not on values. So a generator of an 8B, or of a mixture of 61 GB, is made in seconds.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from fastspec.models.checkpoints import weight_loader
from fastspec.models.checkpoints.safetensors_files import SINGLE, ShardTensors

STD = 0.02  # of drawn matrices
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}
SCALE = 120  # exponent byte of every block of mxfp4: 2^-7, so that values are about as large as others
BLOCK = 32  # values with one scale
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def shapes_of(config: PretrainedConfig, dtype: torch.dtype, *, mxfp4: bool = False) -> Shapes:
    """Name, shape and dtype of each stored tensor of a model.

    Args:
        config: of the model.
        dtype: of the weights.
        mxfp4: True if experts are stored as gpt-oss's are: codes in blocks, and a scale for each block.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        if mxfp4 and name.endswith(("gate_up_proj", "down_proj")):
            count, width, rows = tensor.shape
            found[f"{name}_blocks"] = (count, rows, width // BLOCK, BLOCK // 2), torch.uint8
            found[f"{name}_scales"] = (count, rows, width // BLOCK), torch.uint8
        else:
            found[name] = tuple(tensor.shape), dtype
    return found


def write(directory: Path, config: Mapping[str, Any], shapes: Shapes, values: Mapping[str, Tensor]) -> Path:
    """Writes config.json, and a file of weights whose tensors are holes.

    Args:
        directory: is made.
        config: contents of config.json.
        shapes: tensors without values.
        values: small tensors that are stored, and read as they are.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    stored = save(dict(values), {"format": "pt"})
    size = int.from_bytes(stored[:8], "little")
    head, data = json.loads(stored[8 : 8 + size]), stored[8 + size :]
    end = len(data)
    for name, (shape, dtype) in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        head[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    told = json.dumps(head).encode()
    with (directory / SINGLE).open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told + data)
        file.truncate(8 + len(told) + end)
    assert tensors_of(stored).keys() == values.keys()
    return directory


@contextmanager
def drawn(device: torch.device | str) -> Iterator[None]:
    """Context in which matrices of checkpoints are drawn on the device instead of read from their files.

    Vectors are 1, as weights of norms. Integers that are no codes are read. A stack of experts, which is read once for
    each of them, is drawn once.
    """
    read, local = ShardTensors.read, threading.local()

    def value(tensors: ShardTensors, name: str) -> Tensor:
        """The tensor of a name."""
        shape, dtype = tensors.infos()[name].shape, tensors.infos()[name].dtype
        if dtype not in (torch.bfloat16, torch.float32, torch.uint8):
            return read(tensors, name)
        if not hasattr(local, "generator"):
            local.generator = torch.Generator(device).manual_seed(0)
        if dtype == torch.uint8:
            if name.endswith("_scales"):
                return torch.full(shape, SCALE, dtype=dtype, device=device)
            return torch.randint(256, shape, dtype=dtype, device=device, generator=local.generator)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        if len(shape) > 2 and getattr(local, "stack", (None, None))[0] == (tensors.directory, name):
            found: Tensor = local.stack[1]
            return found
        found = torch.empty(shape, dtype=dtype, device=device).normal_(0, STD, generator=local.generator)
        if len(shape) > 2:
            local.stack = (tensors.directory, name), found
        return found

    def part(tensors: ShardTensors, name: str, rows: slice, columns: slice) -> Tensor:
        """A part of it."""
        found = value(tensors, name)
        return found[(rows, columns)[: found.dim()]]

    def copy(staging: Any, place: Tensor, stored: Tensor) -> None:
        """Copies on the device, without the pinned memory of a file's values."""
        place.copy_(stored)

    with (
        mock.patch.object(ShardTensors, "read", value),
        mock.patch.object(ShardTensors, "read_part", part),
        mock.patch.object(weight_loader._Staging, "copy", copy),
    ):
        yield
