"""`Ops`: every computation of a step, in torch. A subclass overrides the ops for which it has kernels."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from fastspec.kernels import reference
from fastspec.kernels.common import rounding
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.weights import Format, Weight


class Ops:
    """The ops of a step. Signature, shapes and meaning of an op are defined in `reference`, in torch.

    An override has the same parameters. Methods without a definition in `reference` describe an implementation: its
    weight formats, and the memory of its kernels.

    Attributes:
        name: "torch", "cpu", "triton" or "compiled".
        logit_words: words of 4 bytes that the end of a step takes for each logit: the logits, their padded, processed
            and scaled copies, the sort with its int64 ids, softmaxes and masks. 0: `shapes.logit_words`.
        logit_bytes: temporary bytes for logits. With more rows a step computes their logits part by part. None: the
            logits of a step are computed at once.
    """

    name = "torch"
    logit_words: int = 15
    logit_bytes: int | None = None

    # ops of the models' passes
    feed_rows = staticmethod(reference.feed_rows)
    embed = staticmethod(reference.embed)
    norm = staticmethod(reference.norm)
    joined_norms = staticmethod(reference.joined_norms)
    add_norm = staticmethod(reference.add_norm)
    gelu_tanh_mul = staticmethod(reference.gelu_tanh_mul)
    linear = staticmethod(reference.linear)
    layer_tail = staticmethod(reference.layer_tail)
    normed_logits = staticmethod(reference.normed_logits)
    route = staticmethod(reference.route)
    route_normed = staticmethod(reference.route_normed)
    experts = staticmethod(reference.experts)
    experts_normed = staticmethod(reference.experts_normed)
    attend = staticmethod(reference.attend)
    rotate = staticmethod(reference.rotate)
    store_heads = staticmethod(reference.store_heads)
    delta_rule = staticmethod(reference.delta_rule)
    gated_norm = staticmethod(reference.gated_norm)
    short_conv = staticmethod(reference.short_conv)
    mamba = staticmethod(reference.mamba)
    mamba_norm = staticmethod(reference.mamba_norm)
    selective_conv = staticmethod(reference.selective_conv)
    selective_scan = staticmethod(reference.selective_scan)
    gated = staticmethod(reference.gated)
    argmax = staticmethod(reference.argmax)

    # ops of drafting and verification
    look_up = staticmethod(reference.look_up)
    verify_commit = staticmethod(reference.verify_commit)
    sampled_commit = staticmethod(reference.sampled_commit)
    sampled_draw = staticmethod(reference.sampled_draw)
    processed_logits = staticmethod(reference.processed_logits)
    commit = staticmethod(reference.commit)
    record_logprobs = staticmethod(reference.record_logprobs)
    publish = staticmethod(reference.publish)

    # ops that round weights while they are loaded
    pack_rounded = staticmethod(rounding.pack_rounded)

    @staticmethod
    def weight_format(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Format:
        """Returns the format in which `linear`, `argmax` and `embed` read a weight (N, K)."""
        return "rows"

    @staticmethod
    def keeps_codes(shape: tuple[int, int], kind: CodesKind, dtype: torch.dtype, device: torch.device) -> bool:
        """True if `linear`, `argmax` and `embed` read a quantised weight of this kind.

        Otherwise loading dequantises the weight.

        Args:
            shape: (N, K).
            kind: format and blocks of the codes.
            dtype: dtype of activations.
            device: device of the weight.
        """
        return False

    @staticmethod
    def keeps_experts(shape: tuple[int, int], kind: CodesKind, dtype: torch.dtype, device: torch.device) -> bool:
        """True if `experts` reads a stack of quantised matrices (N, K) of this kind, with activations of `dtype`.

        Otherwise loading dequantises the stack.
        """
        return False

    @staticmethod
    def joins_shared(dtype: torch.dtype, hidden: int, device: torch.device) -> bool:
        """True if a shared expert is stored as the last routed expert, and its gate as the last row of the router.

        Both must have the same width. The router is then stored as rows. Otherwise the shared expert is a separate MLP.
        """
        return False

    def workspace(
        self, device: torch.device, batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]
    ) -> Any:
        """Allocates the parameter `work` of `attend` and `argmax` for one model. None for torch.

        Args:
            device: device of the model.
            batch: largest number of rows of a decode pass.
            max_queries: largest number of tokens of a row in such a pass.
            max_positions: largest number of positions of a row.
            heads: (query heads, KV heads, head_dim).
        """
        return None

    @staticmethod
    def workspace_bytes(batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]) -> int:
        """Returns the bytes of `workspace`."""
        return 0

    @staticmethod
    def commit_scratch(batch: int, max_drafts: int, device: torch.device) -> Any:
        """Allocates the parameter `scratch` of `verify_commit`, `sampled_commit` and `commit`."""
        return None

    @staticmethod
    def sampled_work(batch: int, max_drafts: int, vocab: int, device: torch.device) -> Any:
        """Allocates the parameter `work` of `sampled_commit` and `sampled_draw`."""
        return None

    @staticmethod
    def sampled_work_bytes(batch: int, max_drafts: int, vocab: int) -> int:
        """Returns the bytes of `sampled_work`."""
        return 0

    @staticmethod
    def record_work(batch: int, max_drafts: int, vocab: int, device: torch.device) -> Any:
        """Allocates `Record.work`, for recording log-probabilities."""
        return None

    @staticmethod
    def record_work_bytes(batch: int, max_drafts: int, vocab: int) -> int:
        """Returns the bytes of `record_work`."""
        return 0

    @staticmethod
    def compiling(executor: Executor | None = None) -> AbstractContextManager[None]:
        """Returns a context in which ops compute nothing, and `executor` compiles their kernels.

        Torch has no kernels to compile.
        """
        return nullcontext()

    @staticmethod
    def compiling_behind(*, early: bool = False) -> AbstractContextManager[Callable[[], bool] | None]:
        """Returns a context within `compiling()` for kernels that the end of `compiling()` does not wait for.

        It yields a function that tells if any such kernel was not compiled before. None: it can compile nothing.

        early: True to compile them beside the others, False to compile them after these.
        """
        return nullcontext()

    @staticmethod
    def is_brief() -> bool:
        """True if a pass may skip layers that launch no new kernel: within `compiling()`, and in warm-ups."""
        return False

    def store(self, rows: Tensor, gated: bool) -> Weight:
        """Makes a `Weight` of rows [N, K] in the format of `weight_format`. gated: the first N/2 rows are the gate."""
        form = self.weight_format((rows.shape[0], rows.shape[1]), rows.dtype, rows.device)
        return Weight.pack(rows, gated) if form == "packed" else Weight(rows)

    def replaced(self, **members: Callable[..., object] | str | int) -> Self:
        """Returns a copy of these ops in which the named ops and attributes are replaced.

        Raises:
            AttributeError: there is no op of that name.
        """
        other = copy(self)
        for name, member in members.items():
            getattr(self, name)
            setattr(other, name, member)
        return other


TORCH_OPS = Ops()
