"""Derives the settings of a generator from its arguments and models: device, dtypes, sizes and memory plan."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from tqdm import tqdm

from fastspec.adaptive.controller import AUTO, MAX_USEFUL
from fastspec.config import Config, check_range
from fastspec.engine.memory import FREE_SHARE, Layout, MemoryPlan, free_bytes
from fastspec.kernels.common.kv_scales import FP8
from fastspec.kernels.gpu import FP8_FROM, generation_of
from fastspec.kernels.ops import TORCH_OPS
from fastspec.kernels.select import ops_for
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.config import ModelSpec
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.hosted.info import HostedInfo
from fastspec.models.interface import ModelInfo, ModelSource
from fastspec.proposers.interface import feature_shape, features_of, is_deterministic
from fastspec.proposers.ngram import NGram
from fastspec.proposers.suffix import Suffix
from fastspec.sampling.rules import Verification, checked, needs_draft_probs
from fastspec.shapes import MAX_DRAFTS, MAX_LOOKED_UP, UNTILED, Tiling

# Rows of every product of a step. On a CPU 8 rows are enough for k + 1 tokens of one prompt and take hardly longer than
# 5. On a GPU a pass takes the time to read the weights. So padding to 64 rows costs little, and a batch of 8 rows with
# 8 tokens each reads the weights once.
_DECODE_TILING = {"cpu": Tiling(rows=8, queries=8), "cuda": Tiling(rows=64, queries=8)}
# Prompt tokens of a prefill pass. A GPU needs some hundred to be fully used. A CPU needs fewer, and padding costs more.
_CHUNKS = {"cpu": (64, 128, 256), "cuda": (64, 128, 256, 512, 1024, 2048)}
_ONE_CHUNK = (64,)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a generator: its arguments, and values for arguments that the user left out.

    Such values depend on the models. Settings are computed before any weights are loaded or memory is allocated.

    Attributes:
        config: arguments as the user gave them.
        device: device of all buffers.
        layout: sizes and dtypes from which the memory plan is computed.
        max_length: largest number of tokens of a sequence: prompt and new tokens.
        length_reason: text with the reason for `max_length`.
        decode_tiling: tile shapes of the matrix products of a decode step.
        graphs: True if steps are captured as CUDA graphs.
        memory: bytes that the generator needs, by use.
        verification: rule that accepts or rejects draft tokens.
        auto: True if a call that does not set num_speculative_tokens chooses it anew while decoding.
        ranks: description of the processes that share the target. Empty: this process is alone.
    """

    config: Config
    device: torch.device
    layout: Layout
    max_length: int
    length_reason: str
    decode_tiling: Tiling
    graphs: bool
    memory: MemoryPlan
    verification: Verification
    auto: bool = False
    ranks: str = ""

    @property
    def exact(self) -> bool:
        """True if the bits of a sequence's results do not depend on other sequences in the batch (`exact=True`)."""
        return self.decode_tiling.rows is not None


def settings_of(target: ModelSource, draft: ModelSource | None, config: Config) -> Settings:
    """Checks the arguments against the models and fills in defaults. Allocates nothing.

    Args:
        target, draft: sources of the models. Only their specs are read.
        config: arguments of the generator.

    Raises:
        ValueError: a value is out of range, or does not fit the models or the device.
        MemoryError: the generator would need more memory than is free. The message names settings that fit.
    """
    on, rule, proposer = device_of(config.device, target), checked(config.verification), config.proposer
    drafts = _drafts(config.num_speculative_tokens, draft, proposer, on)
    if drafts > MAX_DRAFTS and (config.compile or target.spec.hosting):
        raise ValueError(
            f"num_speculative_tokens={drafts}: compile=True and hosted families take {MAX_DRAFTS} at most, and "
            f"{target.name} has compile={config.compile}, hosted={bool(target.spec.hosting)}"
        )
    max_batch_size = check_range("max_batch_size", config.max_batch_size, 1, 1024)
    page_size = check_range("page_size", config.page_size, 1, 4096)
    layout = Layout(
        batch=max_batch_size,
        max_drafts=drafts if draft or proposer else 0,
        page_size=page_size,
        target=target.spec,
        target_dtype=dtype_of(config.dtype, target.spec, on),
        draft=draft.spec if draft else None,
        draft_dtype=dtype_of(config.dtype, (draft or target).spec, on),  # without a draft: the target's dtype
        chunks=_chunks(config, on, target, draft),
        ops=ops_for(on),
        keep_draft_probs=needs_draft_probs(rule) and not (proposer and is_deterministic(proposer) and not draft),
        keeps_prefixes=config.prefix_cache,
        ranks=target.ranks,
        parallel_draft=isinstance(draft, Checkpoint) and draft.mask_id is not None,
        prediction_tokens=proposer.prediction_tokens if isinstance(proposer, Suffix) else 0,
        lookup_bytes=proposer.nbytes if isinstance(proposer, Suffix) else 0,
    )
    layout = replace(layout, kv_dtypes=_kv_dtypes(config, layout, target, draft, on))
    read, kept = _features(target, draft, proposer, drafts)
    layout = replace(layout, feature_layers=read, feature_elements=kept)
    layout = replace(layout, weights=_weights(layout, target, draft, on, config.compile))
    length, reason = _max_length(config.max_length, layout, on, _free_bytes(on, target))
    tiling = _DECODE_TILING[on.type] if config.exact else UNTILED
    memory = layout.plan(length, _free_bytes(on, target))
    _check_compile(config, on, head=draft if isinstance(draft, HeadCheckpoint) else None)
    _check_hosted(target, draft, config.compile, layout.feature_layers)
    _check_recurrent(target, draft, config.compile)
    auto = isinstance(config.num_speculative_tokens, str) and layout.max_drafts > 0
    return Settings(config, on, layout, length, reason, tiling, _graphs(config.graphs, on), memory, rule, auto)


