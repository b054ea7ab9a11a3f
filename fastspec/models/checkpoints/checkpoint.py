"""Description of a checkpoint that was found and checked: its spec, and the location of its weights. Loads nothing."""

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
    from fastspec.models.checkpoints.gguf.header import GgufHeader


ByteCount = Callable[["Checkpoint", torch.dtype, torch.device, "Ops"], int]


class Sliced(NamedTuple):
    """Part of a checkpoint that one rank of a tensor-parallel group loads.

    Attributes:
        share: index of this rank, number of ranks, and the rule by which ranks cut the axes of tensors.
        spec: spec of the whole model.
        unit: number of columns that kernels read together. The columns of an expert are cut at multiples of it.
    """

    share: RankShare
    spec: ModelSpec
    unit: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Checkpoint or live module of one model, found and checked: its spec, and the location of its weights.

    Attributes:
        name: path, Hub id or class name, for messages.
        role: "target" or "draft".
        spec: sizes and arithmetic of the model: a `ModelSpec`, or a `HostedInfo` if transformers' own module is run.
        directory: local directory with the files. None for a live module, and for a GGUF file.
        module: the user's live transformers model, or None.
        generation_config: a private copy of the checkpoint's generation settings.
        quantisation: quantised formats of the stored matrices. None: not quantised, or a GGUF file.
        stored: text for messages. It names the quantised format of the matrices: either the stored one, or the one to
            which they are quantised while they are loaded, with the reason. Empty: not quantised.
        cache_scales: index of a layer -> stored scales of 8-bit K and V. They are used if the KV cache has 8 bits.
        rounded: format to which matrices are quantised while they are loaded. None: they are loaded as stored.
        chosen: True if `draft_quantization="auto"` chose the format in `rounded`.
        sliced: the part of the model that one rank loads. Then `spec` describes this part. None: the whole model.
        mtp: True if the checkpoint also has MTP layers.
        mask_id: id of the mask token of a PARD draft model. Such a model computes several draft tokens in one forward
            pass, one at each mask token. None: any other model.
        gguf_header: parsed header of the GGUF file that has config, tokenizer and weights. None: not a GGUF file.
        count: function that computes `bytes_loaded`.
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
    mask_id: int | None = None
    gguf_header: GgufHeader | None = None
    count: ByteCount = field(kw_only=True)

    def bytes_loaded(self, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
        """Returns the number of bytes that the weights take on a device.

        Args:
            dtype: dtype of activations.
            device: the device.
            ops: ops that will read the weights.
        """
        return self.count(self, dtype, device, ops)

    @property
    def gguf(self) -> Path | None:
        """Path of the GGUF file. None: the checkpoint is not a GGUF file."""
        return None if self.gguf_header is None else self.gguf_header.path

    @property
    def in_codes(self) -> bool:
        """True if matrices are stored in a quantised format, which some ops can read without dequantising it first."""
        return self.quantisation is not None or (self.gguf_header is not None and self.gguf_header.has_codes)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the model. Each rank loads its slices of the weights."""
        held = self.spec.cut if isinstance(self.spec, HostedInfo) else self.sliced
        return 1 if held is None else held.share.size

    @property
    def whole(self) -> ModelSpec | HostedInfo:
        """Spec of the whole model, also if a rank loads a part of it."""
        if isinstance(self.spec, HostedInfo):
            return self.spec if self.spec.cut is None else self.spec.cut.whole
        return self.spec if self.sliced is None else self.sliced.spec

    @property
    def native(self) -> ModelSpec:
        """Spec of the model, if this package's decoder runs it.

        Raises:
            UnsupportedModel: transformers' own module of the model is run instead.
        """
        if not isinstance(self.spec, ModelSpec):
            raise UnsupportedModel(f"{self.name}: is hosted, and has no weights of the decoder's own")
        return self.spec
