"""One rank's view of a hosted model, known before any weight is read: its sizes, its attention calls."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fastspec.distributed.slices import Share
from fastspec.errors import UnsupportedModel
from fastspec.models.hosted.cuts import PLAN, HostedCut, Sizes, cut_shell, divided, kinds_of
from fastspec.models.hosted.info import HostedInfo, shell_of, steady_shell
from fastspec.models.hosted.probe import Call, probe


def sizes_to_cut(info: HostedInfo) -> Sizes:
    """What must divide for a hosted model to be cut among ranks.

    Raises:
        UnsupportedModel: transformers' plan cuts nothing of it, or in a way that is not known here.
    """
    shell = shell_of(info.kind, info.config)
    kinds = kinds_of(shell, _plan(info))
    calls = [call for call in info.probed.calls if _is_cut(call, kinds)]
    sizes = divided(shell, kinds)
    sizes |= {f"heads of {call.layer}": call.heads for call in calls}
    sizes |= {f"key heads of {call.layer}": call.kv_heads for call in calls}
    distinct = {size: name for name, size in reversed(sizes.items())}  # the first of each size
    heads = max((call.heads for call in calls), default=0)
    kv_heads = max((call.kv_heads for call in calls), default=0)
    return Sizes(info.family, info.vocab_size, heads, kv_heads, {name: size for size, name in distinct.items()})


def share_info(info: HostedInfo, share: Share) -> HostedInfo:
    """What one rank runs of a model.

    Raises:
        UnsupportedModel: with a part of its matrices the module cannot run, or attends otherwise than to its own heads.
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
    """The model on the meta device, with the sizes of what `info` says of it."""
    shell = steady_shell(info.kind, info.config)
    if info.cut is not None:
        cut_shell(shell, info.cut)
    return shell


def _plan(info: HostedInfo) -> dict[str, str] | None:
    found: dict[str, str] | None = getattr(info.config.get_text_config(), PLAN, None)
    return found


def _is_cut(call: Call, kinds: object) -> bool:
    """Whether products of the module that makes this attention call are cut."""
    assert isinstance(kinds, dict)
    return any(name.startswith(f"{call.layer}.") for name in kinds)
