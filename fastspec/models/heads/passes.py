"""Runs the forward passes of learned drafters: EAGLE-3, MTP, DFlash and their relatives.

Each drafter is a decoder whose input is made from the target's hidden states.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import Self, override

from fastspec.errors import CheckpointError
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.attention import HeadsCall
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.decoder import Decoder
from fastspec.models.families.plan import LayerPlan
from fastspec.models.heads import dflash2_spec, dspark_spec
from fastspec.models.heads.dflash2_spec import DFlash2Spec
from fastspec.models.heads.dflash_spec import DFlashSpec
from fastspec.models.heads.dspark_spec import DSparkSpec
from fastspec.models.heads.eagle3_spec import MASK_HIDDEN, Eagle3Spec, PEagleSpec
from fastspec.models.heads.mtp_names import EMBED_NORM, FC, HIDDEN_NORM, NORM, OUTPUT, part_name
from fastspec.models.heads.mtp_spec import MtpSpec
from fastspec.models.heads.weights import HeadWeights
from fastspec.models.layer_table import DecoderWeights, LayerWeights
from fastspec.shapes import ForwardBatch, Tiling


class Lender(Protocol):
    """Target model whose embedding and output matrix a learned drafter may use: a `Decoder` or a `HostedModel`."""

    @property
    def weights(self) -> DecoderWeights:
        """The target's weights."""

    def head_logits(self, x: Tensor, tiling: Tiling, *, norm: tuple[Tensor, float] | None = None) -> Tensor:
        """Returns fp32 logits [..., V]: x [..., hidden] times the target's output matrix.

        Args:
            x: hidden states.
            tiling: tile sizes of the product.
            norm: (weight, epsilon) of an RMSNorm that is applied to x first. None: no norm.
        """

    def head_argmax(
        self,
        x: Tensor,
        limit: int,
        tiling: Tiling,
        out: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        work: Any = None,
        ids: Tensor | None = None,
    ) -> None:
        """Writes the id of the largest logit below `limit` for each row of x [R, hidden] to `out`, int64 [R].

        Args:
            x, tiling, norm: see `head_logits`.
            limit: ids from here on are not considered.
            out: int64 [R], receives the ids.
            work: scratch memory from `Ops.workspace`. None for a `HostedModel`.
            ids: see `CausalModel.argmax`.
        """


class HeadDecoder(Decoder):
    """Base class of learned drafters: a decoder that can write K and V to its cache without computing attention.

    If several ranks share the target, each has some rows of the target's output matrix. A drafter that uses this matrix
    calls the target's functions for logits. They gather the logits of all ranks.
    """

    _lender: Lender | None = None

    def borrowing(self, target: Lender) -> Self:
        """Sets the target, which computes the logits if this drafter uses the target's output matrix. Returns self."""
        self._lender = target if self.weights.head is target.weights.head else None
        return self

    @override
    def head_logits(self, x: Tensor, tiling: Tiling, **options: Any) -> Tensor:
        if self._lender is not None:
            return self._lender.head_logits(x, tiling, **options)
        return super().head_logits(x, tiling, **options)

    @override
    def head_argmax(self, x: Tensor, limit: int, tiling: Tiling, out: Tensor, **options: Any) -> None:
        if self._lender is not None:
            self._lender.head_argmax(x, limit, tiling, out, **options)
        else:
            super().head_argmax(x, limit, tiling, out, **options)

    def _resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        """Runs the last layer, beginning with its attention. Returns the residual stream after it, [B, Q, hidden].

        Args:
            made: [B, Q, attention_inputs], the layer's residual stream, q, k and v, concatenated.
            rows: positions of the tokens in `made`.
        """
        hidden = self.spec.hidden_size
        x, qkv = made[..., :hidden].contiguous(), made[..., hidden:].contiguous()
        return self._layer(self.spec.num_layers - 1, x, qkv, rows)[0]

    def _store(self, index: int, heads: Tensor, rows: ForwardBatch, *, num_heads: int) -> Tensor:
        """Writes keys and values of tokens to a layer's KV cache. Keys are normed and rotated (RoPE) first.

        Args:
            index: index of the layer.
            heads: [B, Q, elements], the heads of q, k and v of each token. If `num_heads` is 0, only those of k and v.
            rows: positions and write mask of the tokens.
            num_heads: number of query heads in `heads`.

        Returns:
            The queries, normed and rotated. Empty if `num_heads` is 0.
        """
        keys, values = self.cache.keys[index], self.cache.values[index]
        where = keys, values, rows.block_table, rows.positions, rows.write_mask
        call = HeadsCall(heads, *self._tables[0], *where, num_heads=num_heads, norms=self._norms(index))
        return self.ops.store_heads(call)


