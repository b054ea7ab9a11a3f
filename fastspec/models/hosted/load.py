"""Loads the weights of a hosted model. transformers reads them, then each is moved to the module that uses it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.experts import ExpertStack
from fastspec.kernels.common.rounding import rounded
from fastspec.kernels.common.weights import Weight
from fastspec.models.config import MAKING
from fastspec.models.hosted.codes import ProductCodes, rounded_weight, rounding_of
from fastspec.models.hosted.cuts import own_part, part_shell
from fastspec.models.hosted.experts import QuantisedExperts
from fastspec.models.hosted.info import CutKind, HostedInfo
from fastspec.models.hosted.model import TRIAL_PROMPT, HostedModel, trial_ids
from fastspec.models.hosted.probe import base_of
from fastspec.models.hosted.swaps import (
    STACKS,
    Embedding,
    KnownNorms,
    NormSwap,
    PartProduct,
    Product,
    expert_layers,
    is_product,
    rotates,
    use_our_rotation,
)
from fastspec.models.text_parts import text_values

if TYPE_CHECKING:
    from fastspec.models.checkpoints.checkpoint import Checkpoint


def load_hosted(
    checkpoint: Checkpoint,
    model: HostedModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    release: bool,
    progress: bool = True,
) -> None:
    """Fills a hosted model with the weights of its checkpoint, in `dtype` on `device`.

    The weights of a live module are copied. The weights of a directory are first read by transformers into host memory.
    If ranks share the model, each rank reads all weights and keeps its part.

    Args:
        checkpoint: source of the weights.
        model: the model without weights.
        dtype, device: dtype and device of the weights.
        release: True to free each parameter of a live module after it is copied.
        progress: True to show transformers' progress bars.

    Raises:
        CheckpointError: the stored tensors do not match the config.
    """
    info, source, codes = model.info, checkpoint.module, None
    if source is None:
        if checkpoint.directory is None:
            raise CheckpointError(f"{checkpoint.name}: has neither a directory nor a module; make it with resolve()")
        if checkpoint.quantisation is not None:
            codes = ProductCodes(checkpoint, info)
            codes.warn_of_dequantised_experts(checkpoint.name, dtype, device, model.ops)
        values = stored_values(checkpoint.directory, model, dtype, device, codes)
        with bars(progress):
            source, release = read_module(values or checkpoint.directory, info, dtype, checkpoint.name), True
    shell = part_shell(info)
    if info.cut is not None:
        model.wanted, model.rounded = _whole_pass(source, info), checkpoint.rounded is not None
    with torch.no_grad(), nullcontext() if codes is None else codes.tensors.open():
        rounding = {name: kind for name, (_, kind) in rounding_of(checkpoint, shell).items()}
        Filler(model, shell, source, dtype, device, release, codes, rounding).fill()
    model.host(shell)


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """Context manager in which transformers shows progress bars only if `shown`. Restores the setting at the end."""
    before = logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def stored_values(
    directory: Path, model: HostedModel, dtype: torch.dtype, device: torch.device, codes: ProductCodes | None
) -> dict[str, Tensor] | None:
    """Reads the tensors of a checkpoint, if transformers cannot load its directory.

    This is the case for quantised weights, and for a larger model of which only the text part is hosted.

    Args:
        directory: local directory of the checkpoint.
        model: the hosted model.
        dtype, device: dtype and device of the weights.
        codes: reader of the quantised weights. None: the checkpoint is not quantised.

    Returns:
        Name -> tensor, from which `read_module` makes a module. With `codes` the names are those in the checkpoint,
        else those in the text model. None: transformers can load the directory.
    """
    if codes is not None:
        return codes.values(dtype, device, model.ops)
    return text_values(directory) if model.info.whole else None


def read_module(source: Path | dict[str, Tensor], info: HostedInfo, dtype: torch.dtype, name: str) -> nn.Module:
    """Makes transformers' module of a model with weights, on the CPU. Runs no code of the checkpoint, reads no pickle.

    Args:
        source: local directory of the checkpoint, or its tensors by name.
        info: the model.
        dtype: dtype of the weights.
        name: name of the checkpoint, for messages.

    Raises:
        CheckpointError: the tensors do not match the config.
    """
    values = None if isinstance(source, Path) else source
    try:
        with MAKING:
            module, told = info.kind.from_pretrained(
                str(source) if values is None else None,
                state_dict=values,
                config=copy.deepcopy(info.config),
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError, TypeError, LookupError) as error:
        raise CheckpointError(f"{name}: transformers cannot load it: {error}; download it again") from error
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, told.get(kind) or ())):
            raise CheckpointError(f"{name}: {kind}: {', '.join(found[:3])}; is it the config of these weights?")
    if others := sorted(told.get("unexpected_keys") or ()):
        warnings.warn(f"{name}: {len(others)} tensor(s) not used ({', '.join(others[:3])})", stacklevel=2)
    module.eval()
    if expert_layers(module):
        module.set_experts_implementation("eager")
    result: nn.Module = module
    return result


def _whole_pass(source: Any, info: HostedInfo) -> Tensor:
    """Returns the hidden states [1, n, hidden] that transformers' model computes for n test tokens before it is split.

    `admit` compares them with the hidden states that all ranks compute together.
    """
    base: Any = base_of(source)
    device = source.get_input_embeddings().weight.device
    ids = trial_ids(TRIAL_PROMPT, info, device)
    positions = torch.arange(TRIAL_PROMPT, device=device)[None]
    with torch.no_grad():
        out = base(input_ids=ids, position_ids=positions, use_cache=False, **info.probed.whole)
    hidden: Tensor = out.last_hidden_state
    return hidden


@dataclass
class Filler:
    """Moves the values of `source` to `shell`, a model of the same class on the meta device.

    Attributes:
        model: the hosted model, which runs the replaced modules.
        shell: the model without values.
        source: transformers' model with values.
        dtype, device: dtype and device of the weights.
        release: True to free the source's parameters after they are copied.
        codes: quantised weights of the checkpoint. None: the checkpoint is not quantised.
        rounding: name of a module -> format to which its weight is quantised.
        weights: `id()` of a parameter of the source -> the weight that was made from it. Modules that share a parameter
            share the weight.
        held: `id()` of a parameter of the source -> the parameter that was made from it.
        norms: formulas of the shell's norms that were found so far.
    """

    model: HostedModel
    shell: Any
    source: Any
    dtype: torch.dtype
    device: torch.device
    release: bool
    codes: ProductCodes | None
    rounding: dict[str, CodesKind]
    weights: dict[int, Weight] = field(default_factory=dict)
    held: dict[int, nn.Parameter] = field(default_factory=dict)
    norms: KnownNorms = field(default_factory=KnownNorms)

    def __post_init__(self) -> None:
        cut = self.model.info.cut
        self._kinds: Mapping[str, CutKind] = {} if cut is None else cut.kinds

    def fill(self) -> None:
        """Replaces linear layers, embedding, norms and RoPE by modules of this package, then copies other tensors.

        Raises:
            UnsupportedModel: a parameter got no values.
        """
        self._stored = self.source.get_input_embeddings().weight.dtype
        self._read_embedding()
        swapped = {name: self._swapped(name, part) for name, part in list(self.shell.named_modules())}
        for name, module in swapped.items():
            if module is not None:
                owner, _, attribute = name.rpartition(".")
                setattr(self.shell.get_submodule(owner), attribute, module)
        for name, part in self.shell.named_modules():
            if not isinstance(part, Embedding | NormSwap | PartProduct | Product | QuantisedExperts):
                self._copy(name, part, self.source.get_submodule(name))
        if left := [name for name, tensor in self.shell.named_parameters() if tensor.is_meta]:
            raise UnsupportedModel(f"its parameter {left[0]} was not filled")
        if self.release:
            self._empty()

    def _read_embedding(self) -> None:
        """Reads the weight of an embedding whose class is a subclass of nn.Embedding. Such a module is not replaced.

        The module's own forward reads rows of the weight, so the weight is kept as rows. A tied LM head uses it, too.
        """
        if type(self.shell.get_input_embeddings()) is not nn.Embedding:
            weight = self.source.get_input_embeddings().weight
            self.weights[id(weight)] = Weight(self._parameter(weight).data)

    def _swapped(self, name: str, part: nn.Module) -> nn.Module | None:
        """Makes the module of this package that replaces a submodule of the shell. Returns None if the submodule stays.

        Args:
            name: name of the submodule.
            part: the submodule.
        """
        like = self.source.get_submodule(name)
        if part is self.shell.get_input_embeddings() and type(part) is nn.Embedding:
            return Embedding(self.model, self._weight(like.weight))
        if self._kinds.get(name) in ("rows", "columns"):
            return self._part(name, like)
        if is_product(part) or part is self.shell.get_output_embeddings():
            return self._product(name, part, like)
        # norm weights with a wider dtype than the checkpoint's are not replaced
        if (stacks := self._expert_stacks(name, like)) is not None:
            return QuantisedExperts(self.model, stacks)
        if (known := self.norms.of(part)) is not None and like.weight.dtype == self._stored:
            return NormSwap(self.model, known, self._parameter(like.weight).data)
        if rotates(part):
            use_our_rotation(part, self.model)
        return None

    def _product(self, name: str, part: nn.Module, like: Any) -> Product:
        rows = like.weight if isinstance(part, nn.Linear) else like.weight.t()
        wide = torch.float32 if part is self.shell.get_output_embeddings() else None
        bias = None if like.bias is None else self._moved(like.bias)
        weight = self._kept(f"{name}.weight", like.weight) or self._weight(like.weight, rows, name)
        return Product(self.model, weight, bias, wide)

    def _kept(self, name: str, parameter: Tensor) -> Weight | None:
        """Reads the quantised weight of a parameter.

        Returns None if the parameter is not stored quantised, or if another module that shares it already has a weight.

        Args:
            name: name of the parameter.
            parameter: the parameter in the source.
        """
        if self.codes is None or id(parameter) in self.weights:
            return None
        made = self.codes.weight(name, self.dtype, self.device, self.model.ops)
        if made is not None:
            self.weights[id(parameter)] = made
            self._released(parameter)
        return made

    def _expert_stacks(self, name: str, like: nn.Module) -> tuple[ExpertStack, ExpertStack] | None:
        """Reads the quantised stacks of a module of experts. None: it has none, or they are dequantised."""
        stacks = None if self.codes is None else self.codes.expert_stacks(name, self.dtype, self.device, self.model.ops)
        for parameter in () if stacks is None else like._parameters.values():
            if parameter is not None:
                self._released(parameter)
        return stacks

    def _weight(self, parameter: Tensor, rows: Tensor | None = None, name: str = "") -> Weight:
        """Returns the weight that is made from a parameter. Modules that share a parameter get the same weight.

        Args:
            parameter: the parameter in the source.
            rows: the values of the parameter as a matrix [N, K]. None: `parameter` is such a matrix.
            name: name of the module. The weight is quantised if `rounding` has this name.
        """
        key = id(parameter)
        if key not in self.weights:
            rows, kind = self._moved(parameter if rows is None else rows).contiguous(), self.rounding.get(name)
            ops = self.model.ops
            self.weights[key] = ops.store(rows, False) if kind is None else rounded_weight(rows, kind, ops)
            self._released(parameter)
        return self.weights[key]

    def _parameter(self, parameter: Tensor) -> nn.Parameter:
        key = id(parameter)
        if key not in self.held:
            self.held[key] = nn.Parameter(self._moved(parameter), requires_grad=False)
            self._released(parameter)
        return self.held[key]

    def _moved(self, tensor: Tensor) -> Tensor:
        """Copies a tensor to the device.

        A tensor with the same dtype as the source's embedding is converted to `self.dtype`. Other tensors keep their
        dtype.
        """
        kept = tensor.dtype != self._stored
        return tensor.detach().to(self.device, tensor.dtype if kept else self.dtype, copy=True)

    def _part(self, name: str, like: Any) -> PartProduct:
        """Makes the module with this rank's part of a linear layer.

        Args:
            name: name of the layer.
            like: the whole layer in the source.
        """
        cut, by_columns = self.model.info.cut, self._kinds[name] == "columns"
        assert cut is not None, "only what is cut has parts"
        bias = None
        if like.bias is not None:
            bias = self._moved(own_part(like, "bias", like.bias, self._kinds[name], cut.share))
        kept = self._kept(f"{name}.weight", like.weight) if cut.share.own_parts == 1 else None
        if kept is not None:
            return PartProduct(self.model, [kept], bias, columns=by_columns)
        rows = self._moved(own_part(like, "weight", like.weight, self._kinds[name], cut.share)).contiguous()
        self._released(like.weight)
        kind, ops, count = self.rounding.get(name), self.model.ops, cut.share.own_parts
        if kind is not None and count > 1:
            rows, kind = rounded(rows, kind).dequantise(rows.dtype), None
        pieces = [piece.contiguous() for piece in rows.chunk(count, dim=int(by_columns))]
        weights = [ops.store(piece, False) if kind is None else rounded_weight(piece, kind, ops) for piece in pieces]
        return PartProduct(self.model, weights, bias, columns=by_columns)

    def _copy(self, path: str, part: nn.Module, like: nn.Module) -> None:
        cut, experts = self.model.info.cut, self._kinds.get(path) == "experts"
        made = []
        for name, parameter in like._parameters.items():
            if parameter is None:
                continue
            kind: CutKind | None = "experts" if experts and name in STACKS else self._kinds.get(f"{path}.{name}")
            if kind is None or cut is None:
                part._parameters[name] = self._parameter(parameter)
            else:
                own = self._moved(own_part(like, name, parameter, kind, cut.share)).contiguous()
                part._parameters[name] = nn.Parameter(own, requires_grad=False)
                made.append(parameter)
        for parameter in made:  # only now, because sizes of one parameter determine how others are split
            self._released(parameter)
        for name, buffer in like._buffers.items():
            part._buffers[name] = None if buffer is None else self._as_it_is(buffer)
        for name, value in vars(like).items():
            if isinstance(value, Tensor):
                setattr(part, name, self._as_it_is(value))

    def _as_it_is(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, copy=True)

    def _released(self, parameter: Tensor) -> None:
        if self.release:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def _empty(self) -> None:
        for part in self.source.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
