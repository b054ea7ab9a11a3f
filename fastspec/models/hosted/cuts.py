"""What each rank has of a hosted model, by the plan that transformers publishes with its config.

The plan (`base_model_tp_plan`) names products that are cut by rows or by columns, and experts whose columns are cut.
What it leaves whole, or gathers right after the product, is whole on every rank here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fastspec.distributed.slices import Cut, Share
from fastspec.errors import UnsupportedModel
from fastspec.models.hosted.probe import base_name
from fastspec.models.hosted.swaps import PARTS, STACKS, expert_layers

Kind = Literal["rows", "columns", "experts", "first"]
PLAN: Final = "base_model_tp_plan"
# styles of the plan whose module takes and gives what every rank has: whole on every rank
_WHOLE: Final = (
    *("replicate", "replicated_with_grad_allreduce", "local_params", "mla_kv_a_proj", "embedding_rowwise"),
    *("embedding_colwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"),
)
_EXPERTS: Final = "moe_tp_experts"


class Sizes(NamedTuple):
    """What must divide; as `distributed.slices.Sizes` asks.

    Attributes:
        num_heads, num_kv_heads: 0 where the plan leaves attention whole.
    """

    family: str
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    divided: Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class HostedCut:
    """What one rank has of a hosted model.

    Attributes:
        share: its part.
        kinds: what is cut, by the name of its module, or of its parameter ("first": along the first axis).
        whole: the `HostedInfo` of all ranks.
    """

    share: Share
    kinds: Mapping[str, Kind]
    whole: Any

    @property
    def said(self) -> str:
        """What is cut, for `explain()`."""
        counts = {kind: list(self.kinds.values()).count(kind) for kind in ("rows", "columns", "experts")}
        experts = f", and columns of {counts['experts']} expert layers" if counts["experts"] else ""
        if self.share.size == 1:
            return "sums as on several ranks"
        return (
            f"cut by transformers' plan: {counts['rows']} products by rows, {counts['columns']} by columns{experts}; "
            "the rest, its head too, is whole on every rank"
        )


def kinds_of(shell: nn.Module, plan: Mapping[str, str] | None) -> dict[str, Kind]:
    """What a plan cuts of a model on the meta device, by full names.

    Raises:
        UnsupportedModel: there is no plan, it cuts nothing, or something in a way that is not known here.
    """
    if not plan:
        raise UnsupportedModel(f"transformers publishes no plan for it ({PLAN} of its config)")
    prefix, found = base_name(shell), dict[str, Kind]()
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
        raise UnsupportedModel(f"the plan that transformers publishes for it ({PLAN}) cuts no layer")
    return found


def _pattern(name: str) -> str:
    """A module's name as plans write it: every number is a *."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _kind_of(name: str, part: Any, style: str, is_experts: bool) -> Kind:
    if style == _EXPERTS and is_experts:
        if getattr(part, "has_post_expert_norm", False):
            raise UnsupportedModel(f"{name}: a norm after each expert needs what all ranks have of it")
        return "experts"
    if style in ("colwise", "rowwise") and type(part) is nn.Linear:
        return "rows" if style == "colwise" else "columns"
    if style in ("colwise", "rowwise", _EXPERTS):
        raise UnsupportedModel(f"its plan cuts {name} by {style!r}, and that {type(part).__name__} is not known here")
    raise UnsupportedModel(f"its plan cuts {name} by {style!r}, which is not known here")


def divided(shell: nn.Module, kinds: Mapping[str, Kind]) -> dict[str, int]:
    """Sizes that must divide by the number of ranks, each named by one of the modules that have it."""
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


def parts_of(total: int, share: Share) -> list[Cut]:
    """The ranges of `total` elements that are one part each of this rank's."""
    width, first = total // share.parts, share.rank * share.own_parts
    return [Cut(part * width, (part + 1) * width) for part in range(first, first + share.own_parts)]


def cut_shell(shell: nn.Module, cut: HostedCut) -> None:
    """Gives a model on the meta device the sizes of one rank's part."""
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


def own_part(part: nn.Module, key: str, tensor: Tensor, kind: Kind, share: Share) -> Tensor:
    """What a rank has of one parameter of a cut module.

    Args:
        part: the module, or the like; for experts its flags are read.
        key: the parameter's name in it.
        tensor: all of it.
        kind: how the module is cut.
    """
    if kind == "experts":
        return _own_experts(part, key, tensor, share)
    if kind == "columns":
        return tensor if key == "bias" else tensor[:, slice(*share.cut(tensor.shape[1]))]
    return tensor[slice(*share.cut(tensor.shape[0]))]


def _own_experts(part: Any, key: str, tensor: Tensor, share: Share) -> Tensor:
    """This rank's [parts, ...] of a stack of all experts [experts, ...]; what is no stack is returned whole."""
    if key not in STACKS:
        return tensor
    if key == "down_proj_bias":  # added once
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
    """Columns of each expert of a whole module."""
    shape: Any = part.down_proj.shape
    return int(shape[-2] if part.is_transposed else shape[-1])


def _along(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    return tensor.narrow(axis, start, stop - start)
