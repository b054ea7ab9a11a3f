"""Splits a hosted model between ranks, by the tensor-parallel plan that transformers has in the model's config.

The plan (`base_model_tp_plan`) names linear layers whose weights are split by rows or by columns, and experts whose
width is split. Every rank has a whole copy of all other modules. It also has a whole copy of a module whose outputs the
plan gathers right after the matrix product.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fastspec.distributed.slices import Cut, RankShare
from fastspec.errors import UnsupportedModel
from fastspec.models.hosted.info import CutKind, HostedCut, HostedInfo, shell_of, steady_shell
from fastspec.models.hosted.probe import ProbedOp, base_name, probe
from fastspec.models.hosted.swaps import PARTS, STACKS, expert_layers

PLAN: Final = "base_model_tp_plan"
# styles in a plan for modules whose inputs and outputs are equal on every rank; they are not split
_WHOLE: Final = (
    *("replicate", "replicated_with_grad_allreduce", "local_params", "mla_kv_a_proj", "embedding_rowwise"),
    *("embedding_colwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"),
)

_EXPERTS: Final = "moe_tp_experts"


class SizesToCut(NamedTuple):
    """Sizes of a hosted model that must be multiples of the number of ranks. Implements `distributed.slices.Sizes`.

    Attributes:
        family: model type, for messages.
        vocab_size: width of the logits.
        num_heads, num_kv_heads: query heads and KV heads of a layer. 0 if the plan does not split attention.
        divided: other sizes, by their description for messages.
    """

    family: str
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    divided: Mapping[str, int]


def kinds_of(shell: nn.Module, plan: Mapping[str, str] | None) -> dict[str, CutKind]:
    """Finds the modules of a model that a tensor-parallel plan splits.

    Args:
        shell: the whole model on the meta device.
        plan: pattern of a module's or parameter's name -> style of the split. None: transformers has no plan.

    Returns:
        Full name of a module or parameter -> kind of its split.

    Raises:
        UnsupportedModel: there is no plan, it splits nothing, or it splits a module in an unknown way.
    """
    if not plan:
        raise UnsupportedModel(f"transformers publishes no plan for it ({PLAN} of its config)")
    prefix = base_name(shell)
    found: dict[str, CutKind] = {}
    base = shell.get_submodule(prefix)
    experts = set(expert_layers(base))
    for name, part in base.named_modules():
        style = plan.get(_pattern(name))
        if style is None or style in _WHOLE:
            continue
        found[f"{prefix}.{name}"] = _kind_of(name, part, style, name in experts)
    for name, _ in base.named_parameters():
        style, owner = plan.get(_pattern(name)), name.rpartition(".")[0]
        if style is None or style in _WHOLE or found.get(f"{prefix}.{owner}") == "experts":
            continue
        if style != "colwise":
            raise UnsupportedModel(f"its plan cuts {name} by {style!r}, which is not known here")
        found[f"{prefix}.{name}"] = "first"
    if not set(found.values()) & {"columns", "experts"}:
        raise UnsupportedModel(f"the plan that transformers publishes for it ({PLAN}) splits no layer")
    return found


def _pattern(name: str) -> str:
    """Converts a module's name to the pattern that plans use: every number in the name becomes `*`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _kind_of(name: str, part: Any, style: str, is_experts: bool) -> CutKind:
    if style == _EXPERTS and is_experts:
        if getattr(part, "has_post_expert_norm", False):
            raise UnsupportedModel(f"{name}: a norm after each expert needs the outputs of all ranks")
        return "experts"
    if style in ("colwise", "rowwise") and type(part) is nn.Linear:
        return "rows" if style == "colwise" else "columns"
    if style in ("colwise", "rowwise", _EXPERTS):
        raise UnsupportedModel(f"its plan cuts {name} by {style!r}, and that {type(part).__name__} is not known here")
    raise UnsupportedModel(f"its plan cuts {name} by {style!r}, which is not known here")


def divided(shell: nn.Module, kinds: Mapping[str, CutKind]) -> dict[str, int]:
    """Returns the sizes along which modules are split. They must be multiples of the number of ranks.

    Args:
        shell: the whole model on the meta device.
        kinds: result of `kinds_of`.

    Returns:
        Description with the name of a module -> size. Equal sizes have one entry.
    """
    found: dict[int, str] = {}
    for name, kind in kinds.items():
        if kind == "first":
            size = shell.get_parameter(name).shape[0]
        elif kind == "experts":
            size = _width(shell.get_submodule(name))
        else:
            size = shell.get_parameter(f"{name}.weight").shape[kind == "columns"]
        found.setdefault(size, _pattern(name))
    return {f"width of {name}": size for size, name in found.items()}


def parts_of(total: int, share: RankShare) -> list[Cut]:
    """Splits `total` elements into `share.parts` equal ranges. Returns the ranges that belong to this rank."""
    width, first = total // share.parts, share.rank * share.own_parts
    return [Cut(part * width, (part + 1) * width) for part in range(first, first + share.own_parts)]


def cut_shell(shell: nn.Module, cut: HostedCut) -> None:
    """Replaces each split parameter of a model on the meta device by one rank's part of it."""
    for name, kind in cut.kinds.items():
        if kind == "first":
            owner, _, attribute = name.rpartition(".")
            part, names = shell.get_submodule(owner), [attribute]
        else:
            part = shell.get_submodule(name)
            names = [key for key, parameter in part._parameters.items() if parameter is not None]
        for key in names:
            parameter = part._parameters[key]
            assert parameter is not None
            own = own_part(part, key, parameter, kind, cut.share)
            part._parameters[key] = nn.Parameter(own, requires_grad=False)
        if kind == "experts":
            part.__dict__[PARTS] = cut.share.own_parts


