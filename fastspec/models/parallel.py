"""A decoder of which each rank has a part: heads, columns of the MLP, and rows of the head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import Ops
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.config import ModelSpec
from fastspec.models.decoder import Decoder
from fastspec.models.families.plan import LayerPlan
from fastspec.models.weights.load import DecoderWeights, LayerWeights
from fastspec.models.weights.sliced import Sliced
from fastspec.parallel.exchange import Exchange, tree_sum
from fastspec.parallel.slices import Cut, Share
from fastspec.shapes import Tiling


class Pieces(NamedTuple):
    """Products of one weight, each of a shape that does not depend on how many ranks there are.

    Attributes:
        rows: the weight's rows by pieces; one where it is multiplied at once.
        columns: likewise, by ranges of K.
    """

    rows: tuple[Weight, ...]
    columns: tuple[tuple[Cut, Weight], ...]


class ParallelDecoder(Decoder):
    """One rank's part of a decoder. All ranks call it alike, and all get the same bits.

    K of o and down is cut into `Share.parts`; the sums of parts are one binary tree, of which this rank holds a
    subtree. Where the number of ranks is to change no bit, rows are multiplied in pieces as well, so that every product
    has the same shape on any number of them.

    Args:
        spec: of this rank's part. weights, cache, ops, **sizes: as for Decoder.
        sliced: which part that is.
        exchange: between the ranks.
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
        self._reduce = exchange.added
        shared_codes = weights.head is weights.embed and weights.head.codes is not None  # which are not taken apart
        self._splits_vocab = sliced.share.splits_vocab(spec.vocab_size) and not shared_codes
        self._head = _head(weights, spec, sliced.share) if self._splits_vocab else weights.head
        self._pieces: dict[int, Pieces] = {}
        for layer in weights.layers:
            self._pieces[id(layer.qkv)] = self._rows_of(layer.qkv, _rows_of_qkv(sliced))
            self._pieces[id(layer.mlp[0])] = self._rows_of(layer.mlp[0], sliced.spec.intermediate_size)
            self._pieces[id(layer.o)] = self._columns_of(layer.o)
            self._pieces[id(layer.mlp[1])] = self._columns_of(layer.mlp[1])
        rows = spec.vocab_size if self._splits_vocab else self._head.shape[0] * sliced.share.parts
        self._pieces[id(self._head)] = self._rows_of(self._head, rows)

    def _rows_of(self, weight: Weight, total: int) -> Pieces:
        """A weight in pieces of total / parts rows; in one where nothing depends on that."""
        if not self._share.one_tree:
            return Pieces((weight,), ())
        each = total // self._share.parts
        return Pieces(tuple(Weight(rows) for rows in weight.data.split(each)), ())

    def _columns_of(self, weight: Weight) -> Pieces:
        """A weight by the parts of K that are this rank's."""
        own, (_, k) = self._share.own_parts, weight.shape
        if own == 1:
            return Pieces((), ((Cut(0, k), weight),))
        cuts = [Cut(part * k // own, (part + 1) * k // own) for part in range(own)]
        return Pieces((), tuple((cut, Weight(weight.data[:, slice(*cut)])) for cut in cuts))

    def _fuses(self, plan: LayerPlan) -> bool:
        return plan.fused_tail and not self._share.one_tree  # which is made of products in pieces

    def _product(self, x: Tensor, weight: Weight, bias: Tensor | None, tiling: Tiling, **options: Any) -> Tensor:
        pieces = self._pieces[id(weight)].rows
        if len(pieces) == 1:
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
        """A product by the pieces of its weight's rows."""
        pieces = self._pieces[id(weight)].rows
        if norm is not None:
            x = reference.rms_norm(x, *norm)
        biases = [None] * len(pieces) if bias is None else bias.split([piece.shape[0] for piece in pieces])
        return [self.ops.linear(x, piece, part, tiling, **options) for piece, part in zip(pieces, biases, strict=True)]

    def _inner(
        self,
        plan: LayerPlan,
        x: Tensor,
        norm: Tensor | None,
        bias: Tensor | None,
        layer: LayerWeights,
        tiling: Tiling,
    ) -> Tensor:
        if not self._share.one_tree:
            return super()._inner(plan, x, norm, bias, layer, tiling)
        # activations by parts as well: a CPU may round an element at the end of a tensor otherwise than before
        x, options = self._normed(plan, x, norm, bias)
        products = self._products(x, layer.mlp[0], layer.gate_up_bias, tiling, **options)
        own = self._share.own_parts
        parts = [torch.cat(products[part::own], dim=-1) for part in range(own)]  # its gate, then its up
        return torch.cat([self._activated(plan, part) for part in parts], dim=-1)

    def _joined(
        self,
        plan: LayerPlan,
        given: Tensor,
        weight: Weight,
        bias: Tensor | None,
        x: Tensor,
        norm: Tensor | None,
        tiling: Tiling,
    ) -> Tensor:
        pieces = self._pieces[id(weight)].columns
        own = given.shape[-1]
        partial = tree_sum(
            [
                self.ops.linear(
                    given if cut == (0, own) else given[..., slice(*cut)].contiguous(),
                    piece,
                    None,
                    tiling,
                    out_dtype=torch.float32,
                )
                for cut, piece in pieces
            ]
        )
        if norm is None and plan.residual_scale == 1.0:
            return self.exchange.added(partial, bias, x)
        total = self.exchange.sum(partial)
        added = (total if bias is None else total + bias.float()).to(x.dtype)
        return x + self._to_add(plan, added, norm)

    def _raw_logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        logits = self._own_logits(hidden, tiling)
        return self.exchange.gather(logits) if self._splits_vocab else logits

    def _own_logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """fp32 logits of this rank's ids."""
        x, options = self._normed(self.spec.plans[-1], hidden, self.weights.norm, self.weights.norm_bias)
        return self._product(x, self._head, None, tiling, out_dtype=torch.float32, **options)

    def _raw_argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor) -> None:
        if not self._splits_vocab:
            out.copy_(self._own_logits(hidden, tiling)[..., :limit].argmax(dim=-1))
            return
        width, keys = self._head.shape[0], torch.empty(len(hidden), dtype=torch.uint64, device=hidden.device)
        limit = min(max(limit - self._share.rank * width, 0), width)
        if len(self._pieces[id(self._head)].rows) == 1:
            x, options = self._normed(self.spec.plans[-1], hidden, self.weights.norm, self.weights.norm_bias)
            self.ops.argmax(x, self._head, limit, tiling, work=self._work, out=keys, **options)
        else:
            keys.view(torch.int64).copy_(reference.keys_of(self._own_logits(hidden, tiling), limit))
        self.exchange.largest(keys, width, out)


def _head(weights: DecoderWeights, spec: ModelSpec, share: Share) -> Weight:
    """This rank's rows of the head, which are views where it is tied to the embedding."""
    if weights.head is not weights.embed:
        return weights.head
    if share.size == 1:
        return Weight(weights.head.data, weights.head.format)
    cut = share.vocab_cut(spec.vocab_size)
    each = 16 if weights.head.format == "packed" else 1
    part = weights.head.data[cut.start // each : cut.stop // each]
    return Weight(part, weights.head.format, whole=weights.head.shape)


def _rows_of_qkv(sliced: Sliced) -> int:
    """Rows of q, k and v of all ranks, of which each part of the finest cut has whole heads: `parts` times one head."""
    return sliced.share.parts * sliced.spec.head_dim
