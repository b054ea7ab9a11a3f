"""Description of a hosted model before its weights are loaded: its class, sizes and attention calls.

A hosted model is a module of transformers that runs with attention and KV cache of this package. Live modules of the
user are checked here, too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import transformers
from torch import nn

from fastspec.distributed.slices import RankShare
from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.live_module import changed_constants, check_devices, check_unchanged
from fastspec.models.config import DTYPES, MAKING
from fastspec.models.families import FAMILIES, runs_natively
from fastspec.models.hosted.probe import FOREIGN, Probed, base_name, probe
from fastspec.models.hosted.streams import layers_in
from fastspec.models.hosted.swaps import (
    KnownNorm,
    KnownNorms,
    expert_layers,
    is_product,
    register,
    rotates,
    use_fixed_experts,
)
from fastspec.models.text_parts import check_whole_class, text_class, text_part_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# types of RoPE whose frequencies depend on the longest row of a pass, and so on other rows. "dynamic" changes them
# above max_position_embeddings, which no row exceeds here. "longrope" changes them above a length, which is checked
_ROPES_OF_LENGTH: Final = ("dynamic", "longrope")

_WARNS: Final = "warn_if_padding_and_no_attention_mask"

_TRIED: Final = f" (by the module of transformers {transformers.__version__})"

CutKind = Literal["rows", "columns", "experts", "first"]


@dataclass(frozen=True, slots=True, eq=False)
class HostedCut:
    """One rank's part of a hosted model.

    Attributes:
        share: index of this rank, and number of ranks.
        kinds: full name of a module or parameter -> kind of its split. "rows" and "columns" split a linear layer's
            weight [out, in]. "experts" splits the width of all experts of a module. "first" splits a parameter along
            its first axis.
        whole: the `HostedInfo` of the whole model.
    """

    share: RankShare
    kinds: Mapping[str, CutKind]
    whole: HostedInfo

    @property
    def said(self) -> str:
        """Text for `explain()` that says how the modules are split."""
        counts = {kind: list(self.kinds.values()).count(kind) for kind in ("rows", "columns", "experts")}
        experts = f", and columns of {counts['experts']} expert layers" if counts["experts"] else ""
        if self.share.size == 1:
            return "sums as on several ranks"
        return (
            f"split by transformers' plan: {counts['rows']} products by rows, {counts['columns']} by columns{experts}; "
            "every rank has the other modules whole, including the head"
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostedInfo:
    """Sizes and attention calls of a hosted model. Implements `ModelInfo`.

    Attributes:
        kind: class of the model in transformers.
        config: config of the model, a private copy.
        probed: attention calls of a pass, from a traced pass.
        parameters: number of elements of all parameters. Shared parameters count once.
        kept_bytes: bytes of all buffers of the module.
        linears: number of linear layers.
        experts: number of modules with experts.
        norms: number of RMSNorms that this package's op replaces.
        wide_norms: number of elements of norm weights that are kept in fp32.
        rotations: number of attention modules whose RoPE this package's op replaces.
        base: name of the submodule that contains everything except the LM head. Empty: the model itself.
        whole: class name of the larger model whose text part is hosted. Empty: the model is not part of a larger one.
        cut: this rank's part of the model, if ranks share it. Then sizes and calls are those of the part. None: one
            process has the whole model.
    """

    family: str
    kind: Any
    config: Any
    probed: Probed
    dtype: torch.dtype
    vocab_size: int
    max_length: int
    hidden_size: int
    intermediate_size: int
    parameters: int
    kept_bytes: int
    linears: int
    experts: int
    norms: int
    wide_norms: int
    rotations: int = 0
    base: str = ""
    whole: str = ""
    cut: HostedCut | None = None

    @property
    def slots(self) -> tuple[tuple[int, int, int], ...]:
        """(query heads, KV heads, head_dim) of each slot in the KV cache. For slots see `ProbedOp.slot`."""
        found = {call.slot: call.shape for call in self.probed.calls}
        return tuple(found[slot] for slot in range(len(found)))

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(query heads, KV heads, head_dim) of each slot in the KV cache, the same as `slots`."""
        return self.slots

    @property
    def num_layers(self) -> int:
        """Number of attention calls of a pass."""
        return len(self.probed.calls)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers, relative to the base model. () if the layers are not in one list."""
        prefix = "".join(f"{part}." for part in [self.base] if part)
        return layers_in([call.layer.removeprefix(prefix) for call in self.probed.calls])

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each attention call. None: full attention."""
        return tuple(call.rule.window for call in self.probed.calls)

    @property
    def num_heads(self) -> int:
        """Largest number of query heads of a layer."""
        return max(call.heads for call in self.probed.calls)

    @property
    def num_kv_heads(self) -> int:
        """Largest number of KV heads of a layer."""
        return max(call.kv_heads for call in self.probed.calls)

    @property
    def head_dim(self) -> int:
        """Largest head_dim of a layer."""
        return max(call.head_dim for call in self.probed.calls)

    @property
    def hosting(self) -> str:
        """Text for `explain()` about the modules that this package replaces, and about the modules that it keeps."""
        norms = f", {self.norms} norms" if self.norms else ""
        norms += f", {self.rotations} rotations" if self.rotations else ""
        experts = f", {self.experts} expert layers in fixed shapes" if self.experts else ""
        left = "" if self.rotations else "rotations, "
        part = f", the text model of {self.whole}," if self.whole else ""
        narrow = [call for call in self.probed.calls if call.value_dim != call.head_dim]
        latent = (
            f"; K/V lie in pages at width {narrow[0].head_dim}, values of {narrow[0].value_dim} too" if narrow else ""
        )
        shared = "" if self.cut is None else f"; {self.cut.said}"
        return (
            f"hosted: transformers' {self.kind.__name__}{part} runs as it is, but for attention, K/V, {self.linears} "
            f"matrix products{norms}{experts}; {left}activations and what else it has are torch operations of their "
            f"own, so a pass takes longer than that of a native family{latent}{shared}"
        )

    def rotary_bytes(self, positions: int) -> int:
        """Returns 0. The module has its own rotary tables, which are counted with its buffers."""
        return 0

    def state_bytes(self, max_drafts: int, dtype: torch.dtype) -> int:
        """Returns 0, because models with recurrent states are not hosted."""
        return 0

    @property
    def routed_elements(self) -> int:
        """0, because the size of the experts' temporary tensors is not known for a hosted model."""
        return 0

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of all buffers, and of all parameters in `dtype`. Some norm weights are fp32 instead."""
        wide = self.wide_norms * (4 - dtype.itemsize)
        return self.parameters * dtype.itemsize + self.kept_bytes + wide


def hosted_info(config: PretrainedConfig, kind: Any = None) -> HostedInfo:
    """Makes the model of a config on the meta device, and traces a forward pass of it.

    Args:
        config: a transformers config. Not modified.
        kind: class of the model. None: transformers' causal model for this config, or for its text part (`TEXT_PARTS`).

    Raises:
        UnsupportedModel: the model cannot be hosted. The message has the reason.
    """
    config = copy.deepcopy(config)
    name, whole = str(config.model_type), ""
    try:
        text = None if kind else text_part_of(config)
        if text is not None:
            kind, whole, config = text_class(config, text), check_whole_class(config), text
        if kind is not None:
            _refuse_whole(kind)
        _refuse_config(config)
        kind = kind or causal_class(config)
        _refuse_whole(kind)
        shell = steady_shell(kind, config)
        norms = _norms(shell)
        return replace(_info(name, kind, config, shell, probe(shell), norms), whole=whole)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"model_type {name!r} has no decoder of its own here, and cannot be hosted: {error}{_TRIED}"
        ) from error


def causal_class(config: PretrainedConfig) -> Any:
    """Returns transformers' causal model class for a config.

    Raises:
        UnsupportedModel: transformers has none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel("transformers has no causal language model of that type")
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind[0] if isinstance(kind, tuple) else kind