def _chunks(config: Config, device: torch.device, target: ModelSource, draft: ModelSource | None) -> tuple[int, ...]:
    """Returns the numbers of prompt tokens that one prefill pass may have, ascending.

    On a CPU it is one number, unless all matrix products give the same bits for every number of tokens. Only matrix
    products with blocked weights give the same bits.
    """
    if device.type != "cpu" or ops_for(device).name != "cpu":
        return _CHUNKS[device.type]
    for source in (target, *(() if draft is None else (draft,))):
        spec = source.spec
        native = isinstance(source, Checkpoint) and isinstance(spec, ModelSpec) and source.ranks == 1
        if not native or config.compile or spec.routed_elements or spec.state_rules:
            return _ONE_CHUNK
        if ops_for(device).weight_format((1, 1), dtype_of(config.dtype, spec, device), device) != "blocked":
            return _ONE_CHUNK
    return _CHUNKS[device.type]


def _kv_dtypes(
    config: Config, layout: Layout, target: ModelSource, draft: ModelSource | None, device: torch.device
) -> tuple[torch.dtype, torch.dtype] | None:
    """Returns the dtypes of the KV cache pages of (target, draft). None: pages have the dtypes of the models.

    A draft head has few layers, so its pages are never stored in 8 bits.

    Raises:
        ValueError: fp8 pages are not supported for this argument, model or device.
    """
    asked = config.kv_dtype
    apart = tuple(asked) if isinstance(asked, tuple | list) else (asked, asked)
    if len(apart) != 2 or any(each not in ("fp8", None) for each in apart):
        raise ValueError(
            f"kv_dtype must be 'fp8' or None, or a pair of these for target and draft, got {asked!r}; None keeps K and "
            "V in the model's dtype"
        )
    if apart == (None, None):
        return None
    hosted = [each.name for each in (target, draft) if each is not None and each.spec.hosting]
    if hosted:
        raise ValueError(f"kv_dtype='fp8' is for native families alone, and {hosted[0]} is hosted: leave it out")
    if config.compile:
        raise ValueError("kv_dtype='fp8' does not go with compile=True; leave one of them out")
    if device.type == "cuda" and not generation_of(device).reads_fp8 and layout.ops.name == "triton":
        raise ValueError(
            f"kv_dtype='fp8' needs a GPU of compute capability {'.'.join(map(str, FP8_FROM))} or later, and {device} "
            f"has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}: leave it out"
        )
    narrow = apart[0] is not None, apart[1] is not None and not isinstance(draft, HeadCheckpoint)
    return FP8 if narrow[0] else layout.target_dtype, FP8 if narrow[1] else layout.draft_dtype


def _features(target: ModelSource, draft: ModelSource | None, proposer: object | None, drafts: int) -> tuple[int, int]:
    """Returns sizes of the data that a draft head or a proposer reads from the target's forward passes.

    Args:
        target: source of the target.
        draft: source of a draft model or of a draft head. None: there is neither.
        proposer: argument `proposer` of the generator. None: it was not given.
        drafts: largest number of draft tokens per step.

    Returns:
        (layers, elements): number of target layers whose hidden states are read, and number of elements stored for each
        sequence between decode steps. Both are 0 if no hidden states are read.
    """
    if isinstance(draft, HeadCheckpoint):
        read, shape = draft.spec.feature_layers, draft.spec.kept
    else:
        read, shape = len(features_of(proposer)), feature_shape(proposer, drafts, target.spec.hidden_size)
    return read, math.prod(shape) if shape else 0


