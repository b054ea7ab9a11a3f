"""Forward pass of Gemma 4's assistant: a draft decoder that attends to the keys and values of its target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.errors import CheckpointError, UnsupportedOption
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.attention import AttendCall, HeadsCall
from fastspec.models.decoder import Decoder
from fastspec.models.heads import assistant_spec
from fastspec.models.heads.assistant_spec import AssistantSpec
from fastspec.models.heads.checkpoint import HeadTensors
from fastspec.models.heads.weights import HeadWeights
from fastspec.models.parallel import ParallelDecoder
from fastspec.shapes import ForwardBatch, Tiling


class Places(NamedTuple):
    """Inputs of the draft passes of one decode step. All passes of the step share them. No draft pass writes K/V.

    Attributes:
        turned: batch with the position of each row's last token. Rope rotates queries by this position.
        seen: batch with the position before the last token, the newest one with keys in the target's cache. Queries
            attend to keys up to this position.
    """

    turned: ForwardBatch
    seen: ForwardBatch


class Assistant(Decoder):
    """Gemma 4's assistant: its weights and its draft pass. `AssistantSpec` has the formulas.

    Args:
        spec: sizes and arithmetic of the assistant.
        weights: weights of the assistant.
        target: the target, whose keys, values and embedding the assistant reads.
        ops, max_positions, batch, max_queries: see `Decoder`.
        order: int64 [vocabulary], token ids in the order of their groups, see `order_of`. None: the assistant has no
            groups of token ids.

    Raises:
        UnsupportedOption: several ranks share the target, so that each rank has only some of the keys.
    """

    def __init__(
        self,
        spec: AssistantSpec,
        weights: HeadWeights,
        target: Decoder,
        ops: Ops,
        *,
        order: Tensor | None,
        max_positions: int,
        batch: int,
        max_queries: int,
    ) -> None:
        if isinstance(target, ParallelDecoder):
            raise UnsupportedOption(
                "tensor_parallel does not go with an assistant, which reads all keys of its target; use one GPU, or "
                "another draft"
            )
        sizes = {"max_positions": max_positions, "batch": batch, "max_queries": max_queries}
        super().__init__(spec.decoder, weights.decoder, target.cache, ops, **sizes)
        self.head, self._target_embed = spec, target.weights.embed
        self._places = [target._places[layer] for layer in spec.sources]
        scale = torch.tensor(spec.target.embed_scale, dtype=weights.decoder.embed.dtype, device="cpu")
        self._scale = float(scale)  # rounded to the embedding's dtype, as in the target
        found = [weights.matrix(name) for name in (assistant_spec.BEFORE, assistant_spec.AFTER)]
        self._before, self._after = _both(found)
        self._centroids = weights.matrix(assistant_spec.CENTROIDS)
        self._groups = None if order is None or self._centroids is None else order.view(self._centroids.shape[0], -1)
        dims = {spec.decoder.heads_of(plan)[2] for plan in spec.decoder.plans}
        self._ones = {dim: torch.ones(dim, dtype=torch.float32, device=weights.decoder.norm.device) for dim in dims}

    def drafted(self, h: Tensor, ids: Tensor, places: Places) -> Tensor:
        """Runs all layers of the assistant once, to draft one token for each row.

        Returns the residual stream after the last layer [B, 1, hidden], the input of `logits` and `feature`.

        Args:
            h: hidden states [B, 1, target's hidden size]. For the first draft token they come from the target, for
                later draft tokens from `feature`.
            ids: int64 [B, 1], the token before the draft token.
            places: positions and block tables of the pass, from `places_of`.
        """
        tiling = places.turned.tiling
        e = self.ops.embed(self._target_embed, ids.contiguous()) * self._scale
        x = self.ops.linear(torch.cat((e, h), dim=-1), self._before, None, tiling)
        product = self._qkv(0, x, tiling)
        for index in range(self.spec.num_layers):
            assert product is not None, "only the last layer leaves none"
            x, product = self._after_attention(index, self._attended(index, product, places), x, tiling)
        return x

    def feature(self, x: Tensor, tiling: Tiling) -> Tensor:
        """Returns the argument `h` of the next call of `drafted`. `x` is the result of the previous call.

        The shape is [B, 1, target's hidden size].
        """
        return self.ops.linear(self._normed_last(x), self._after, None, tiling)

    @override
    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        if self._groups is None:
            return super().logits(hidden, tiling)
        ids, found = self._of_groups(hidden, tiling)
        whole = found.new_full((*found.shape[:-1], self.vocab_size), -torch.inf)
        return whole.scatter_(-1, ids, found)

    @override
    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor, ids: Tensor | None = None) -> None:
        if self._groups is None:
            super().argmax(hidden, limit, tiling, out, ids)
            return
        chosen, found = self._of_groups(hidden, tiling)
        if ids is not None:
            chosen = ids[chosen]
            found = torch.where(chosen < limit, found, -torch.inf)
        out.copy_(chosen.gather(-1, found.argmax(dim=-1, keepdim=True))[..., 0])

    def _of_groups(self, hidden: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor]:
        """Computes logits only for token ids in the groups with the highest scores.

        The score of a group is the product of its centroid and the normed hidden state. `AssistantSpec.chosen` groups
        are taken. Returns their ids, int64 [.., n], and the ids' fp32 logits [.., n], for `hidden` [.., hidden].
        """
        assert self._centroids is not None, "it comes with groups"
        assert self._groups is not None, "checked by the caller"
        x = self._normed_last(hidden)
        of_groups = self.ops.linear(
            x.reshape(-1, 1, x.shape[-1]), self._centroids, None, tiling, out_dtype=torch.float32
        )
        chosen = of_groups.view(*x.shape[:-1], -1).topk(self.head.chosen, dim=-1).indices
        ids = self._groups[chosen].flatten(-2)
        rows = self.ops.embed(self.weights.head, ids)
        return ids, (rows.float() * x.float()[..., None, :]).sum(-1)

    def _normed_last(self, x: Tensor) -> Tensor:
        return self._norm(self.spec.plans[-1], x, self.weights.norm)

    def _attended(self, index: int, product: Tensor, places: Places) -> Tensor:
        """Computes attention of one layer over the target's keys and values, without the output projection.

        Returns [B, 1, H * D].

        Args:
            index: index of the assistant's layer.
            product: queries [B, 1, H * D], before their norm and rope.
            places: positions and block tables of the pass.
        """
        plan, layer = self.spec.plans[index], self.weights.layers[index]
        heads, kv_heads, dim = shape = self.spec.heads_of(plan)
        assert plan.rope is not None, "all layers rotate"
        assert layer.q_norm is not None, "all layers norm queries"
        keys, values = self.cache.layer(self._places[index])
        scales = self.cache.scales_of(self._places[index])
        turned, seen = places
        # the ops take q, k and v in one tensor; these zeros replace k and v, and are not stored
        missing = product.new_zeros(*product.shape[:-1], 2 * kv_heads * dim)
        queries = self.ops.store_heads(
            HeadsCall(
                torch.cat([product, missing], dim=-1),
                *self._tables[plan.rope],
                keys,
                values,
                turned.block_table,
                turned.positions,
                turned.write_mask,
                num_heads=heads,
                norms=(layer.q_norm, self._ones[dim], self.spec.rms_eps),
                kv_scales=scales,
            )
        )
        return self.ops.attend(
            AttendCall(
                torch.cat([queries.flatten(2), missing], dim=-1),
                None,
                None,
                keys,
                values,
                seen.block_table,
                seen.positions,
                seen.write_mask,
                num_heads=heads,
                norms=None,
                num_blocks=seen.num_blocks,
                first_block=seen.first_block,
                rule=plan.rule,
                sinks=None,
                kv_scales=scales,
                product=None,
                tiling=seen.tiling,
            ),
            self._works[shape],
        )


def places_of(rows: ForwardBatch) -> Places:
    """Returns the inputs of a step's draft passes. `rows` has the last token of each row, [B, 1]."""
    nothing = torch.zeros_like(rows.write_mask)
    before = (rows.positions - 1).clamp_min(0)
    return Places(replace(rows, write_mask=nothing), replace(rows, positions=before, write_mask=nothing))


def order_of(directory: Path, spec: AssistantSpec) -> Tensor | None:
    """Reads the token ids of an assistant's groups, one group after the other: int64 [vocabulary] on the CPU.

    Returns None if the assistant has no groups of token ids.

    Raises:
        CheckpointError: the tensor is missing, or does not have every id once.
    """
    if not spec.chosen:
        return None
    tensors, name = HeadTensors(directory), assistant_spec.ORDER
    if name not in tensors.infos():
        raise CheckpointError(f"{directory}: {name} missing; this {spec.found} needs it")
    with tensors.open():
        order = tensors.read(name).to(torch.int64).clone()
    if not torch.equal(order.sort().values, torch.arange(spec.vocab_size, device="cpu")):
        raise CheckpointError(f"{directory}: {name} does not have each of {spec.vocab_size} ids once")
    return order


def _both(found: list[Weight | None]) -> tuple[Weight, Weight]:
    first, second = found
    assert first is not None, "checked before anything was allocated"
    assert second is not None, "checked before anything was allocated"
    return first, second