def shell_of(kind: Any, config: PretrainedConfig) -> nn.Module:
    """Makes a model on the meta device, which has shapes but no values.

    Attention and experts go through functions that this package has registered in transformers.

    Args:
        kind: class of the model.
        config: its config. Not modified.

    Raises:
        UnsupportedModel: the class cannot be made from this config.
    """
    register()
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # so that the file cannot choose an implementation, and none is fetched
    try:
        with MAKING, torch.device("meta"):
            shell: nn.Module = kind(config)
    except FOREIGN as error:
        raise UnsupportedModel(f"its class {kind.__name__} cannot be made of this config: {error}") from error
    for part in shell.modules():  # the padding id is only used on the host, and no padding is fed here
        if hasattr(part, _WARNS):
            part.__dict__[_WARNS] = lambda *_: None
    use_fixed_experts(shell)
    return shell.eval()


def steady_shell(kind: Any, config: PretrainedConfig) -> nn.Module:
    """Makes a model on the meta device like `shell_of`, with fixed RoPE frequencies.

    The frequencies do not change with the length of the longest row of a pass.
    """
    shell = shell_of(kind, config)
    for part in shell.modules():
        kind = part.__dict__.get("rope_type")
        if isinstance(kind, str) and kind in _ROPES_OF_LENGTH:
            part.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kind, dict):
            fixed = {layer: "default" if each in _ROPES_OF_LENGTH else each for layer, each in kind.items()}
            part.rope_type = fixed  # type: ignore[assignment]
    return shell


def _refuse_whole(kind: Any) -> None:
    if kind.__name__.endswith("ForConditionalGeneration"):
        raise UnsupportedModel(f"{kind.__name__} reads more than text; save it and pass the directory")