def own_part(part: nn.Module, key: str, tensor: Tensor, kind: CutKind, share: RankShare) -> Tensor:
    """Returns one rank's part of a parameter.

    Args:
        part: the module that has the whole parameter. For experts its flags and sizes are read.
        key: name of the parameter in the module.
        tensor: the whole parameter.
        kind: kind of the split, see `HostedCut`.
        share: index of this rank, and number of ranks.
    """
    if kind == "experts":
        return _own_experts(part, key, tensor, share)
    if kind == "columns":
        return tensor if key == "bias" else tensor[:, slice(*share.cut(tensor.shape[1]))]
    return tensor[slice(*share.cut(tensor.shape[0]))]


def _own_experts(part: Any, key: str, tensor: Tensor, share: RankShare) -> Tensor:
    """Returns this rank's parts of a parameter of experts: [experts, ...] becomes [parts, experts, ...].

    A part has some columns of every expert. Parameters that are not in `STACKS` are returned unchanged.
    """
    if key not in STACKS:
        return tensor
    if key == "down_proj_bias":  # only one rank adds the bias
        zero, first = torch.zeros_like(tensor), share.rank == 0
        return torch.stack([tensor if first and index == 0 else zero for index in range(share.own_parts)])
    bias, down = key.endswith("_bias"), key == "down_proj"
    axis = 1 if bias or down == part.is_transposed else 2
    ranges = parts_of(_width(part), share)
    if down or not part.has_gate:
        return torch.stack([_along(tensor, axis, *each) for each in ranges])
    if not part.is_concatenated:
        return torch.stack([_along(tensor, axis, 2 * start, 2 * stop) for start, stop in ranges])
    halves = tensor.chunk(2, dim=axis)
    return torch.stack([torch.cat([_along(half, axis, *each) for half in halves], axis) for each in ranges])


def _width(part: Any) -> int:
    """Returns the intermediate size of each expert of a module that is not split."""
    shape: Any = part.down_proj.shape
    return int(shape[-2] if part.is_transposed else shape[-1])


def _along(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    return tensor.narrow(axis, start, stop - start)


def sizes_to_cut(info: HostedInfo) -> SizesToCut:
    """Returns the sizes of a hosted model that must be multiples of the number of ranks.

    Raises:
        UnsupportedModel: transformers' plan splits nothing, or splits a module in an unknown way.
    """
    shell = shell_of(info.kind, info.config)
    kinds = kinds_of(shell, _plan(info))
    calls = [call for call in info.probed.calls if _is_cut(call, kinds)]
    sizes = divided(shell, kinds)
    sizes |= {f"heads of {call.layer}": call.heads for call in calls}
    sizes |= {f"key heads of {call.layer}": call.kv_heads for call in calls}
    distinct = {size: name for name, size in reversed(sizes.items())}  # the first name of each size
    heads = max((call.heads for call in calls), default=0)
    kv_heads = max((call.kv_heads for call in calls), default=0)
    return SizesToCut(info.family, info.vocab_size, heads, kv_heads, {name: size for size, name in distinct.items()})


def share_info(info: HostedInfo, share: RankShare) -> HostedInfo:
    """Returns the `HostedInfo` of the part of a model that one rank runs.

    Args:
        info: the whole model.
        share: index of this rank, and number of ranks.

    Raises:
        UnsupportedModel: the module cannot run with a part of its matrices, or an attention call has another number of
            heads than this rank's part.
    """
    shell = steady_shell(info.kind, info.config)
    cut = HostedCut(share, kinds_of(shell, _plan(info)), info)
    cut_shell(shell, cut)
    try:
        probed = probe(shell)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"with a part of its matrices its module cannot run: {error}") from error
    for call, whole in zip(probed.calls, info.probed.calls, strict=True):
        by = share.size if _is_cut(call, cut.kinds) else 1
        wanted = replace(whole, heads=whole.heads // by, kv_heads=whole.kv_heads // by)
        if call != wanted:
            raise UnsupportedModel(
                f"layer {call.layer!r}: with a part of its matrices it attends with {call.heads} heads over "
                f"{call.kv_heads} key heads of width {call.head_dim}, wanted {wanted.heads}, {wanted.kv_heads} and "
                f"{wanted.head_dim}"
            )
    parameters = sum(parameter.numel() for parameter in shell.parameters())
    return replace(info, probed=probed, parameters=parameters, cut=cut)


def part_shell(info: HostedInfo) -> nn.Module:
    """Makes the model on the meta device. If `info.cut` is not None, it has the sizes of one rank's part."""
    shell = steady_shell(info.kind, info.config)
    if info.cut is not None:
        cut_shell(shell, info.cut)
    return shell


def _plan(info: HostedInfo) -> dict[str, str] | None:
    found: dict[str, str] | None = getattr(info.config.get_text_config(), PLAN, None)
    return found


def _is_cut(call: ProbedOp, kinds: object) -> bool:
    """True if ranks split a linear layer of the module that makes this attention call."""
    assert isinstance(kinds, dict)
    return any(name.startswith(f"{call.layer}.") for name in kinds)
