"""Decoder-only transformer over a paged KV cache. The layer plans of its ModelSpec define its arithmetic."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.experts import ExpertWeights
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.attention import AttendCall
from fastspec.kernels.reference.layer import Layer, Reduce
from fastspec.kernels.reference.recurrent import DeltaParts
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.config import ModelSpec
from fastspec.models.families.plan import BranchFactors, LatentPlan, LayerPlan
from fastspec.models.layer_kinds import one_of_each
from fastspec.models.layer_table import DecoderWeights, InputWeights, LayerWeights, StateWeights
from fastspec.shapes import (
    AttentionRule,
    ClampedGate,
    ConvRule,
    DeltaRule,
    ForwardBatch,
    MambaRule,
    SelectiveRule,
    SquaredRelu,
    StateRule,
    Tiling,
)

# epsilon of the norms inside latent attention; configs have no field for it, transformers has this constant
LATENT_EPS = 1e-6
Rotation: TypeAlias = "tuple[Tensor, Tensor]"  # cosines and sines, each fp32 [positions, D/2]
# norm weights of queries and of keys, each [D], and their epsilon
HeadNorms: TypeAlias = "tuple[Tensor, Tensor, float]"
# input of the experts, ids and factors from `Ops.route`, weights of the experts, and their activation
Routed: TypeAlias = "tuple[Tensor, Tensor, Tensor, ExpertWeights, ClampedGate | SquaredRelu | None]"


class Decoder:
    """Weights and KV cache of one model, and its forward pass.

    Args:
        spec: sizes and layer plans of the model.
        weights: fused weights, all on one device.
        cache: KV cache pages and recurrent states of this model.
        ops: implementations of all operations of a pass.
        max_positions: number of positions in the rotary table; every position of a pass must be below it.
        batch: largest number of rows of a decode pass.
        max_queries: largest number of tokens of each row in such a pass.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        cache: PagedKVCache,
        ops: Ops,
        *,
        max_positions: int,
        batch: int,
        max_queries: int,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.cache = cache
        # index of each layer's keys in the KV cache, and of its state in the cache of recurrent states. A layer that
        # shares keys has the index of the layer that writes them
        owners = [layer if plan.shares is None else plan.shares for layer, plan in enumerate(spec.plans)]
        self._places = [sum(plan.caches for plan in spec.plans[:owner]) for owner in owners]
        self._state_places = [
            sum(plan.state is not None for plan in spec.plans[:layer]) for layer in range(spec.num_layers)
        ]
        self.ops = ops
        device = weights.norm.device
        sizes = zip(spec.ropes, spec.rope_dims, strict=True)
        self._tables = [rope.tables(max_positions, dim, device) for rope, dim in sizes]  # each [max_positions, D/2]
        self._query_factors = [rope.query_factors(max_positions, device) for rope in spec.ropes]
        self._row_factors = {
            plan: _row_factors(spec, plan, device) for plan in dict.fromkeys(spec.plans) if plan.factors is not None
        }
        # transformers rounds these factors to the dtype of the embedding
        self._embed_scale, self._input_scale = (
            float(torch.tensor(scale, dtype=weights.embed.dtype, device="cpu"))
            for scale in (spec.scales.embed, spec.plans[0].inputs ** 0.5)
        )
        usual = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._works = {
            heads: ops.workspace(device, batch, max_queries, max_positions, heads)
            for heads in dict.fromkeys((usual, *(spec.heads_of(plan) for plan in spec.plans if plan.attends)))
        }
        self._work = self._works[usual]
        # layers whose keys and values later layers read
        self._lenders = {plan.shares for plan in spec.plans if plan.shares is not None}
        self._has_blocks = any(plan.block is not None for plan in spec.plans)
        # weights that are all 1, for norms of values, by head_dim
        plain = {spec.heads_of(plan)[2] for plan in spec.plans if plan.value_norm}
        self._ones = {dim: torch.ones(dim, dtype=torch.float32, device=device) for dim in plain}
        self._reduce: Reduce | None = None  # all-reduce over the ranks; None: this process has whole layers

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.spec.vocab_size

    def hidden(self, rows: ForwardBatch) -> Tensor:
        """Runs a forward pass over the tokens of `rows`, and writes their K/V to the cache.

        Returns the residual stream after the last layer, [B, Q, hidden], before the final norm.
        """
        return self._hidden(rows, {})

    def hidden_with_features(self, rows: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Returns the result of `hidden`, and the residual stream after each of `layers`, [B, Q, len(layers), hidden].

        Layer -1 is the embedding. Layer `num_layers` is the output of the final norm.
        """
        features: dict[int, Tensor | None] = dict.fromkeys(layers)
        last = self._hidden(rows, features)
        found = [feature for layer in layers if (feature := features[layer]) is not None]
        return last, found[0][:, :, None] if len(found) == 1 else torch.stack(found, dim=2)

    def _hidden(self, rows: ForwardBatch, features: dict[int, Tensor | None]) -> Tensor:
        """Implements `hidden`. Sets each value of `features` to the residual stream after the layer that is its key."""
        x, layers = self.ops.embed(self.weights.embed, rows.ids), self.weights.layers
        if self._embed_scale != 1.0:
            x = x * self._embed_scale
        if -1 in features:
            features[-1] = x
        embedded = x if self._has_blocks else None  # else its memory is free after the first layer
        inputs = None if self.weights.inputs is None else self._inputs(self.weights.inputs, x, rows)
        lent: dict[int, Tensor] = {}
        qkv: Tensor | None = self._qkv(0, x, rows.tiling)
        few = self.ops.is_brief() and not features  # skipped layers launch the same kernels
        for index in one_of_each(self.spec.plans, layers) if few else range(len(layers)):
            if embedded is None or self.spec.plans[index].block is None:
                x, qkv = self._layer(index, x, qkv, rows, None if inputs is None else inputs[index], lent)
            else:
                x, qkv = self._layer_with_block(index, x, embedded, rows)
            if index in features:
                features[index] = x
        if len(layers) in features:
            features[len(layers)] = self._norm(self.spec.plans[-1], x, self.weights.norm, self.weights.norm_bias)
        return x

    def _inputs(self, weights: InputWeights, x: Tensor, rows: ForwardBatch) -> Tensor:
        """Returns the per-layer embeddings (Gemma 4) of all layers, [layers, B, Q, inputs].

        Args:
            weights: the second embedding, the projection of x, and a norm.
            x: scaled embedding of the tokens, [B, Q, hidden].
            rows: the tokens of the pass.
        """
        count, width = self.spec.num_layers, self.spec.plans[0].inputs
        made: Tensor = self.ops.linear(x, weights.projection, None, rows.tiling) * self.spec.hidden_size**-0.5
        made = self.ops.norm(made.unflatten(-1, (count, width)), weights.norm, self.spec.rms_eps)
        own = self.ops.embed(weights.embed, rows.ids).unflatten(-1, (count, width)) * self._input_scale
        both: Tensor = (made + own) * 2.0**-0.5
        return both.movedim(-2, 0).contiguous()

    def _layer(
        self,
        index: int,
        x: Tensor,
        qkv: Tensor | None,
        rows: ForwardBatch,
        inputs: Tensor | None = None,
        lent: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs one layer. Returns the residual stream after it, and q, k and v of the next layer (result of `_qkv`).

        The second result is None after the last layer, and if the next layer has only an MLP.

        Args:
            index: index of the layer.
            x: residual stream before the layer, [B, Q, hidden].
            qkv: q, k and v of this layer, the result of `_qkv`. None: the layer has only an MLP.
            rows: the tokens of the pass.
            inputs: the layer's own input [B, Q, inputs], see `_inputs`. None: the layer has no such input.
            lent: index of a layer -> its k and v in this pass. Later layers may share these k and v. If one shares
                those of this layer, this layer adds them. None: no layer shares k and v.
        """
        layer = self.weights.layers[index]
        if qkv is not None and lent is not None:
            qkv = self._with_values(index, qkv, lent)
        mixed = None if qkv is None else self._mix(index, layer, qkv, rows)
        return self._after_attention(index, mixed, x, rows.tiling, inputs)

    def _layer_with_block(
        self, index: int, x: Tensor, embedded: Tensor, rows: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Runs a layer with a block before its recurrent op (`BlockPlan`). Returns the same two results as `_layer`.

        Args:
            index: index of the layer.
            x: residual stream before the layer, [B, Q, hidden].
            embedded: residual stream before the first layer, [B, Q, hidden].
            rows: the tokens of the pass.
        """
        plan, layer, tiling = self.spec.plans[index], self.weights.layers[index], rows.tiling
        assert plan.state is not None, "a block comes before a recurrent op"
        assert layer.state is not None, "a block comes before a recurrent op"
        assert layer.state.inner is not None, "with attention, these projections are not qkv and o"
        assert layer.state.out is not None, "with attention, these projections are not qkv and o"
        added = self._block(index, torch.cat((x, embedded), dim=-1), rows)
        h, options = self._normed(plan, x + added, layer.input_norm, None)
        product = self.ops.linear(h, layer.state.inner, None, tiling, **options)
        mixed = self._state(index, plan.state, layer, product, rows)
        x = self._add_residual(plan, mixed, layer.state.out, None, x, None, 1.0, tiling)
        return x, None if self._following(index) is None else self._qkv(index + 1, x, tiling)

    def _block(self, index: int, both: Tensor, rows: ForwardBatch) -> Tensor:
        """Computes the block of a layer: attention, MLP and the last product, without residual sums.

        Returns [B, Q, hidden]. `both` has the residual stream and the embedding, [B, Q, 2 * hidden].
        """
        plan, layer, tiling, linear = self.spec.plans[index], self.weights.layers[index], rows.tiling, self.ops.linear
        block, (wide, o), (gate_up, down) = layer.block, layer.mixer, layer.mlp
        assert block is not None, "the layer has a block"
        h, options = self._normed(plan, both, block.norm, None)
        qkv = linear(h, wide, None, tiling, **options)
        if block.qkv_in is not None:
            parts = linear(h, block.qkv_in, None, tiling, **options).chunk(3, dim=-1)
            outs = (cast("Weight", each) for each in (block.q_out, block.k_out, block.v_out))
            adapters = zip(parts, outs, strict=True)
            qkv = qkv + torch.cat([linear(part.contiguous(), out, None, tiling) for part, out in adapters], dim=-1)
        attended = linear(self._attend(index, layer, qkv, rows), o, None, tiling)
        h, options = self._normed(plan, attended, layer.post_norm, None)
        adapter = linear(linear(h, block.gate_up_in, None, tiling, **options), block.gate_up_out, None, tiling)
        inner = self._activated(plan, linear(h, gate_up, None, tiling, **options) + adapter)
        return linear(linear(inner, down, None, tiling), block.linear, None, tiling)

    def _mix(self, index: int, layer: LayerWeights, product: Tensor, rows: ForwardBatch) -> Tensor:
        """Computes a layer's attention, its recurrent op, or both, without the output projection.

        With both, their outputs are concatenated along the last axis, attention first.

        Args:
            index, layer: index and weights of the layer.
            product: result of `_qkv` for this layer.
            rows: the tokens of the pass.
        """
        plan = self.spec.plans[index]
        if plan.state is None:
            return self._attend(index, layer, product, rows)
        if not plan.attends:
            return self._state(index, plan.state, layer, product, rows)
        # kernels need contiguous rows
        qkv, rest = (
            each.contiguous() for each in product.split([product.shape[-1] - plan.state.rows, plan.state.rows], dim=-1)
        )
        return torch.cat(
            (self._attend(index, layer, qkv, rows), self._state(index, plan.state, layer, rest, rows)), dim=-1
        )

    def _after_attention(
        self, index: int, attended: Tensor | None, x: Tensor, tiling: Tiling, inputs: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the rest of a layer: output projection, residual sums, norms, MLP or experts.

        Args:
            index: index of the layer.
            attended: output of attention or of the recurrent op, from `_mix`. None: the layer has only an MLP.
            x: residual stream before the layer.
            tiling: tiles of matrix products.
            inputs: see `_layer`.

        Returns:
            The residual stream after the layer, and q, k and v of the next layer; see `_layer`.
        """
        layers, plan = self.weights.layers, self.spec.plans[index]
        layer, next_layer = layers[index], self._following(index)
        if attended is not None and self._fuses(plan):
            eps, ops = self.spec.rms_eps, self.ops
            # a layer for which `_fuses` is true has all fields of a `Layer`
            here, then = cast("Layer", layer), cast("Layer | None", next_layer)
            return ops.layer_tail(ops.linear, attended, x, here, then, eps, tiling, self._reduce)
        if attended is not None and plan.sandwiched and self._reduce is None:
            return self._sandwich_tail(index, attended, x, tiling)
        if plan.experts is None:
            x, h = self._plain_tail(plan, attended, x, layer, tiling), None
        else:
            x, h = self._experts_tail(index, attended, x, tiling)
        if inputs is not None:
            x = self._with_inputs(layer, x, inputs, tiling)
        if layer.scalar is not None:
            x = x * layer.scalar
        return x, None if next_layer is None else self._qkv(index + 1, x, tiling, h)

    def _with_inputs(self, layer: LayerWeights, x: Tensor, inputs: Tensor, tiling: Tiling) -> Tensor:
        """Gates a layer's own input by x, projects it, and adds it to the residual stream x. For `inputs` see `_layer`.

        Returns the sum.
        """
        assert layer.input_gate is not None, "layers with inputs have all of these"
        assert layer.input_projection is not None, "layers with inputs have all of these"
        assert layer.input_projected_norm is not None, "layers with inputs have all of these"
        inner = reference.gelu_tanh(self.ops.linear(x, layer.input_gate, None, tiling)) * inputs
        added = self.ops.linear(inner, layer.input_projection, None, tiling)
        return self.ops.add_norm(added, x, layer.input_projected_norm, None, self.spec.rms_eps)[0]

    def _following(self, index: int) -> LayerWeights | None:
        """Returns the weights of the layer after layer `index`. None if layer `index` is the last one."""
        layers = self.weights.layers
        return layers[index + 1] if index + 1 < len(layers) else None

    def _norm_of(self, index: int) -> tuple[Tensor, float] | None:
        """Returns (weight, epsilon) of the RMSNorm before the attention of layer `index`, if a separate op computes it.

        None: there is no such layer or norm, or `Ops.linear` computes the norm together with the product after it.
        """
        plans, layers = self.spec.plans, self.weights.layers
        if index == len(layers) or plans[index].fused_norm or plans[index].norm == "layer" or not plans[index].mixes:
            return None
        weight = layers[index].input_norm
        return None if weight is None else (weight, self.spec.rms_eps)

    def _fuses(self, plan: LayerPlan) -> bool:
        """True if the op `layer_tail` computes the whole rest of a layer after its attention."""
        return plan.fused_tail and not self.spec.state_rules

    def _sandwich_tail(self, index: int, attended: Tensor, x: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor | None]:
        """Implements `_after_attention` for layers with norms before and after attention and MLP.

        `Ops.add_norm` computes three things in one op: norm of the output, residual sum, and the next norm.
        """
        layers, plan, linear = self.weights.layers, self.spec.plans[index], self.ops.linear
        layer, next_layer = layers[index], self._following(index)

        def joined(added: Tensor, norm: Tensor | None, next_norm: Tensor | None) -> tuple[Tensor, Any]:
            assert norm is not None, "a norm stands after attention, and one after the MLP"
            return self.ops.add_norm(added, x, norm, next_norm, self.spec.rms_eps)

        x, h = joined(linear(attended, layer.mixer[1], layer.o_bias, tiling), layer.attended_norm, layer.post_norm)
        gelu = plan.activation == "gelu_tanh"
        inner = linear(h, layer.mlp[0], layer.gate_up_bias, tiling, gated=plan.gated, gelu=gelu and plan.gated)
        next_norm = None if next_layer is None else next_layer.input_norm
        x, h = joined(linear(inner, layer.mlp[1], layer.down_bias, tiling), layer.mlp_norm, next_norm)
        return x, None if next_layer is None else linear(h, next_layer.mixer[0], next_layer.qkv_bias, tiling)

    def _qkv(self, index: int, x: Tensor, tiling: Tiling, normed: Tensor | None = None) -> Tensor | None:
        """Computes the first matrix product of a layer: q, k and v, [B, Q, (H + 2 Hkv) * D].

        Outputs of `head_gate`, and inputs of the recurrent op, come after v. A layer without attention has only inputs
        of the recurrent op. With latent attention the outputs are those of `LayerWeights.qkv`. Returns None if the
        layer has only an MLP, or begins with a block (`_layer_with_block`).

        Args:
            index: index of the layer.
            x: residual stream before the layer.
            tiling: tiles of matrix products.
            normed: x after the layer's first norm. None: it is computed here.
        """
        layer, plan = self.weights.layers[index], self.spec.plans[index]
        if layer.qkv is None or plan.block is not None:
            return None
        norm = (layer.input_norm, layer.input_norm_bias)
        x, options = self._normed(plan, x, *norm) if normed is None else (normed, {})
        product = self._product(x, layer.qkv, layer.qkv_bias, tiling, **options)
        if layer.head_gate is not None:
            return torch.cat((product, self._product(x, layer.head_gate, None, tiling, **options)), dim=-1)
        if layer.state is None:
            return product
        for more in (layer.state.gates, layer.state.inner):
            if more is not None:
                product = torch.cat((product, self._product(x, more, None, tiling, **options)), dim=-1)
        return product if plan.factors is None else (product * self._row_factors[plan]).to(product.dtype)

    def _product(self, x: Tensor, weight: Weight, bias: Tensor | None, tiling: Tiling, **options: Any) -> Tensor:
        """Computes x weight^T [+ bias]. `options` are those of `Ops.linear`. A subclass may split the product."""
        return self.ops.linear(x, weight, bias, tiling, **options)

    def _normed(
        self, plan: LayerPlan, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the input of the next matrix product, and options of `Ops.linear` for it.

        They are (x, {}) without a `weight`. They are (x, options for the norm) if `Ops.linear` can compute the norm.
        Otherwise they are (norm(x), {}).
        """
        if weight is None:
            return x, {}
        if plan.fused_norm:
            return x, {"norm": (weight, self.spec.rms_eps)}
        return self._norm(plan, x, weight, bias), {}

    def _norm(self, plan: LayerPlan, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.ops.norm(x, weight, self.spec.rms_eps, bias=bias, centred=plan.norm == "layer")

    def _plain_tail(
        self, plan: LayerPlan, attended: Tensor | None, x: Tensor, layer: LayerWeights, tiling: Tiling
    ) -> Tensor:
        """Returns the residual stream after a layer without experts, with a separate op for each product.

        For `attended` and `x` see `_after_attention`.
        """
        scale, after = plan.residual_scale, x
        if attended is not None and plan.factors is not None:
            after, scale = x + self._both_branches(plan, plan.factors, attended, layer, tiling), plan.factors.down
        elif attended is not None:
            after = self._add_residual(
                plan, attended, layer.mixer[1], layer.o_bias, x, layer.attended_norm, scale, tiling
            )
        if not plan.feeds:
            return after
        if plan.parallel:
            inner = self._mlp_inner(plan, x, layer.input_norm, layer.input_norm_bias, layer, tiling)
        else:
            inner = self._mlp_inner(plan, after, layer.post_norm, layer.post_norm_bias, layer, tiling)
        return self._add_residual(plan, inner, layer.mlp[1], layer.down_bias, after, layer.mlp_norm, scale, tiling)

    def _both_branches(
        self, plan: LayerPlan, factors: BranchFactors, mixed: Tensor, layer: LayerWeights, tiling: Tiling
    ) -> Tensor:
        """Computes the output projections of attention and of the recurrent op, for a layer that has both.

        Multiplies each of them by its factor and returns the sum. `mixed` is the result of `_mix`.
        """
        assert plan.state is not None, "the layer has both"
        assert layer.state is not None, "the layer has both"
        assert layer.state.out is not None, "the layer has both"
        values = plan.state.values
        attended, stated = (each.contiguous() for each in mixed.split([mixed.shape[-1] - values, values], dim=-1))
        added = self.ops.linear(attended, layer.mixer[1], layer.o_bias, tiling) * factors.attended
        return self.ops.linear(stated, layer.state.out, None, tiling) * factors.stated + added

    def _experts_tail(
        self, index: int, attended: Tensor | None, x: Tensor, tiling: Tiling
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream after a layer with experts (`ExpertsPlan`), and the next layer's norm of it.

        The second result is None if the norm is not computed here. For `attended` and `x` see `_after_attention`.
        """
        plan, layer, norm = self.spec.plans[index], self.weights.layers[index], self._norm_of(index + 1)
        assert plan.experts is not None
        assert layer.experts is not None
        linear = self.ops.linear
        if attended is not None:
            x = self._add_residual(plan, attended, layer.mixer[1], layer.o_bias, x, None, plan.residual_scale, tiling)
        ids, factors, h = self._routed(plan, x, layer, tiling)
        shared = logits = None
        if plan.experts.shared and not layer.experts.joined:
            shared = linear(self._mlp_inner(plan, h, None, None, layer, tiling), layer.mlp[1], None, tiling)
        if (gate := layer.experts.shared_gate) is not None:
            logits = linear(h, gate, None, tiling, out_dtype=torch.float32)
        routed = h, ids, factors, layer.experts, plan.experts.activation
        if layer.experts.latent_in is not None:
            return x + self._latent(routed, shared, tiling), None
        if plan.residual_scale != 1.0:
            total = self.ops.experts(*routed, shared=shared, shared_logits=logits, residual=None)
            return x + total.to(x.dtype) * plan.residual_scale, None
        if norm is None:
            return self.ops.experts(*routed, shared=shared, shared_logits=logits, residual=x), None
        return self.ops.experts_normed(*routed, shared=shared, shared_logits=logits, residual=x, norm=norm)

    def _latent(self, routed: Routed, shared: Tensor | None, tiling: Tiling) -> Tensor:
        """Computes experts with `ExpertsPlan.latent`. Returns their output plus the output of the shared expert.

        Args:
            routed: first arguments of `Ops.experts`.
            shared: output of the shared expert. None: there is none.
            tiling: tiles of matrix products.
        """
        h, ids, factors, weights, activation = routed
        assert weights.latent_in is not None
        assert weights.latent_out is not None
        inner = self.ops.linear(h, weights.latent_in, None, tiling)
        total = self.ops.experts(inner, ids, factors, weights, activation, residual=None).to(h.dtype)
        return self.ops.linear(total, weights.latent_out, None, tiling, residual=shared)

    def _routed(self, plan: LayerPlan, x: Tensor, layer: LayerWeights, tiling: Tiling) -> tuple[Tensor, Tensor, Tensor]:
        """Chooses the experts of each token.

        Returns the ids and factors of the chosen experts (see `Ops.route`), and the input of the experts, norm(x).
        """
        experts, weights = plan.experts, layer.experts
        assert experts is not None
        assert weights is not None
        assert layer.post_norm is not None
        router, bias, linear = weights.router, weights.router_bias, self.ops.linear
        norm = (layer.post_norm, self.spec.rms_eps)
        if weights.joined:
            h, logits = self.ops.normed_logits(x, *norm, router, bias, tiling)
            shared: Literal["gated", "whole"] = "gated" if experts.shared_gate else "whole"
            rule = experts.routing._replace(shared=shared, shared_parts=experts.shared_parts)
            return *self.ops.route(logits.flatten(0, -2), rule, weights.correction), h
        if plan.fused_norm:
            logits = linear(x, router, bias, tiling, norm=norm, out_dtype=torch.float32)
            return self.ops.route_normed(logits.flatten(0, -2), experts.routing, weights.correction, x, *norm)
        h = self._norm(plan, x, layer.post_norm)
        logits = linear(h, router, bias, tiling, out_dtype=torch.float32)
        return *self.ops.route(logits.flatten(0, -2), experts.routing, weights.correction), h

    def _add_residual(
        self,
        plan: LayerPlan,
        inner: Tensor,
        weight: Weight,
        bias: Tensor | None,
        x: Tensor,
        norm: Tensor | None,
        scale: float,
        tiling: Tiling,
    ) -> Tensor:
        """Adds the output of attention or MLP to the residual stream: x + scale * norm(inner weight^T [+ bias]).

        The subclass for tensor-parallel ranks also sums the products of all ranks here.

        Args:
            plan: plan of the layer.
            inner: result of `_mix` or `_mlp_inner`, the input of the projection.
            weight, bias: output projection of attention, or down projection of the MLP.
            x: the residual stream.
            norm: weight of the norm after the product. None: there is no norm.
            scale: factor on the output.
            tiling: tiles of matrix products.
        """
        if scale == 1.0 and norm is None:
            return self.ops.linear(inner, weight, bias, tiling, residual=x)
        added = self.ops.linear(inner, weight, bias, tiling)
        if scale == 1.0 and plan.norm != "layer" and norm is not None:
            return self.ops.add_norm(added, x, norm, None, self.spec.rms_eps)[0]
        return x + self._residual_branch(plan, added, norm, scale)

    def _residual_branch(self, plan: LayerPlan, added: Tensor, norm: Tensor | None, scale: float) -> Tensor:
        """Returns scale * norm(added), which the caller adds to the residual stream. If `norm` is None: scale * added.

        `norm` is the weight of the norm.
        """
        added = added if norm is None else self._norm(plan, added, norm)
        return added if scale == 1.0 else added * scale

    def _mlp_inner(
        self,
        plan: LayerPlan,
        x: Tensor,
        norm: Tensor | None,
        bias: Tensor | None,
        layer: LayerWeights,
        tiling: Tiling,
    ) -> Tensor:
        """Computes the MLP up to its down projection: norm, gate and up projections, activation.

        Returns [B, Q, intermediate]. `norm` and `bias` are the weight and bias of the norm before the MLP. If `norm` is
        None, x is already normed, or there is no norm.
        """
        x, options = self._normed(plan, x, norm, bias)
        inner = self._product(x, layer.mlp[0], layer.gate_up_bias, tiling, **plan.gating, **options)
        return inner if plan.gating else self._activated(plan, inner)

    def _activated(self, plan: LayerPlan, inner: Tensor) -> Tensor:
        """Applies the MLP's activation. For layers in which `Ops.linear` does not compute it.

        `inner` has gate and up along its last axis, or only up for an MLP without a gate.
        """
        if plan.factors is not None:
            gate, up = inner.chunk(2, dim=-1)
            inner = torch.cat((gate * plan.factors.gate, up), dim=-1)
        if plan.activation == "relu2":
            return torch.relu(inner).square()
        if plan.activation == "silu":
            return reference.silu_mul(inner)
        if plan.activation == "gelu":
            gate, up = inner.chunk(2, dim=-1)
            return reference.gelu(gate) * up
        return self.ops.gelu_tanh_mul(inner) if plan.gated else reference.gelu_tanh(inner)

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """Returns fp32 logits [..., V] for the result of `hidden`, [..., hidden]."""
        scales, logits = self.spec.scales, self._raw_logits(hidden, tiling)
        if scales.logits != 1.0:
            logits = logits.mul_(scales.logits)  # in place: logits take most of a step's temporary memory
        if scales.softcap is not None:
            logits = logits.div_(scales.softcap).tanh_().mul_(scales.softcap)
        return logits

    def _raw_logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """Returns fp32 logits [..., V] before they are scaled."""
        x, options = self._normed(self.spec.plans[-1], hidden, self.weights.norm, self.weights.norm_bias)
        return self.head_logits(x, tiling, **options)

    def head_logits(self, x: Tensor, tiling: Tiling, **options: Any) -> Tensor:
        """Returns fp32 logits [..., V], the product of x with the LM head, unscaled.

        `options` are those of `Ops.linear`, such as the final norm.
        """
        return self._product(x, self.weights.head, None, tiling, out_dtype=torch.float32, **options)

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor, ids: Tensor | None = None) -> None:
        """Writes to `out` [R] the id below `limit` with the largest logit, for each of the hidden states [R, hidden].

        Of equal logits the lowest id is taken. For `ids` see `CausalModel.argmax`.
        """
        scales = self.spec.scales
        if scales.logits != 1.0 or scales.softcap is not None:  # scaling may round different logits to equal values
            reference.pick(self.logits(hidden, tiling), limit, out, ids)
            return
        self._raw_argmax(hidden, limit, tiling, out, ids)

    def _raw_argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor, ids: Tensor | None) -> None:
        """Implements `argmax` for logits that are neither scaled nor capped."""
        x, options = self._normed(self.spec.plans[-1], hidden, self.weights.norm, self.weights.norm_bias)
        self.head_argmax(x, limit, tiling, out, work=self._work, ids=ids, **options)

    def head_argmax(self, x: Tensor, limit: int, tiling: Tiling, out: Tensor, **options: Any) -> None:
        """Multiplies x [R, hidden] with the LM head, and finds the id below `limit` with the largest value in each row.

        Writes the ids to `out` [R]. `options` are those of `Ops.argmax`, such as the final norm.
        """
        self.ops.argmax(x, self.weights.head, limit, tiling, out=out, **options)

    def _state(self, index: int, rule: StateRule, layer: LayerWeights, product: Tensor, rows: ForwardBatch) -> Tensor:
        """Computes the recurrent op of a layer, without its output projection: [B, Q, rule.values].

        `product` is the result of `_qkv`. The op reads the recurrent state of each row from the cache, and writes the
        new state to it.
        """
        place, states, weights, ops = self._state_places[index], self.cache.states, layer.state, self.ops
        assert weights is not None, "the layer is recurrent"
        assert states is not None, "a model with a recurrent layer has a cache of states"
        assert rows.state_rows is not None, "each row has a row of that cache"
        if isinstance(rule, DeltaRule) and rule.rank:
            product = self._with_gates(rule, weights, product, rows.tiling)
        slots = states.states[place], states.inputs[place], rows.state_rows, rows.positions, rows.write_mask
        prompt = len(product) == 1 and product.shape[1] > states.states.shape[2]
        kept = states.kept.of_layer(place) if prompt and states.kept is not None else None
        if isinstance(rule, ConvRule):
            return ops.short_conv(product, weights, *slots, rule, kept)
        if isinstance(rule, MambaRule):
            out = ops.mamba(product, weights, *slots, rule, kept)
            return ops.mamba_norm(out, product[..., : rule.values], weights.norm, self.spec.rms_eps, rule)
        if isinstance(rule, SelectiveRule):
            mixed, steps = self._selected(rule, weights, ops.selective_conv(product, weights, *slots, rule, kept), rows)
            out = ops.selective_scan(mixed, steps, weights, slots[0], *slots[2:], rule, kept)
            return ops.mamba_norm(out, product[..., rule.channels :], None, self.spec.rms_eps, rule)
        # a layer of this rule has all weights of `DeltaParts`
        out = ops.delta_rule(product, cast("DeltaParts", weights), *slots, rule, kept)
        gate = product[..., rule.channels : rule.channels + rule.values]
        return ops.gated_norm(out, gate, cast("Tensor", weights.norm), self.spec.rms_eps, rule.gate)

    def _selected(
        self, rule: SelectiveRule, weights: StateWeights, x: Tensor, rows: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Returns the inputs of `Ops.selective_scan` (Mamba-1), computed from x, the result of its convolution.

        The first is x, normed B and normed C, concatenated along the last axis. The second is the time step of each
        channel, before bias and softplus.
        """
        assert weights.select is not None, "Mamba-1 has these weights"
        assert weights.step_out is not None, "Mamba-1 has these weights"
        parts = self.ops.linear(x, weights.select, None, rows.tiling).split(rule.selected, dim=-1)
        norms = weights.step_norm, weights.b_norm, weights.c_norm
        step, b, c = (
            self.ops.norm(part.contiguous(), cast("Tensor", norm), self.spec.rms_eps)
            for part, norm in zip(parts, norms, strict=True)
        )
        return torch.cat((x, b, c), dim=-1), self.ops.linear(step, weights.step_out, None, rows.tiling)

    def _with_gates(self, rule: DeltaRule, weights: StateWeights, product: Tensor, tiling: Tiling) -> Tensor:
        """Returns the input of `Ops.delta_rule` for a rule with low-rank decays and gate (`DeltaRule.rank`).

        `product`, the result of `_qkv`, has the first of their two products. The second is computed here.
        """
        assert weights.decay_out is not None, "a rule with a rank has a second product of decays"
        assert weights.gate_out is not None, "a rule with a rank has a second product of z"
        mixed, b, decays, gate = product.split([rule.channels, rule.value_heads, rule.rank, rule.rank], dim=-1)
        a = self._product(decays.contiguous(), weights.decay_out, None, tiling)
        z = self._product(gate.contiguous(), weights.gate_out, None, tiling)
        return torch.cat((mixed, z, b, a), dim=-1)

    def _attend(self, index: int, layer: LayerWeights, qkv: Tensor, rows: ForwardBatch) -> Tensor:
        """Computes attention, and the output gate if the layer has one, without the output projection.

        Returns [B, Q, H * D]. `qkv` is the result of `_qkv`.
        """
        plan = self.spec.plans[index]
        if plan.head_gate:
            heads = self.spec.num_heads
            qkv, gate = qkv.split([qkv.shape[-1] - heads, heads], dim=-1)
            attended = self._attend_ungated(index, layer, qkv.contiguous(), rows)
            out: Tensor = attended.unflatten(-1, (heads, -1)) * reference.sigmoid(gate)[..., None]
            return out.flatten(-2)
        if plan.output_gate:
            gates = self.spec.num_heads * self.spec.head_dim
            qkv, gate = qkv.split([qkv.shape[-1] - gates, gates], dim=-1)
            return self.ops.gated(self._attend_ungated(index, layer, qkv, rows), gate)
        return self._attend_ungated(index, layer, qkv, rows)

    def _attend_ungated(self, index: int, layer: LayerWeights, qkv: Tensor, rows: ForwardBatch) -> Tensor:
        """Computes attention without the output gate: norms of queries and keys, rope, and attention over the cache."""
        plan = self.spec.plans[index]
        if plan.latent is not None:
            qkv = self._expanded(index, plan.latent, layer, qkv, rows.tiling)
        rotation: Rotation | None = None if plan.rope is None else self._tables[plan.rope]
        norms = self._norms(index)
        if norms is None and plan.qk_norm is not None:
            qkv = self._normed_heads(plan, layer, qkv, rows.positions)
        if plan.qk_norm == "head_after_rope":
            rotation = None  # heads are already rotated
        if plan.rope is not None and (factors := self._query_factors[plan.rope]) is not None:
            qkv = self._scaled_queries(qkv, factors, rows.positions)
        attended = self._attend_rows(index, qkv, rows, rotation, norms, plan.rule, layer.sinks)
        if plan.latent is None:
            return attended
        values: Tensor = attended.unflatten(-1, (-1, plan.latent.dim))[..., : plan.latent.value].flatten(-2)
        return values

    def _expanded(self, index: int, latent: LatentPlan, layer: LayerWeights, product: Tensor, tiling: Tiling) -> Tensor:
        """Returns q, k and v of all heads of a layer with latent attention, from `product`, the result of `_qkv`.

        Each head of v is padded with zeros to the size of a head of k.
        """
        weights, heads = layer.latent, self.spec.heads_of(self.spec.plans[index])[0]
        assert weights is not None, "the layer has latent attention"
        sizes = [latent.q_rank or heads * latent.dim, latent.rank, latent.shared]
        query, content, shared = product.split(sizes, dim=-1)
        if weights.q_expand is not None:
            assert weights.q_norm is not None
            norm = (weights.q_norm, LATENT_EPS)
            query = self._product(query.contiguous(), weights.q_expand, None, tiling, norm=norm)
        norm = (weights.norm, LATENT_EPS)
        both = self._product(content.contiguous(), weights.expand, None, tiling, norm=norm)
        keys, values = both.split([heads * latent.plain, heads * latent.value], dim=-1)
        keys, values = (each.unflatten(-1, (heads, -1)) for each in (keys, values))
        # kernels rotate element i of a head with element i + dim / 2, so each half of a head ends up with half of the
        # rotated elements, see `rope.head_order`
        halves = 1 if self.spec.plans[index].rope is None else 2
        plain = keys.chunk(halves, dim=-1)
        rest = shared[..., None, :].expand(*shared.shape[:-1], heads, -1).chunk(halves, dim=-1)
        parts = [*plain, *rest] if halves == 1 else [rest[0], plain[0], rest[1], plain[1]]
        values = F.pad(values, (0, latent.dim - latent.value))
        return torch.cat((query, torch.cat(parts, dim=-1).flatten(-2), values.flatten(-2)), dim=-1)

    def _with_values(self, index: int, product: Tensor, lent: dict[int, Tensor]) -> Tensor:
        """Returns q, k and v of a layer, after three changes that its plan may ask for.

        The changes are: k and v of an earlier layer are appended (`LayerPlan.shares`), v is a copy of k, v is normed.
        A layer with shared k and v writes them again to the pages of the earlier layer, with the same bits.

        Args:
            index: index of the layer.
            product: result of `_qkv`. It has no k and v if the layer shares those of another layer.
            lent: see `_layer`.
        """
        plan = self.spec.plans[index]
        _, kv_heads, dim = self.spec.heads_of(plan)
        if plan.shares is not None:
            missing = product.new_zeros(*product.shape[:-1], 2 * kv_heads * dim)  # `Ops.is_brief` skips the layer
            return torch.cat([product, lent.get(plan.shares, missing)], dim=-1)
        qkv = product
        if plan.value_norm or plan.value_is_key:
            value = product[..., -kv_heads * dim :]
            both = product if plan.value_is_key else product[..., : -kv_heads * dim]
            if plan.value_norm:
                value = value.unflatten(-1, (kv_heads, dim)).contiguous()
                value = self.ops.norm(value, self._ones[dim], self.spec.rms_eps).flatten(-2)
            qkv = torch.cat([both, value], dim=-1)
        if index in self._lenders:
            lent[index] = qkv[..., -2 * kv_heads * dim :]
        return qkv

    def _norms(self, index: int) -> HeadNorms | None:
        """Returns weights and epsilon of the norms of query and key heads, if `Ops.attend` computes these norms.

        None: the layer has no such norms, or another op computes them.
        """
        plan, layer = self.spec.plans[index], self.weights.layers[index]
        if plan.qk_norm != "head" or plan.norm == "layer" or layer.q_norm is None:
            return None
        lender = layer if plan.shares is None else self.weights.layers[plan.shares]
        return None if lender.k_norm is None else (layer.q_norm, lender.k_norm, self.spec.rms_eps)

    def _attend_rows(
        self,
        index: int,
        qkv: Tensor,
        rows: ForwardBatch,
        rotation: Rotation | None,
        norms: HeadNorms | None,
        rule: AttentionRule,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Writes k and v to the layer's cache, and computes attention of each query up to its own position.

        Args:
            index: index of the layer.
            qkv: [B, Q, (H + 2 Hkv) * D].
            rows: the tokens of the pass, with their positions and pages.
            rotation: cos and sin tables with which q and k are rotated first. None: `qkv` is rotated already, or the
                layer has no RoPE.
            norms: weights and epsilon of the norms of query and key heads, which come before the rotation. None: they
                are computed already, or the layer has none.
            rule: window, scale and softcap of the layer.
            sinks: see `LayerWeights.sinks`.

        Returns:
            [B, Q, H * D].
        """
        cos, sin = (None, None) if rotation is None else rotation
        # K/V are written before they are read, so a row reads the same blocks of keys whether they are new or old
        heads = self.spec.heads_of(self.spec.plans[index])
        call = AttendCall(
            qkv,
            cos,
            sin,
            *self.cache.layer(self._places[index]),
            rows.block_table,
            rows.positions,
            rows.write_mask,
            num_heads=heads[0],
            norms=norms,
            num_blocks=rows.num_blocks,
            first_block=rows.first_block,
            rule=rule,
            sinks=sinks,
            kv_scales=self.cache.scales_of(self._places[index]),
            # before a fused tail only the output projection reads the result, so a kernel may write it in the layout
            # that this product reads
            product=self.weights.layers[index].o if self._fuses(self.spec.plans[index]) else None,
            tiling=rows.tiling,
        )
        return self.ops.attend(call, self._works[heads])

    def _normed_heads(self, plan: LayerPlan, layer: LayerWeights, qkv: Tensor, positions: Tensor) -> Tensor:
        """Returns qkv with normed queries and keys, for norms that `Ops.attend` cannot compute.

        If the norms come after rope, also rotates queries and keys.
        """
        spec = self.spec
        sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
        query, key, value = qkv.split(sizes, dim=-1)
        normed = []
        for x, weight in ((query, layer.q_norm), (key, layer.k_norm)):
            assert weight is not None
            if plan.qk_norm != "projection":
                x = x.unflatten(-1, (-1, spec.head_dim))
            if plan.qk_norm == "head_after_rope" and plan.rope is not None:
                cos, sin = self._tables[plan.rope]
                at = positions.clamp(max=cos.shape[0] - 1)
                x = reference.rope(x, cos[at][:, :, None], sin[at][:, :, None])
            normed.append(self._norm(plan, x.contiguous(), weight).view((*query.shape[:2], -1)))
        return torch.cat([*normed, value], dim=-1)

    def _scaled_queries(self, qkv: Tensor, factors: Tensor, positions: Tensor) -> Tensor:
        """Multiplies each query in qkv by the element of `factors` [positions] at its position. Returns the new qkv."""
        heads = self.spec.num_heads * self.spec.head_dim
        at = positions.clamp(max=factors.shape[0] - 1)
        query = qkv[..., :heads] * factors[at][..., None].to(qkv.dtype)
        return torch.cat([query, qkv[..., heads:]], dim=-1)


def _row_factors(spec: ModelSpec, plan: LayerPlan, device: torch.device) -> Tensor:
    """Returns the factor on each output of the first product of a layer: fp32 [outputs].

    The layer has attention and a recurrent state; `plan.factors` has one factor for each part of the outputs.
    """
    factors, rule = plan.factors, plan.state
    assert factors is not None, "the layer has both"
    assert isinstance(rule, MambaRule), "the layer has both"
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    parts = [(queries, factors.attention), (keys, factors.attention * factors.key), (keys, factors.attention)]
    sizes = rule.values, rule.values, rule.shared, rule.shared, rule.heads
    parts += zip(sizes, factors.state, strict=True)
    rows = [torch.full((count,), factor, dtype=torch.float32, device=device) for count, factor in parts]
    return torch.cat(rows)
