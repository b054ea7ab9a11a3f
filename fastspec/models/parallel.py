"""Decoder that is split over tensor-parallel ranks.

Each rank has some attention heads, some columns of the MLP, and some rows of the LM head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.distributed.exchange import Exchange, RankSums, tree_sum
from fastspec.distributed.slices import Cut, RankShare
from fastspec.kernels import reference
from fastspec.kernels.common.experts import ExpertWeights
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.linear import PartKeys
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.checkpoints.checkpoint import Sliced
from fastspec.models.config import ModelSpec
from fastspec.models.decoder import Decoder
from fastspec.models.families.plan import LayerPlan
from fastspec.models.layer_table import DecoderWeights, LayerWeights, axes_of, pieces_of, rows_of
from fastspec.shapes import Tiling


class Pieces(NamedTuple):
    """Pieces into which a rank's weight is split by rows or by columns. Each piece is multiplied separately.

    Attributes:
        rows: pieces of a weight that is split by rows, or the whole weight. Empty for o and down projections.
        columns: pairs (range of K, piece) of an o or down projection. Empty for other weights.
    """

    rows: tuple[Weight, ...]
    columns: tuple[tuple[Cut, Weight], ...]


class ParallelDecoder(Decoder):
    """One rank's part of a decoder. All ranks make the same calls, and get the same bits.

    K of the o and down projections is split into `RankShare.parts` parts. Partial sums of the parts are added as one
    binary tree, of which this rank computes a subtree. With `RankShare.one_tree` the rows of other weights are also
    split into pieces. Then every product has the same shape on any number of ranks, so results have the same bits.

    Args:
        spec: spec of this rank's part.
        weights, cache, ops, **sizes: see `Decoder`.
        sliced: share of this rank, and spec of the whole model.
        exchange: all-reduce and all-gather between the ranks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        cache: PagedKVCache,
        ops: Ops,
        *,
        sliced: Sliced,
        exchange: Exchange,
        **sizes: int,
    ) -> None:
        super().__init__(spec, weights, cache, ops, **sizes)
        self._share, self.exchange = sliced.share, exchange
        self._reduce = RankSums(exchange)
        # a tied embedding of quantised codes is not split; every rank then computes all logits
        shared_codes = weights.head is weights.embed and weights.head.codes is not None
        self._splits_vocab = sliced.share.splits_vocab(spec.vocab_size) and not shared_codes
        self._head = _head(weights, spec, sliced.share) if self._splits_vocab else weights.head
        self._pieces: dict[int, Pieces] = {}
        self._experts: dict[int, list[ExpertWeights]] = {}  # id of a layer -> experts for each of this rank's parts
        for plan, whole, layer in zip(spec.plans, sliced.spec.plans, weights.layers, strict=True):
            self._split_layer(plan, whole, layer, sliced.spec)
        rows = spec.vocab_size if self._splits_vocab else self._head.shape[0] * sliced.share.parts
        self._pieces[id(self._head)] = self._rows_of(self._head, rows // sliced.share.parts)

    def _split_layer(self, plan: LayerPlan, whole: LayerPlan, layer: LayerWeights, spec: ModelSpec) -> None:
        """Splits the matrices of a layer into `Pieces`.

        Args:
            plan, layer: plan and weights of this rank's part of the layer.
            whole: plan of the whole layer.
            spec: spec of the whole model.
        """
        own, share = axes_of(self.spec, plan), self._share
        for row in rows_of(self.spec, plan):
            weight, gates, cut = layer.matrix(row.place), layer.matrix(row.apart), row.cut(own)
            if weight is None or cut is None:
                continue
            if cut == "columns":
                self._pieces[id(weight)] = self._columns_of(weight)
                continue
            sizes = pieces_of(row, spec, whole, own, share.parts)
            if gates is not None:  # a separate weight has the last pieces
                last = next(at for at in range(len(sizes)) if sum(sizes[at:]) == gates.shape[0])
                self._pieces[id(gates)] = self._rows_of(gates, sizes[last:])
                sizes = sizes[:last]
            self._pieces[id(weight)] = self._rows_of(weight, sizes)
        if plan.experts is not None and layer.experts is not None:
            self._experts[id(layer)] = self._experts_of(layer.experts, plan.experts.width)

    def _experts_of(self, weights: ExpertWeights, width: int) -> list[ExpertWeights]:
        """Splits this rank's experts along their intermediate size, and returns one `ExpertWeights` for each part.

        `width` is the intermediate size on this rank. Outputs of all parts are added, so only the first part of rank 0
        has the bias of the down projection.
        """
        if self._share.own_parts == 1:
            parts = [weights]
        else:
            parts = [weights.columns(slice(*cut)) for cut in self._parts_of(width)]
        first = 1 if self._share.rank == 0 else 0
        return parts[:first] + [replace(part, down_bias=None) for part in parts[first:]]

    def _rows_of(self, weight: Weight, rows: int | list[int]) -> Pieces:
        """Splits a weight by rows. Without `RankShare.one_tree` it stays one piece.

        `rows` is the number of rows of every piece, or a list with the number of rows of each piece.
        """
        if not self._share.one_tree:
            return Pieces((weight,), ())
        return Pieces(tuple(Weight(piece) for piece in weight.data.split(rows)), ())

    def _columns_of(self, weight: Weight) -> Pieces:
        """Splits a weight by columns, so that each piece has one of this rank's parts of K."""
        k = weight.shape[1]
        if self._share.own_parts == 1:
            return Pieces((), ((Cut(0, k), weight),))
        return Pieces((), tuple((cut, Weight(weight.data[:, slice(*cut)])) for cut in self._parts_of(k)))

    def _parts_of(self, k: int) -> list[Cut]:
        """Returns the column range of each of this rank's parts. `k` is the number of columns that this rank has."""
        own = self._share.own_parts
        return [Cut(part * k // own, (part + 1) * k // own) for part in range(own)]

    def _fuses(self, plan: LayerPlan) -> bool:
        return super()._fuses(plan) and not self._share.one_tree  # with one_tree, weights are multiplied in pieces

    def _product(self, x: Tensor, weight: Weight, bias: Tensor | None, tiling: Tiling, **options: Any) -> Tensor:
        pieces = self._pieces[id(weight)].rows if id(weight) in self._pieces else ()
        if len(pieces) < 2:
            return self.ops.linear(x, weight, bias, tiling, **options)
        return torch.cat(self._products(x, weight, bias, tiling, **options), dim=-1)

    def _products(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        tiling: Tiling,
        norm: tuple[Tensor, float] | None = None,
        **options: Any,
    ) -> list[Tensor]:
        """Returns the product of x with each piece of a weight that is split by rows.

        `norm` is (weight, epsilon) of an RMSNorm that is applied to x first. None: no norm. `options` are those of
        `Ops.linear`.
        """
        pieces = self._pieces[id(weight)].rows
        if norm is not None:
            x = reference.rms_norm(x, *norm)
        biases = [None] * len(pieces) if bias is None else bias.split([piece.shape[0] for piece in pieces])
        return [self.ops.linear(x, piece, part, tiling, **options) for piece, part in zip(pieces, biases, strict=True)]

    def _mlp_inner(
        self,
        plan: LayerPlan,
        x: Tensor,
        norm: Tensor | None,
        bias: Tensor | None,
        layer: LayerWeights,
        tiling: Tiling,
    ) -> Tensor:
        if not self._share.one_tree:
            return super()._mlp_inner(plan, x, norm, bias, layer, tiling)
        # the activation is also computed by parts, because a CPU may round the last elements of a tensor differently
        x, options = self._normed(plan, x, norm, bias)
        products = self._products(x, layer.mlp[0], layer.gate_up_bias, tiling, **options)
        own = self._share.own_parts
        parts = [torch.cat(products[part::own], dim=-1) for part in range(own)]  # gate and up of each part
        return torch.cat([self._activated(plan, part) for part in parts], dim=-1)

    def _add_residual(
        self,
        plan: LayerPlan,
        given: Tensor,
        weight: Weight,
        bias: Tensor | None,
        x: Tensor,
        norm: Tensor | None,
        scale: float,
        tiling: Tiling,
    ) -> Tensor:
        partial = tree_sum(self._partials(given, weight, tiling))
        if norm is None and scale == 1.0:
            return self.exchange.added(partial, bias, x)
        total = self.exchange.sum(partial)
        added = (total if bias is None else total + bias.float()).to(x.dtype)
        return x + self._residual_branch(plan, added, norm, scale)

    def _partials(self, given: Tensor, weight: Weight, tiling: Tiling) -> list[Tensor]:
        """Returns the product `given` weight^T for each of this rank's parts of K, in fp32. Their sum is not computed.

        K is the last axis of `given`, and the columns of `weight`.
        """
        own, made = given.shape[-1], []
        for cut, piece in self._pieces[id(weight)].columns:
            columns = given if cut == (0, own) else given[..., slice(*cut)].contiguous()
            made.append(self.ops.linear(columns, piece, None, tiling, out_dtype=torch.float32))
        return made

    def _experts_tail(
        self, index: int, attended: Tensor | None, x: Tensor, tiling: Tiling
    ) -> tuple[Tensor, Tensor | None]:
        """Implements `Decoder._experts_tail`. Every rank has the whole router, and some columns of each expert.

        For each part of the columns, the outputs of a token's experts are added in fp32. Then the sums of all parts are
        added as a tree.
        """
        plan, layer, size = self.spec.plans[index], self.weights.layers[index], self._share
        experts, weights = plan.experts, layer.experts
        assert experts is not None
        assert weights is not None
        assert attended is not None, "models whose layers have only an MLP are not split over ranks"
        x = self._add_residual(plan, attended, layer.mixer[1], layer.o_bias, x, None, plan.residual_scale, tiling)
        ids, factors, h = self._routed(plan, x, layer, tiling)
        logits = None
        if weights.shared_gate is not None:
            logits = self.ops.linear(h, weights.shared_gate, None, tiling, out_dtype=torch.float32)
        shared: list[Tensor | None] = [None] * size.own_parts
        if experts.shared:
            shared[:] = self._partials(self._mlp_inner(plan, h, None, None, layer, tiling), layer.mlp[1], tiling)
        partial = []
        for mine, of_all in zip(self._experts[id(layer)], shared, strict=True):
            more: dict[str, Any] = {}
            if of_all is not None:
                more = {"shared": of_all} if logits is None else {"shared": of_all, "shared_logits": logits}
            partial.append(self.ops.experts(h, ids, factors, mine, experts.activation, residual=None, **more))
        if plan.residual_scale != 1.0:
            total = self.exchange.sum(tree_sum(partial)).to(x.dtype)
            return x + total * plan.residual_scale, None
        return self.exchange.added(tree_sum(partial), None, x), None  # the next norm needs the sum over all ranks

    def _normed_heads(self, plan: LayerPlan, layer: LayerWeights, qkv: Tensor, positions: Tensor) -> Tensor:
        """Implements `Decoder._normed_heads`. For a norm over all heads, ranks first gather q and k of all heads."""
        if plan.qk_norm != "projection" or self._share.size == 1:
            return super()._normed_heads(plan, layer, qkv, positions)
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        size, rank, dim = self._share.size, self._share.rank, self.spec.head_dim
        sizes = [self.spec.num_heads * dim, self.spec.num_kv_heads * dim]
        both, value = qkv.split([sum(sizes), sizes[1]], dim=-1)
        of_all = self.exchange.gather(both.float().contiguous()).to(qkv.dtype).unflatten(-1, (size, -1))
        same = size * self.spec.num_kv_heads * dim // layer.k_norm.shape[0]  # number of ranks with the same KV heads
        normed = []
        for x, weight, every in zip(of_all.split(sizes, dim=-1), (layer.q_norm, layer.k_norm), (1, same), strict=True):
            whole = self._norm(plan, x[..., ::every, :].flatten(-2).contiguous(), weight)
            normed.append(whole.unflatten(-1, (size // every, -1))[..., rank // every, :])
        return torch.cat([*normed, value], dim=-1)

    @override
    def head_logits(self, x: Tensor, tiling: Tiling, **options: Any) -> Tensor:
        logits = self._own_logits(x, tiling, **options)
        return self.exchange.gather(logits) if self._splits_vocab else logits

    def _own_logits(self, x: Tensor, tiling: Tiling, **options: Any) -> Tensor:
        """Returns fp32 logits of the token ids in this rank's part of the vocabulary."""
        return self._product(x, self._head, None, tiling, out_dtype=torch.float32, **options)

    def best_keys(self, hidden: Tensor, tiling: Tiling) -> PartKeys | None:
        """Returns the largest logit in each rank's part of the vocabulary, for hidden states [B, Q, hidden].

        Ranks exchange 8 bytes per position instead of logits.

        Returns None if a decode step must compute all logits. This is so if logits are scaled, if each rank has all
        logits, or if the LM head on a GPU is not packed.
        """
        scales, packed = self.spec.scales, self._head.format != "rows" or not hidden.is_cuda
        if scales.logits != 1.0 or scales.softcap is not None or not self._splits_vocab or not packed:
            return None
        x, options = self._normed(self.spec.plans[-1], hidden.flatten(0, 1), self.weights.norm, self.weights.norm_bias)
        keys = self._own_keys(x, self._head.shape[0], tiling, work=self._work, **options)
        of_all = self.exchange.gather(keys.view(torch.float32).unflatten(0, (-1, 2)))
        return PartKeys(of_all.view(torch.int64).unflatten(0, hidden.shape[:2]), self._head.shape[0])

    def _own_keys(
        self, x: Tensor, limit: int, tiling: Tiling, work: Any, ids: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Finds the largest of this rank's logits with an id below `limit`, for each row of x [R, hidden].

        Returns uint64 keys [R], which contain the logit and its id; see `reference.keys_of`. `ids` and `options` are
        those of `Ops.argmax`, such as the final norm.
        """
        keys = torch.empty(len(x), dtype=torch.uint64, device=x.device)
        if len(self._pieces[id(self._head)].rows) == 1:
            self.ops.argmax(x, self._head, limit, tiling, work=work, out=keys, ids=ids, **options)
        else:
            keys.view(torch.int64).copy_(reference.keys_of(self._own_logits(x, tiling, **options), limit, ids))
        return keys

    @override
    def head_argmax(
        self,
        x: Tensor,
        limit: int,
        tiling: Tiling,
        out: Tensor,
        work: Any = None,
        ids: Tensor | None = None,
        **options: Any,
    ) -> None:
        if not self._splits_vocab:
            reference.pick(self._own_logits(x, tiling, **options), limit, out, ids)
            return
        width = self._head.shape[0]
        first = self._share.rank * width
        if ids is None:
            keys = self._own_keys(x, min(max(limit - first, 0), width), tiling, work, **options)
        else:
            keys = self._own_keys(x, limit, tiling, work, ids[first : first + width], **options)
        self.exchange.largest(keys, width if ids is None else 0, out)


def _head(weights: DecoderWeights, spec: ModelSpec, share: RankShare) -> Weight:
    """Returns this rank's rows of the LM head. They are a view of the embedding if the head is tied."""
    if weights.head is not weights.embed:
        return weights.head
    if share.size == 1:
        return Weight(weights.head.data, weights.head.format)
    cut = share.vocab_cut(spec.vocab_size)
    each = 16 if weights.head.format == "packed" else 1
    part = weights.head.data[cut.start // each : cut.stop // each]
    return Weight(part, weights.head.format, whole=weights.head.shape)