class Eagle3(HeadDecoder):
    """EAGLE-3 head (arXiv 2503.01840): its weights, KV cache and forward passes. `Eagle3Spec` has the formulas.

    The input at position i is the target's hidden state at i, and the token at i + 1. So `rows.ids` of every
    pass are the tokens one position later. The head's KV cache is one position shorter than the target's.

    Args:
        spec: sizes and arithmetic of the head.
        weights: the head's own weights, and those that it shares with the target.
        cache: KV pages of the head's layers. The target's page table is used.
        ops, sizes: see `Decoder`.
    """

    def __init__(self, spec: Eagle3Spec, weights: HeadWeights, cache: PagedKVCache, ops: Ops, **sizes: Any) -> None:
        super().__init__(spec.decoder, weights.decoder, cache, ops, **sizes)
        self.head: Eagle3Spec = spec
        self._own = weights
        self._hidden_norm = _there(weights.vector("layers.0.hidden_norm.weight"))
        self._chunk_norms = [weights.vector(f"fc_norm.{index}.weight") for index in range(spec.feature_layers)]

    def condense(self, features: Tensor, tiling: Tiling) -> Tensor:
        """Joins the target's hidden states of several layers to one vector per position: g in `Eagle3Spec`.

        Args:
            features: [B, Q, layers, target's hidden], the target's hidden states.
            tiling: tile sizes of the product.

        Returns:
            g [B, Q, hidden].
        """
        eps = self.spec.rms_eps
        if self.head.fc_norm:
            normed = [
                self.ops.norm(chunk.contiguous(), norm, eps)
                for chunk, norm in zip(features.unbind(dim=2), self._chunk_norms, strict=True)
                if norm is not None
            ]
            features = torch.stack(normed, dim=2)
        wide, before = features.flatten(2), self._own.vector("input_norm.weight")
        fc = self._own.matrix("fc.weight")
        if fc is None:
            return wide if before is None else self.ops.norm(wide.contiguous(), before, eps)
        options: dict[str, Any] = {} if before is None else {"norm": (before, eps)}
        return self.ops.linear(wide, fc, self._own.vector("fc.bias"), tiling, **options)

    def drafted(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Runs all layers. Returns the residual stream after the last layer, [B, Q, hidden].

        Writes K and V of all layers to the cache.

        Args:
            g: [B, Q, hidden], the hidden states from `condense` or `feature`.
            rows: positions of g. Their ids are the tokens one position later.
        """
        x, qkv = self._upto_last(g, rows)
        return self._layer(self.spec.num_layers - 1, x, qkv, rows)[0]

    def absorb(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes K and V of all layers to the cache. Skips the last layer's attention and everything after it.

        Args:
            g, rows: see `drafted`.

        Returns:
            [B, Q, attention_inputs], the input of the last layer's attention. `resumed` continues from it.
        """
        x, qkv = self._upto_last(g, rows)
        self._store(self.spec.num_layers - 1, qkv, rows, num_heads=self.spec.num_heads)
        return torch.cat((x, qkv), dim=-1)

    def resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        """Completes a pass that `absorb` began. Returns what `drafted` would return, [B, Q, hidden].

        Args:
            made: [B, Q, attention_inputs], the result of `absorb` for these positions.
            rows: the positions. Their ids are not read.
        """
        return self._resumed(made, rows)

    def feature(self, x: Tensor) -> Tensor:
        """Returns the hidden states g [B, Q, hidden] that `drafted` reads at the next position.

        At positions of draft tokens there are no hidden states of the target. The head's own output x of `drafted`
        replaces them.
        """
        return self.ops.norm(x, self.weights.norm, self.spec.rms_eps) if self.head.norm_output else x

    def _upto_last(self, g: Tensor, rows: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Runs all layers up to the last layer's attention. Returns (residual stream, q, k and v of the last layer)."""
        layer, eps = self.weights.layers[0], self.spec.rms_eps
        assert layer.input_norm is not None, "of the embeddings"
        norms = layer.input_norm, self._hidden_norm
        eh = self.ops.joined_norms(self.weights.embed, rows.ids, g, norms, eps)
        x = eh[..., g.shape[-1] :].contiguous() if self.head.norm_before_residual else g
        qkv = self.ops.linear(eh, layer.mixer[0], layer.qkv_bias, rows.tiling)
        for index in range(self.spec.num_layers - 1):
            x, following = self._layer(index, x, qkv, rows)
            assert following is not None, "only the last layer leaves none"
            qkv = following
        return x, qkv


class PEagle(Eagle3):
    """P-EAGLE head: its weights, KV cache and forward passes. `PEagleSpec` has the formulas.

    A pass also writes K and V of mask tokens to the cache, at the positions after the text. Later passes overwrite them
    before they read these positions.

    Args:
        spec, weights, cache, ops, sizes: see `Eagle3`.
    """

    def __init__(self, spec: PEagleSpec, weights: HeadWeights, cache: PagedKVCache, ops: Ops, **sizes: Any) -> None:
        super().__init__(spec, weights, cache, ops, **sizes)
        self.head: PEagleSpec = spec

    def block(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Runs one pass for all draft tokens of a step. Returns the residual stream after all layers, [B, Q, hidden].

        Args:
            g: [B, 1, hidden], from `condense`, for the first of the Q positions. The other positions use `mask_hidden`.
            rows: Q positions of each row. The first id is the token one position later. The other ids are mask tokens.
        """
        read = (1, 1, self.head.feature_layers, self.head.target.hidden_size)
        masked = self.condense(_there(self._own.vector(MASK_HIDDEN)).view(read), rows.tiling)
        count = rows.positions.shape[1] - 1
        return self.drafted(torch.cat((g, masked.expand(len(g), count, -1)), dim=1), rows)


class MtpPart(NamedTuple):
    """Weights of an MTP layer outside of its decoder layer.

    Attributes:
        fc: [hidden, 2 hidden], the matrix that joins embedding and hidden state.
        embed_norm, hidden_norm: norms of the embedding and of the hidden state, before `fc`.
        norm: norm after the decoder layer.
        head: output matrix of the layer. None: that of the first layer.
    """

    fc: Weight
    embed_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor
    head: Weight | None


class Mtp(HeadDecoder):
    """MTP layers (arXiv 2412.19437): their weights, KV cache and forward passes. `MtpSpec` has the formulas.

    The input of layer j at position i is a hidden state at i, and the token at i + 1 + j. So `rows.ids` of a pass are
    the tokens 1 + j positions later. The KV cache of layer j is 1 + j positions shorter than the target's.

    Args:
        spec: sizes and arithmetic of the layers.
        weights: weights of the layers, and those that they share with the target.
        cache: KV pages of the layers. The target's page table is used.
        ops, sizes: see `Decoder`.
    """

    def __init__(self, spec: MtpSpec, weights: HeadWeights, cache: PagedKVCache, ops: Ops, **sizes: Any) -> None:
        super().__init__(spec.decoder, weights.decoder, cache, ops, **sizes)
        self.head = spec
        self._parts = [_mtp_part(weights, 0 if spec.shares_parts else index) for index in range(spec.num_layers)]
        self._outputs = [self if part.head is None else self._with_output(part, part.head) for part in self._parts]
        plan = spec.decoder.plans[0]
        plain = plan.norm == "rms" and plan.qk_norm in (None, "head") and not (plan.output_gate or plan.head_gate)
        self._stores = plain and plan.rope == 0 and plan.latent is None

    def condense(self, features: Tensor, tiling: Tiling) -> Tensor:
        """Removes the axis of layers from the target's hidden states: [B, Q, 1, hidden] becomes g [B, Q, hidden].

        `tiling` is not used. `Eagle3.condense` needs it for a product.
        """
        return features[:, :, 0]

    def output(self, index: int) -> Mtp:
        """Returns the drafter whose `logits` and `argmax` are those of MTP layer `index`."""
        return self._outputs[index]

    def _with_output(self, part: MtpPart, head: Weight) -> Mtp:
        """Returns a copy of this drafter with the final norm and the output matrix of another layer."""
        found = copy.copy(self)
        found.weights = replace(self.weights, norm=part.norm, head=head)
        return found

    def drafted(self, g: Tensor, rows: ForwardBatch, index: int = 0) -> Tensor:
        """Runs MTP layer `index` and its final norm. Returns the hidden states for logits, [B, Q, hidden].

        Writes K and V of the layer to the cache. With `MtpSpec.own_heads`, `logits` applies the final norm.

        Args:
            g: [B, Q, hidden], the hidden states from `condense` or `feature`. For a layer after the first, the result
                of `drafted` for the layer before.
            rows: positions of g. Their ids are the tokens 1 + index positions later.
            index: index of the MTP layer.
        """
        x, qkv = self._entered(index, g, rows)
        attended = self._attend(index, self.weights.layers[index], qkv, rows)
        return self._tail(index, attended, x, rows.tiling)

    def absorb(self, g: Tensor, rows: ForwardBatch, index: int = 0) -> Tensor:
        """Writes K and V of MTP layer `index` to the cache. Skips the MLP.

        Also skips attention if an op can store K and V without it.

        Args:
            g, rows, index: see `drafted`.

        Returns:
            [B, Q, attention_inputs], the input of the layer's attention. `resumed` continues from it.
        """
        x, qkv = self._entered(index, g, rows)
        if self._stores:
            self._store(index, qkv, rows, num_heads=self.spec.num_heads)
        else:
            self._attend(index, self.weights.layers[index], qkv, rows)
        return torch.cat((x, qkv), dim=-1)

    def resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        """Completes a pass that `absorb` began for the last layer. Returns what `drafted` would return, [B, Q, hidden].

        Args:
            made, rows: see `Eagle3.resumed`.
        """
        x = self._resumed(made, rows)
        return x if self.head.own_heads else self._norm(self.spec.plans[0], x, self.weights.norm)

    def feature(self, x: Tensor) -> Tensor:
        """Returns x, the result of `drafted`, unchanged. At the next position `drafted` reads it as g."""
        return x

    def _entered(self, index: int, g: Tensor, rows: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Returns the input of decoder layer `index`, [B, Q, hidden], and the layer's q, k and v."""
        x = self._joint(index, g, rows)
        qkv = self._qkv(index, x, rows.tiling)
        assert qkv is not None, "the layers of a head attend"
        return x, qkv

    def _joint(self, index: int, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Multiplies embeddings and hidden states g by `fc`. Returns the decoder layer's input, [B, Q, hidden]."""
        plan, part, eps = self.spec.plans[index], self._parts[index], self.spec.rms_eps
        norms, first = (part.embed_norm, part.hidden_norm), self.head.hidden_first
        if self._embed_scale == 1.0 and plan.norm != "layer":
            eh = self.ops.joined_norms(self.weights.embed, rows.ids, g, norms, eps, x_first=first)
        else:
            e = self.ops.embed(self.weights.embed, rows.ids) * self._embed_scale
            parts = self._norm(plan, e, norms[0]), self._norm(plan, g.contiguous(), norms[1])
            eh = torch.cat(parts[::-1] if first else parts, dim=-1)
        return self.ops.linear(eh, part.fc, None, rows.tiling)

    @override
    def _following(self, index: int) -> LayerWeights | None:
        return None  # the input of the next layer is not the residual stream of this one

    @override
    def _norm_of(self, index: int) -> tuple[Tensor, float] | None:
        return None

    def _tail(self, index: int, attended: Tensor, x: Tensor, tiling: Tiling) -> Tensor:
        """Completes an MTP layer after its attention: output projection, MLP and final norm. Returns [B, Q, hidden].

        With `MtpSpec.own_heads` the final norm is left out.

        Args:
            index: index of the MTP layer.
            attended: result of the layer's attention.
            x: residual stream before the layer.
            tiling: tile sizes of the products.
        """
        x, _ = self._after_attention(index, attended, x, tiling)
        return x if self.head.own_heads else self._norm(self.spec.plans[index], x, self._parts[index].norm)

    def _raw_logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """Returns the logits of hidden states. Leaves out the final norm if `drafted` has already applied it."""
        return super()._raw_logits(hidden, tiling) if self.head.own_heads else self.head_logits(hidden, tiling)

    def _raw_argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor, ids: Tensor | None) -> None:
        """Writes the argmax of the logits to `out`. Leaves out the final norm if `drafted` has already applied it."""
        if self.head.own_heads:
            super()._raw_argmax(hidden, limit, tiling, out, ids)
        else:
            self.head_argmax(hidden, limit, tiling, out, work=self._work, ids=ids)


def _mtp_part(weights: HeadWeights, index: int) -> MtpPart:
    """Returns the weights of MTP layer `index` outside of its decoder layer. `norm` of layer 0 is `decoder.norm`."""
    fc, *norms = (f"{part_name(name, index)}.weight" for name in (FC, EMBED_NORM, HIDDEN_NORM, NORM))
    found = [weights.vector(name) for name in norms[:2]]
    last = weights.vector(norms[2]) if index else weights.decoder.norm
    head = weights.matrix(f"{part_name(OUTPUT, index)}.weight")
    return MtpPart(_there(weights.matrix(fc)), _there(found[0]), _there(found[1]), _there(last), head)


MASK_TENSOR: Final = "mask_embedding"

_T = TypeVar("_T")


class DFlash(HeadDecoder):
    """DFlash head (arXiv 2602.06036): its weights, KV cache and forward passes. `DFlashSpec` has the settings.

        c = norm([f_1 .. f_n] Wfc)                        f: the target's hidden states at one position
        context: k, v of every layer = c Wk, c Wv         at the positions of accepted tokens, stored in the cache
        block:   x = embeddings of [last token, mask ..]  at the positions after them
                 x = x + attention(norm(x)), over the keys of the context and of the block;  x = x + mlp(norm(x))
        logits = norm(x) Whead

    All tokens of a block attend to each other, but `Ops.attend` only reads keys at or before a query's position. So
    the keys of the block are stored first, in the pages after the context. Queries and keys are rotated by their own
    positions. Then attention runs as if all queries were at the block's last position. Only this pass uses the keys of
    the block. A later pass overwrites them, either with its own block or by `store_context`.

    Args:
        spec: sizes and arithmetic of the head.
        weights: the head's own weights, and those that it shares with the target.
        cache: KV pages of the head's layers. The target's page table is used.
        ops: implementations of all operations of a pass.
        max_positions: largest number of positions of a row, including its last block.
        batch: largest number of rows of a pass.
        max_queries: largest number of tokens of each row in a step.
        mask: [hidden], the embedding of the mask token. None: row `mask_id` of the embedding matrix is used.
    """

    def __init__(
        self,
        spec: DFlashSpec,
        weights: HeadWeights,
        cache: PagedKVCache,
        ops: Ops,
        *,
        max_positions: int,
        batch: int,
        max_queries: int,
        mask: Tensor | None = None,
    ) -> None:
        # the argmax has one row for every draft of a pass
        sizes = {"max_positions": max_positions, "batch": batch * max_queries, "max_queries": 1}
        super().__init__(spec.decoder, weights.decoder, cache, ops, **sizes)
        self.head: DFlashSpec = spec
        self._mask, self._own = mask, weights
        self._fc, self._context = _there(weights.matrix("fc.weight")), _there(weights.matrix("context.weight"))
        self._hidden_norm = _there(weights.vector("hidden_norm.weight"))
        self._context_bias, self._sinks = weights.vector("context.bias"), weights.vector("sinks")

    def store_context(self, features: Tensor, rows: ForwardBatch) -> None:
        """Writes K and V of accepted tokens to the KV cache of all layers. They are computed from `features`.

        One product computes K and V of all layers.

        Args:
            features: [B, Q, n, target's hidden], hidden states of n layers of the target at these tokens.
            rows: positions and write mask of the tokens. Ids are not read.
        """
        context = self.ops.linear(features.flatten(2), self._fc, None, rows.tiling)
        norm = (self._hidden_norm, self.spec.rms_eps)
        made = self.ops.linear(context, self._context, self._context_bias, rows.tiling, norm=norm)
        for index, kv in enumerate(made.unflatten(-1, (self.spec.num_layers, -1)).movedim(2, 0).contiguous()):
            self._store(index, kv, rows, num_heads=0)

    def block(self, rows: ForwardBatch) -> Tensor:
        """Runs all layers for a block, which is a row's last token and mask tokens after it. Returns [B, Q, hidden].

        The result is the residual stream after the last layer. The block's keys stay in the cache until the next pass,
        at the positions after the context.
        """
        x, whole = self._embedded(rows), self._at_last(rows)
        qkv: Tensor | None = self._qkv(0, x, rows.tiling)
        for index in range(self.spec.num_layers):
            assert qkv is not None, "only the last layer leaves none"
            attended = self._attended(index, qkv, rows, whole)
            x, qkv = self._after_attention(index, attended, x, rows.tiling)
        return x

    def _attended(self, index: int, qkv: Tensor, rows: ForwardBatch, whole: ForwardBatch) -> Tensor:
        """Computes a layer's attention for the tokens of a block, before the output projection: [B, Q, H * D].

        Args:
            index: index of the layer.
            qkv: [B, Q, (H + 2 Hkv) * D], the layer's q, k and v.
            rows: positions of the tokens.
            whole: the same tokens, all at the block's last position, from `_at_last`.
        """
        if self.head.causal[index]:
            rule, sinks = self.spec.plans[index].rule, self._sinks_of(index)
            attended = self._attend_rows(index, qkv, rows, self._tables[0], self._norms(index), rule, sinks)
        else:
            attended = self._attend_all(index, qkv, rows, whole)
        # applied to the sum of values, which is the same as on each value
        return attended if self.head.value_scale == 1.0 else attended * self.head.value_scale

    def _at_last(self, rows: ForwardBatch) -> ForwardBatch:
        """Returns a block's tokens, all with the position of the last one, and with a write mask of False."""
        last = rows.positions[:, -1:].expand_as(rows.positions).contiguous()
        return replace(rows, positions=last, write_mask=torch.zeros_like(rows.write_mask))

    def _embedded(self, rows: ForwardBatch) -> Tensor:
        x = self.ops.embed(self.weights.embed, rows.ids)
        if self._mask is not None:
            x = torch.where((rows.ids == self.head.mask_id)[..., None], self._mask, x)
        return x if self.head.embed_scale == 1.0 else x * self.head.embed_scale

    def _attend_all(self, index: int, qkv: Tensor, rows: ForwardBatch, whole: ForwardBatch) -> Tensor:
        """Computes attention of a block's tokens to the context and to all tokens of the block: [B, Q, H * D].

        Args:
            index, qkv, rows, whole: see `_attended`.
        """
        num_heads, rule = self.spec.num_heads, self.spec.plans[index].rule
        query = self._store(index, qkv, rows, num_heads=num_heads)
        # keys and values of these rows are passed again, but not written: the kernel that copies them starts after the
        # keys are stored, and attention, which reads keys before its wait, starts after that kernel
        qkv = torch.cat([query.flatten(2), qkv[..., num_heads * self.spec.head_dim :]], dim=-1)
        if rule.window is not None:  # the window of the first row, for all rows
            rule = rule._replace(window=rule.window + rows.positions.shape[1] - 1)
        return self._attend_rows(index, qkv, whole, None, None, rule, self._sinks_of(index))

    def _sinks_of(self, index: int) -> Tensor | None:
        return None if self._sinks is None else self._sinks.view(-1, self.spec.num_heads)[index]


class DSpark(DFlash):
    """DSpark head: its weights, KV cache and forward passes. `DSparkSpec` has the formulas.

    Args:
        spec: sizes and arithmetic of the head.
        weights, cache, ops, sizes: see `DFlash`.
    """

    def __init__(self, spec: DSparkSpec, weights: HeadWeights, cache: PagedKVCache, ops: Ops, **sizes: Any) -> None:
        super().__init__(spec, weights, cache, ops, **sizes)
        self._before = _there(weights.matrix(dspark_spec.BEFORE))
        self._after = _there(weights.matrix(dspark_spec.AFTER))

    def after(self, ids: Tensor, tiling: Tiling) -> Tensor:
        """Returns the term of a draft token's logits that depends on the token before it.

        Args:
            ids: int64 [B, 1], the token before the draft token.
            tiling: tile sizes of the product.

        Returns:
            fp32 [B, 1, vocab_size].
        """
        rows = self.ops.embed(self._before, ids.contiguous())
        added = self.ops.linear(rows, self._after, None, tiling, out_dtype=torch.float32)
        scale = self.spec.scales.logits
        return added if scale == 1.0 else added * scale


class DFlash2(DFlash):
    """DFlash2 head: its weights, KV cache and forward passes. `DFlash2Spec` has the formulas.

    Args:
        spec: sizes and arithmetic of the head.
        weights, cache, ops, sizes: see `DFlash`.
    """

    def __init__(self, spec: DFlash2Spec, weights: HeadWeights, cache: PagedKVCache, ops: Ops, **sizes: Any) -> None:
        super().__init__(spec, weights, cache, ops, **sizes)
        self._sizes = spec
        self._before = _there(weights.matrix(dflash2_spec.BEFORE))
        self._after = _there(weights.matrix(dflash2_spec.AFTER))
        self._projection = _there(weights.matrix(dflash2_spec.PROJECTION))

    @property
    def candidates(self) -> int:
        """Number of the most probable ids of each draft token that the selector scores again."""
        return self._sizes.candidates

    @override
    def block(self, rows: ForwardBatch) -> Tensor:
        x, whole, tiling = self._embedded(rows), self._at_last(rows), rows.tiling
        for index, layer in enumerate(self.weights.layers):
            plan = self.spec.plans[index]
            assert layer.input_norm is not None, "every layer has both norms"
            assert layer.post_norm is not None, "every layer has both norms"
            h, kernel = self._convolved(index, "attention_conv", self._norm(plan, x, layer.input_norm), tiling)
            qkv = self.ops.linear(h, layer.mixer[0], layer.qkv_bias, tiling)
            h = self.ops.linear(self._attended(index, qkv, rows, whole), layer.mixer[1], layer.o_bias, tiling)
            x = x + self._convolution(index, "attention_conv", 1, h, kernel)
            h, kernel = self._convolved(index, "mlp_conv", self._norm(plan, x, layer.post_norm), tiling)
            inner = self._mlp_inner(plan, h, None, None, layer, tiling)
            h = self.ops.linear(inner, layer.mlp[1], layer.down_bias, tiling)
            x = x + self._convolution(index, "mlp_conv", 1, h, kernel)
        return x

    def projected(self, x: Tensor, tiling: Tiling) -> Tensor:
        """Projects x [B, k, hidden], the result of `block`, to the selector's input [B, k, rank]."""
        return self.ops.linear(self.ops.norm(x, self.weights.norm, self.spec.rms_eps), self._projection, None, tiling)

    def scored(self, projected: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """Returns the selector's scores of candidate ids, which are added to their logits: fp32 [B, 1, n].

        Args:
            projected: [B, 1, rank], the part for one draft token of the result of the method `projected`.
            before: int64 [B, 1], the token before the draft token.
            candidates: int64 [B, n], the candidate ids, which are ids of the target.
        """
        context = self.ops.embed(self._before, before.contiguous()) * projected
        found = self.ops.embed(self._after, candidates.contiguous())
        return (context.float() * found.float()).sum(-1)[:, None]

    @override
    def _fuses(self, plan: LayerPlan) -> bool:
        return False  # there are convolutions between the matrix products

    def _convolved(self, index: int, which: str, h: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Computes the convolution kernel of attention or MLP from its input h, and convolves h with the kernel.

        Args:
            index: index of the layer.
            which: name of the convolution: "attention_conv" or "mlp_conv".
            h: [B, Q, hidden], input of attention or MLP, normed.
            tiling: tile sizes of the product.

        Returns:
            (convolved h [B, Q, hidden], kernel [B, Q, 2, taps, groups]).
        """
        weight = _there(self._own.matrix(f"layers.{index}.{which}.kernel_projection.weight"))
        groups = self.spec.hidden_size // self._sizes.group
        kernel = self.ops.linear(h, weight, None, tiling).unflatten(-1, (2, self._sizes.taps, groups))
        return self._convolution(index, which, 0, h, kernel), kernel

    def _convolution(self, index: int, which: str, side: int, h: Tensor, kernel: Tensor) -> Tensor:
        """Convolves h over the Q tokens of a block, in fp32. Returns [B, Q, hidden] in the dtype of h.

        Args:
            index, which: see `_convolved`.
            side: 0: the convolution before attention or MLP, 1: the one after it.
            h: [B, Q, hidden].
            kernel: [B, Q, 2, taps, groups], from `_convolved`.
        """
        base = _there(self._own.vector(f"layers.{index}.{which}.base_kernel"))[side].float()
        factors = base.unflatten(-1, (-1, self._sizes.group)) + kernel[:, :, side, :, :, None]
        padded = torch.nn.functional.pad(h, (0, 0, self._sizes.taps - 1, 0))
        windows = padded.unfold(1, self._sizes.taps, 1).flip(-1).movedim(-1, 2)  # tap t is the token t places before
        found: Tensor = (factors * windows.unflatten(-1, (-1, self._sizes.group))).sum(2)
        return found.flatten(2).to(h.dtype)


def _there(found: _T | None) -> _T:
    assert found is not None, "checked before anything was allocated"
    return found


def mask_embedding(file: Path, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Reads the embedding of the mask token, [hidden], from a safetensors file with the tensor `mask_embedding`.

    Args:
        file: path of the file.
        hidden: number of elements that the head needs.
        dtype, device: dtype and device of the result.

    Raises:
        CheckpointError: the file is damaged, lacks the tensor, or the tensor has another size.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            found: Tensor = opened.get_tensor(MASK_TENSOR).reshape(-1)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot read {MASK_TENSOR}: {error}; convert or download it again") from error
    if found.numel() != hidden:
        raise CheckpointError(f"{file}: {MASK_TENSOR} has {found.numel()} elements, and the head is {hidden} wide")
    return found.to(device=device, dtype=dtype)