def _weights(
    layout: Layout, target: ModelSource, draft: ModelSource | None, device: torch.device, compile: bool
) -> tuple[int, int]:
    """Returns the bytes of the weights of (target, draft) on the device."""
    ops = TORCH_OPS if compile else layout.ops  # torch.compile does not support packed or quantised weights
    of_draft = draft.bytes_loaded(layout.draft_dtype, device, ops) if draft else 0
    return target.bytes_loaded(layout.target_dtype, device, ops), of_draft


def announce(
    settings: Settings, target: ModelSource, draft: ModelSource | None, progress: bool | Callable[[str], object]
) -> None:
    """Tells max_length, the memory plan and the memory of quantised weights, before weights are loaded.

    Args:
        settings: settings of the generator.
        target, draft: sources of the models. draft is None if there is none.
        progress: function that is called with each line. True: lines are written to stderr.
    """
    tell = progress if callable(progress) else _write_line
    lines = [f"max_length = {settings.max_length} ({settings.length_reason}); {settings.memory}"]
    sizes = settings.memory.target_weights, settings.memory.draft_weights
    for role, source, size in zip(("target", "draft"), (target, draft), sizes, strict=True):
        if source is not None and source.stored:
            lines.append(f"{role}: {source.stored}; at most {size / 2**20:.1f} MiB in memory")
    for line in lines:
        tell(line)


def _write_line(line: str) -> None:
    tqdm.write(f"fastspec: {line}", file=sys.stderr)


def _drafts(asked: int | str, draft: ModelSource | None, proposer: object | None, device: torch.device) -> int:
    """Returns the largest number of draft tokens per step, which determines the sizes of buffers.

    For "auto" it is the largest number that may save time. It is smaller for a draft model than for a head, because
    passes of a draft model take longer.

    Args:
        asked: the argument num_speculative_tokens.
        draft: source of a draft model or head. None: there is neither.
        proposer: the argument proposer. None: there is none.
        device: device of the generator.

    Raises:
        ValueError: the number is out of range, or more than the drafter can draft on this device.
    """
    limit = draft.spec.max_drafts if isinstance(draft, HeadCheckpoint) else None
    if isinstance(asked, str):
        if asked != AUTO:
            raise ValueError(f"num_speculative_tokens must be a whole number or {AUTO!r}, got {asked!r}")
        model = draft is not None and not isinstance(draft, HeadCheckpoint)
        useful = MAX_USEFUL if model or (draft is None and proposer is None) else MAX_DRAFTS
        return useful if limit is None else min(useful, limit)
    alone = draft is None and isinstance(proposer, NGram) and device.type == "cpu"
    if type(asked) is int and MAX_DRAFTS < asked <= MAX_LOOKED_UP and not alone:
        drafter = draft.name if draft is not None else proposer
        raise ValueError(
            f"num_speculative_tokens={asked}: more than {MAX_DRAFTS} need a CPU, and NGram() or Suffix() without a "
            f"draft model; here the device is {device.type}, and {drafter or 'nothing'} drafts. "
            f"Use at most {MAX_DRAFTS}"
        )
    drafts = check_range("num_speculative_tokens", asked, 0, MAX_LOOKED_UP if alone else MAX_DRAFTS)
    if draft is not None and limit is not None and drafts > limit:
        raise ValueError(f"num_speculative_tokens={drafts}, and {draft.name} drafts {limit} tokens a step at most")
    return drafts


def device_of(device: torch.device | str | None, target: ModelSource) -> torch.device:
    """Returns the device of a generator: `device`, or its default if None.

    The default is the device of a loaded target model, else CUDA if available, else the CPU.
    """
    if device is None and target.module is not None:
        chosen = next(target.module.parameters()).device
    else:
        try:
            chosen = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device {device!r} is not one torch knows; use 'cpu', 'cuda' or 'cuda:N'") from error
    if chosen.type not in _DECODE_TILING:
        raise ValueError(f"device {chosen} is not supported; use one of {', '.join(_DECODE_TILING)}")
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = chosen.index if chosen.index is not None else torch.cuda.current_device() if count else 0
        if index >= count:
            raise ValueError(f"device {chosen} is not there: torch sees {count} CUDA devices; use another, or 'cpu'")
        chosen = torch.device("cuda", index)
    return chosen


def _graphs(asked: bool | None, device: torch.device) -> bool:
    if asked and device.type != "cuda":
        raise ValueError(f"graphs=True needs a CUDA device, got {device}; leave graphs unset, or pass device='cuda'")
    # without Triton, attention gathers as many pages as the rows are long, so one graph cannot serve all lengths
    possible = device.type == "cuda" and ops_for(device).name == "triton"
    if asked and not possible:
        raise ValueError("graphs=True needs Triton; install it (pip install triton), or leave graphs unset")
    return possible if asked is None else asked


