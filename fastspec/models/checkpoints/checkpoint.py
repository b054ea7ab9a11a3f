"""A checkpoint that has been found and checked: its spec, and the place of its weights. Nothing is loaded here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from fastspec.distributed.slices import RankShare
from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.quantised.configs import Quantisation
from fastspec.models.checkpoints.quantised.tensors import CacheScales
from fastspec.models.config import ModelSpec
from fastspec.models.hosted.info import HostedInfo

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from fastspec.kernels.common.codes import CodeFormat
    from fastspec.kernels.ops import Ops


ByteCount = Callable[["Checkpoint", torch.dtype, torch.device, "Ops"], int]


class Sliced(NamedTuple):
    """The part of a checkpoint that one rank loads.

    Attributes:
        share: its part.
        spec: of the whole model.
        unit: columns of experts that stay together, as packed weights need them.
    """

    share: RankShare
    spec: ModelSpec
    unit: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One resolved source of a model: its spec, and the place of its weights.

    Attributes:
        name: path, Hub id or class name, for messages.
        role: "target" or "draft".
        spec: the checked config: a `ModelSpec`, or a `HostedInfo` where transformers' own module is run.
        directory: local files, or None for a live module.
        module: the caller's live transformers model, or None.
        generation_config: a private copy of the checkpoint's generation settings.
        quantisation: how its matrices are stored where they are quantised; None: as the config's dtype.
        stored: that in words.
        cache_scales: of 8-bit K and V, by layer, where they are stored; used where K and V are kept in 8 bits.
        rounded, chosen: what matrices are rounded to when they are loaded, None: nothing; whether by choice of "auto".
        sliced: what of it one rank of several loads, which `spec` then describes; None: all of it.
        mtp: MTP layers lie beside the model.
        count: computes `bytes_loaded`.
    """

    name: str
    role: str
    spec: ModelSpec | HostedInfo
    directory: Path | None
    module: nn.Module | None
    generation_config: GenerationConfig | None
    quantisation: Quantisation | None = None
    stored: str = ""
    cache_scales: Mapping[int, CacheScales] = field(default_factory=dict)
    rounded: CodeFormat | None = None
    chosen: bool = False
    sliced: Sliced | None = None
    mtp: bool = False
    count: ByteCount = field(kw_only=True)

    def bytes_loaded(self, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
        """Bytes that its weights take on a device, as `ops` store them, with activations of `dtype`."""
        return self.count(self, dtype, device, ops)

    @property
    def ranks(self) -> int:
        """Processes that share it."""
        held = self.spec.cut if isinstance(self.spec, HostedInfo) else self.sliced
        return 1 if held is None else held.share.size

    @property
    def native(self) -> ModelSpec:
        """The spec of a model that our decoder runs; UnsupportedModel where it is hosted."""
        if not isinstance(self.spec, ModelSpec):
            raise UnsupportedModel(f"{self.name}: is hosted, and has no weights of the decoder's own")
        return self.spec