def _refuse_config(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("it is an encoder-decoder; wanted a decoder-only model")
    for part in ("vision_config", "audio_config", "patch_size"):
        if getattr(config, part, None) is not None:
            raise UnsupportedModel(f"it has a {part}{_advice_on(config)}")
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for one in each:
        short = one.get("original_max_position_embeddings", getattr(text, "original_max_position_embeddings", None))
        long = getattr(text, "max_position_embeddings", None)
        if one.get("rope_type", one.get("type")) != "longrope" or one.get("short_factor") == one.get("long_factor"):
            continue
        if type(short) is not int or type(long) is not int or short < long:
            raise UnsupportedModel(
                f"rope_type='longrope' rotates all rows in another way if one of them is longer than {short} tokens, "
                f"so a row would depend on its neighbours; wanted max_position_embeddings={long} to be at most "
                f"{short}: for short texts, lower it in config.json"
            )


def _advice_on(config: Any) -> str:
    """Returns the end of an error message for a model that reads more than text.

    The message says if the model's text part can be hosted by itself.
    """
    text = getattr(config, "text_config", None)
    if text is None:
        return ": wanted a text model; save its language model by itself"
    kind = text.model_type
    if kind not in FAMILIES:
        try:
            hosted_info(text)
        except UnsupportedModel as error:
            reason = str(error).partition("cannot be hosted: ")[2].removesuffix(_TRIED)
            if not reason.startswith("its class"):  # such a model cannot be built from this config
                return f", and its language model ({kind}) cannot be hosted by itself either: {reason}"
    return f": wanted a text model; save its language model ({kind}) by itself"


def _info(
    name: str, kind: Any, config: Any, shell: Any, probed: Probed, norms: list[tuple[KnownNorm, int]]
) -> HostedInfo:
    text = config.get_text_config()
    length = getattr(text, "max_position_embeddings", None)
    if type(length) is not int or length < 2:
        raise UnsupportedModel(f"max_position_embeddings={length!r}; wanted the model's context in tokens")
    head = shell.get_output_embeddings()
    inner = getattr(text, "intermediate_size", None)
    dtype = getattr(config, "dtype", None) or torch.float32
    return HostedInfo(
        family=name,
        kind=kind,
        config=config,
        probed=probed,
        dtype=dtype if dtype in DTYPES else torch.float32,
        vocab_size=head.weight.shape[0],
        max_length=length,
        hidden_size=probed.hidden_size,
        intermediate_size=inner if type(inner) is int else 4 * probed.hidden_size,
        parameters=sum(parameter.numel() for parameter in shell.parameters()),
        kept_bytes=sum(buffer.nbytes for buffer in shell.buffers()),
        linears=sum(is_product(part) for part in shell.modules()),
        experts=len(expert_layers(shell)),
        norms=len(norms),
        rotations=sum(rotates(part) for part in shell.modules()),
        wide_norms=sum(width for known, width in norms if known.form != "rounded"),
        base=base_name(shell),
    )


def _norms(shell: nn.Module) -> list[tuple[KnownNorm, int]]:
    """Finds the RMSNorms with a known formula. Returns (formula, number of elements of the weight) for each RMSNorm."""
    norms = KnownNorms()
    found = ((norms.of(part), part) for part in shell.modules())
    return [(known, sum(each.numel() for each in part.parameters())) for known, part in found if known is not None]


def known_type(model_type: str) -> bool:
    """True if transformers has a config class for this `model_type`."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def is_hostable(module: nn.Module) -> bool:
    """True if a live module is a causal model of transformers that this package's own decoder does not implement."""
    from transformers import PretrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = getattr(module, "config", None)
    if not isinstance(config, PretrainedConfig) or runs_natively(config):
        return False
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return type(module) in (kinds if isinstance(kinds, tuple) else (kinds,))


def check_hosted_module(module: Any) -> None:
    """Refuses a live module that differs from a module made from its config, or that is on several devices.

    Raises:
        UnsupportedModel: the message names the submodule and what was found.
    """
    name = type(module).__name__
    check_devices(module, name)
    check_unchanged(module)
    built = dict(shell_of(type(module), module.config).named_modules())
    for path, part in module.named_modules():
        like = built.get(path)
        if like is None or type(like) is not type(part):
            wanted = "nothing" if like is None else f"a {type(like).__name__}"
            raise UnsupportedModel(
                f"{name}: submodule {path!r} is a {type(part).__name__} where its config puts {wanted}; merge "
                "adapters, load the model unquantised, or pass the directory"
            )
        for constant, value in changed_constants(part, like):
            raise UnsupportedModel(
                f"{name}: submodule {path!r} has {constant}={value!r} where the config gives "
                f"{vars(like).get(constant)!r}; set it in the config, save the model and pass the directory"
            )