def _check_compile(config: Config, device: torch.device, head: HeadCheckpoint | None) -> None:
    compile = config.compile
    if compile and head:
        raise ValueError(
            f"compile=True is for draft models, and {head.name} is a head ({head.spec.found}): leave it out"
        )
    if compile and config.exact:
        raise ValueError(
            "compile=True needs exact=False: the compiler chooses by shape, so a row's bits depend on what runs beside "
            "it"
        )
    if compile and device.type == "cuda" and ops_for(device).name != "triton":
        raise ValueError("compile=True on CUDA needs Triton; install it (pip install triton), or leave compile unset")


def _check_hosted(target: ModelSource, draft: ModelSource | None, compile: bool, features: int) -> None:
    hosted = [source.name for source in (target, draft) if source is not None and source.spec.hosting]
    if compile and hosted:
        raise ValueError(
            f"compile=True is for native families alone, and {hosted[0]} is hosted: leave compile unset; exact=False "
            "runs it without fixed shapes"
        )
    if features and isinstance(target.spec, HostedInfo) and not target.spec.layer_names:
        raise ValueError(
            f"the proposer reads hidden states of the target's layers, and {target.name} is hosted, and its layers are "
            "not in one list: use another proposer, or a target of a native family"
        )


def _check_recurrent(target: ModelSource, draft: ModelSource | None, compile: bool) -> None:
    for source in (target, draft):
        if compile and source is not None and source.spec.state_bytes(0, torch.float32):
            raise ValueError(
                f"compile=True is for models that attend in every layer, and {source.name} has recurrent ones: leave "
                "compile unset"
            )


def dtype_of(dtype: torch.dtype | str | None, spec: ModelInfo, device: torch.device) -> torch.dtype:
    """Returns the dtype of a model's weights: `dtype`, or its default if None.

    The default is the checkpoint's dtype on CUDA, and float32 on a CPU.
    """
    if dtype is None:
        return spec.dtype if device.type == "cuda" else torch.float32
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if named not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    return cast("torch.dtype", named)


def _free_bytes(device: torch.device, target: ModelSource) -> int:
    """Returns the free bytes for this process. Each rank has its own GPU, but ranks on a CPU share its memory."""
    return free_bytes(device) // (target.ranks if device.type == "cpu" else 1)


def _max_length(asked: int | None, layout: Layout, device: torch.device, free: int) -> tuple[int, str]:
    """Returns the max_length of a generator, and a text with the reason.

    Args:
        asked: the argument max_length. None: the models' context, or the largest length that fits in memory.
        layout: sizes from which the memory plan is computed.
        device: device of the generator.
        free: free bytes on the device.

    Raises:
        MemoryError: `asked` does not fit, or no length fits.
    """
    # default: the context that both models support; above the draft's context rows continue without drafts
    context = layout.target.max_length
    preferred = min(context, layout.draft.max_length) if layout.draft else context
    allowed = int(free * FREE_SHARE)
    if asked is not None:
        asked = check_range("max_length", asked, 2, context)
        if layout.plan(asked, free).total > allowed:
            raise MemoryError(
                f"max_length={asked} with max_batch_size={layout.batch} needs {layout.plan(asked, free)}; "
                f"{allowed / 2**30:.3f} GiB may be taken on {device}. {_what_fits(layout, asked, context, allowed)}"
            )
        return asked, "as asked"
    fits = layout.largest_length(preferred, allowed)
    if fits < 2:
        raise MemoryError(
            f"the models need {layout.plan(2, free)}; {allowed / 2**30:.3f} GiB may be taken on {device}. "
            f"{_what_fits(layout, 2, context, allowed)}"
        )
    return fits, "the models' context" if fits == preferred else "what fits in 90% of the free memory"


def _what_fits(layout: Layout, length: int, context: int, allowed: int) -> str:
    """Returns a text with the largest max_length for this batch size, and the largest batch size for this max_length.

    Args:
        layout: sizes from which the memory plan is computed.
        length: the max_length that does not fit.
        context: upper limit of max_length.
        allowed: bytes that the generator may use.
    """
    longest = layout.largest_length(context, allowed)
    if longest >= 2:
        text = f"With max_batch_size={layout.batch} the largest max_length that fits is {longest}"
    else:
        text = f"With max_batch_size={layout.batch} no max_length fits"
    rows = layout.largest_batch(length, allowed)
    if rows:
        return f"{text}; with max_length={length} the largest max_batch_size is {rows}"
    return (
        f"{text}; with max_length={length} not even one row fits: use smaller models or a smaller dtype, or free memory"
    )
