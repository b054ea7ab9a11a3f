"""`Ops`: the operations of a decoding step, in torch. A subclass overrides those for which it has kernels."""

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
    """Operations of a decoding step. `reference` defines the signature, shapes and meaning of each, in torch.

    An override has the same parameters. Methods without a definition in `reference` describe an implementation: its
    weight formats, and the memory of its kernels.

    Attributes:
        name: "torch", "cpu", "triton" or "compiled".
        logit_words: temporary memory for sampling and verification, in 4-byte words per logit. It holds the logits,
            their padded, processed and scaled copies, the sort with its int64 ids, softmaxes and masks. 0: the ops need
            no copies, and `shapes.logit_words` gives the number.
        logit_bytes: limit of this temporary memory, in bytes. If all rows need more, a step computes and verifies the
            logits of some rows at a time. None: no limit.
    """

    name = "torch"
    logit_words: int = 15
    logit_bytes: int | None = None

    # ops of a model's forward pass
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
        """Returns the layout in which `linear`, `argmax` and `embed` read a weight that is not quantised.

        Args:
            shape: (N, K).
            dtype: dtype of the weight.
            device: device of the weight.
        """
        return "rows"

    @staticmethod
    def keeps_codes(shape: tuple[int, int], kind: CodesKind, dtype: torch.dtype, device: torch.device) -> bool:
        """True if `linear`, `argmax` and `embed` can read a quantised weight of this kind without dequantising it.

        Otherwise the weight is dequantised while it is loaded.

        Args:
            shape: (N, K).
            kind: quantisation format, and shape of the blocks that share a scale.
            dtype: dtype of activations.
            device: device of the weight.
        """
        return False

    @staticmethod
    def keeps_experts(shape: tuple[int, int], kind: CodesKind, dtype: torch.dtype, device: torch.device) -> bool:
        """True if `experts` can read quantised expert matrices (N, K) of this kind, with activations of `dtype`.

        Otherwise these matrices are dequantised while they are loaded.
        """
        return False

    @staticmethod
    def joins_shared(dtype: torch.dtype, hidden: int, device: torch.device) -> bool:
        """True if an MoE layer's shared expert can be stored as one or more routed experts.

        It must also be as wide as one or more of them. Its gate is then a row of the router, which is
        row-major. Otherwise the shared expert is a separate MLP.

        Args:
            dtype: dtype of activations.
            hidden: hidden size of the model.
            device: device of the weights.
        """
        return False

    def workspace(
        self, device: torch.device, batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]
    ) -> Any:
        """Allocates the argument `work` of `attend` and `argmax`, scratch memory for one model. None if not needed.

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
        """Returns the bytes of device memory that `workspace` allocates for the same arguments."""
        return 0

    @staticmethod
    def commit_scratch(batch: int, max_drafts: int, device: torch.device) -> Any:
        """Allocates the argument `scratch` of `verify_commit`, `sampled_commit` and `commit`. None if not needed."""
        return None

    @staticmethod
    def sampled_work(batch: int, max_drafts: int, vocab: int, device: torch.device) -> Any:
        """Allocates the argument `work` of `sampled_commit` and `sampled_draw`, scratch memory. None if not needed."""
        return None

    @staticmethod
    def sampled_work_bytes(batch: int, max_drafts: int, vocab: int) -> int:
        """Returns the bytes of device memory that `sampled_work` allocates for the same arguments."""
        return 0

    @staticmethod
    def record_work(batch: int, max_drafts: int, vocab: int, device: torch.device) -> Any:
        """Allocates `Record.work`, scratch memory for recording log-probabilities. None if not needed."""
        return None

    @staticmethod
    def record_work_bytes(batch: int, max_drafts: int, vocab: int) -> int:
        """Returns the bytes of device memory that `record_work` allocates for the same arguments."""
        return 0

    @staticmethod
    def compiling(executor: Executor | None = None) -> AbstractContextManager[None]:
        """Returns a context in which calls of ops only compile their kernels, and compute nothing.

        Ops in torch have no kernels to compile. For them the context does nothing, and ops compute as usual.

        Args:
            executor: runs the compilations. None: threads of this process run them.
        """
        return nullcontext()

    @staticmethod
    def compiling_behind(*, early: bool = False) -> AbstractContextManager[Callable[[], bool] | None]:
        """Returns a context, used inside `compiling()`, whose kernels are compiled in the background.

        The end of `compiling()` does not wait for these kernels. The context yields a function, which returns True if
        any of these kernels was not in the disk cache. It yields None if it cannot compile in the background.

        Args:
            early: True to compile these kernels at the same time as those of `compiling()`, False to compile them after
                those.
        """
        return nullcontext()

    @staticmethod
    def is_brief() -> bool:
        """True if a pass may skip layers that use the same kernels as earlier layers: in `compiling()` and warm-ups."""
        return False

    def store(self, rows: Tensor, gated: bool) -> Weight:
        """Makes a `Weight` of a matrix [N, K], in the layout that `weight_format` returns.

        Args:
            rows: [N, K].
            gated: True if the first N/2 rows are the gate projection of an MLP, and the others its up projection.
        """
        form = self.weight_format((rows.shape[0], rows.shape[1]), rows.dtype, rows.device)
        return Weight.pack(rows, gated) if form == "packed" else Weight(rows)

    def replaced(self, **members: Callable[..., object] | str | int) -> Self:
        """Returns a copy of these ops in which `members` replace the ops and attributes with their names.

        Raises:
            AttributeError: a name is no op or attribute.
        """
        other = copy(self)
        for name, member in members.items():
            getattr(self, name)
            setattr(other, name, member)
        return other


TORCH_OPS = Ops()
