"""The plan of a layer: its arithmetic, in order; and the record of a family, which makes plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fastspec.models.fields import ConfigFields
from fastspec.shapes import AttentionRule, ClampedGate, DeltaRule, RoutingRule

NormKind = Literal["rms", "rms_fp32", "rms_plus_one", "layer"]
Activation = Literal["silu", "gelu_tanh"]
HeadNorm = Literal["head", "head_after_rope", "projection"]


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """The MLP of a layer as a mixture of experts. h is the norm of the residual stream.

        ids, factors = routing(h Wrouter [+ bias])
        m = sum of factor_j expert_j(h) over a token's chosen experts, in the order in which they were chosen
        m = m + [sigmoid(h Wshared_gate) *] shared(h) [where there is a shared expert]

    Attributes:
        count: number of experts.
        width: intermediate size of one expert.
        routing: how the experts of a token are chosen.
        clamp: activation of the experts; None: silu.
        router_bias: the router's product has a bias.
        correction: each expert has a correction that is added to its score only to choose experts (as in DeepSeek-V3).
        bias: the experts' products have a bias.
        shared: intermediate size of the shared expert, through which every token goes; 0: there is none.
        shared_gate: the shared expert's output is multiplied by a gate, one number for each token.
    """

    count: int
    width: int
    routing: RoutingRule
    clamp: ClampedGate | None = None
    router_bias: bool = False
    correction: bool = False
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One decoder layer. x is the residual stream; f is the activation.

        h = norm(x) [x itself without pre_norm]
        q, k, v = h Wqkv [+ bias]                   one product
        q, k = norm of q and of k [where qk_norm says how]
        q, k = rope(q, k) [where rope names a table], q = query_scale(position) q
        a = attention(q, k, v)                      over all keys, or over the `window` newest
        a = sigmoid(gate) a [with output_gate, whose rows lie after those of v in Wqkv]
        [with delta: a = gated delta rule of h Wqkv, which is then q, k, v, z, b and a: see `reference.delta_rule`]
        a = a Wo [+ bias], a = norm(a) [with post_norm]
        x = x + residual_scale * a
        h = norm(x) [x itself without pre_norm; the first h where parallel]
        g, u = h Wgate_up [+ bias]                  one product
        m = (f(g) * u) Wdown [+ bias] [without gated: f(h Wup) Wdown], m = norm(m) [with post_norm]
            [with experts: as `ExpertsPlan` says]
        x = x + residual_scale * m

    Attributes:
        window: keys that a query sees, the newest ones with its own among them; None: all.
        attention_scale: factor on q . k; None: 1 / sqrt(head_dim).
        softcap: scores become softcap * tanh(scores / softcap); None: they stay as they are.
        qkv_bias: q, k and v projections have a bias.
        o_bias: the output projection has one.
        mlp_bias: gate, up and down projections have one.
        qk_norm: queries and keys are normalised: each head, before or after rope, or all heads as one vector, before
            rope; None: they are not.
        rope: index of the rotary table in `ModelSpec.ropes`; None: no rotation.
        norm: what all norms of the layer are; of the last layer, the norm before the head, too.
            "rms": RMSNorm, rounded before its weight is multiplied. "rms_fp32": rounded after it.
            "rms_plus_one": as "rms_fp32", the factor is 1 + weight. "layer": LayerNorm, rounded at its end.
        norm_bias: the norms have a bias; "layer" only.
        pre_norm: norms before attention and MLP.
        post_norm: norms of what attention and MLP add to x.
        parallel: attention and MLP read the same norm of x. With pre_norm and without post_norm only.
        activation: f.
        gated: the MLP has a gate.
        residual_scale: factor on what attention and MLP add to x.
        output_gate: the output of attention is multiplied by sigmoid(gate), element by element. The rows of q_proj
            are, head by head, those of the query and then those of the gate.
        delta: the layer has a recurrent state in place of attention; None: it attends.
        sinks: every head has an attention sink: one more key, with a learned score and without a value (gpt-oss).
        experts: the MLP is a mixture of experts; None: it is one MLP.
    """

    window: int | None = None
    attention_scale: float | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: HeadNorm | None = None
    rope: int | None = 0
    norm: NormKind = "rms"
    norm_bias: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    activation: Activation = "silu"
    gated: bool = True
    residual_scale: float = 1.0
    output_gate: bool = False
    delta: DeltaRule | None = None
    sinks: bool = False
    experts: ExpertsPlan | None = None

    def __post_init__(self) -> None:
        if self.experts is not None and not (self._plain and self.fused_gate and self.pre_norm and not self.mlp_bias):
            raise ValueError("experts go with pre_norm and silu, and without post_norm, parallel, residual_scale, bias")
        if self.parallel and (self.post_norm or not self.pre_norm):
            raise ValueError("a parallel layer has other norms; wanted pre_norm and no post_norm")
        if not self.gated and self.activation != "gelu_tanh":
            raise ValueError(f"activation={self.activation!r} without a gate; wanted 'gelu_tanh'")
        if self.norm_bias and (self.norm != "layer" or self.post_norm):
            raise ValueError("norm_bias goes with norm='layer' before attention and MLP; wanted it without post_norm")
        if self.fused_tail and (self.output_gate or self.delta):
            raise ValueError("a gated or recurrent layer with a fused tail; wanted norm='rms_plus_one'")

    @property
    def fused_tail(self) -> bool:
        """True if `Ops.layer_tail` computes the layer from attention on, which is as in Llama's layers."""
        return self._plain and self.fused_norm and self.fused_gate and self.experts is None

    @property
    def sandwiched(self) -> bool:
        """True if `Ops.add_norm` computes the norms and sums between products, before and after attention and MLP."""
        norms = self.post_norm and self.pre_norm and self.norm == "rms_plus_one" and self.gated
        return norms and self.residual_scale == 1.0 and self.delta is None

    @property
    def _plain(self) -> bool:
        return not (self.post_norm or self.parallel) and self.residual_scale == 1.0

    @property
    def fused_norm(self) -> bool:
        """True if `Ops.linear` computes the norm before a product."""
        return self.norm == "rms" and self.pre_norm

    @property
    def gating(self) -> dict[str, bool]:
        """Options of `Ops.linear` for the gate after the MLP's first product."""
        return {"gated": True, "gelu": self.activation == "gelu_tanh"} if self.gated else {}

    @property
    def fused_gate(self) -> bool:
        """True if the MLP is gated by silu."""
        return self.gated and self.activation == "silu"

    @property
    def rule(self) -> AttentionRule:
        """The rule by which `Ops.attend` scores queries against keys."""
        return AttentionRule(self.window, self.attention_scale, self.softcap)


@dataclass(frozen=True, slots=True)
class ModelScales:
    """Factors outside of layers: x = embed * scale, logits = softcap(logits_scale * (norm(x) Whead)).

    Attributes:
        embed: factor on the embedding, rounded to the dtype of the model as transformers does.
        logits: factor on the logits.
        softcap: logits become softcap * tanh(logits / softcap); None: they stay as they are.
    """

    embed: float = 1.0
    logits: float = 1.0
    softcap: float | None = None


def _no_scales(fields: ConfigFields) -> ModelScales:
    return ModelScales()


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One family of models.

    Attributes:
        architecture: the class of transformers that a config names, and that a live module must have.
        plans: from a config, whose number of layers is checked, the plan of each layer. Refuses a setting that
            changes the arithmetic and has no place in a plan.
        names: stored names of a layer's tensors, by the row of `layer_table.LAYER`, if others than there.
        scales: from a config, what is done outside of layers.
        eps: the config's field with the epsilon of norms.
        inner: the config's field with the elements between the products of an MLP.
        act: the config's field with the activation, and the one value that the plans compute.
        rope_kinds: kinds of rotary tables that this family is tested with.
        rope_layers: kinds of layers, each with rotary settings of its own, by index; empty: one for all.
        text_part: a checkpoint has other parts, which are left out; its config has the text model as `text_config`.
        partial_rope: a config may ask that only the first part of a head is rotated.
        transposed_experts: a tensor with all experts of a layer may be stored transposed.
        read_as: the `model_type` whose config class reads this family's configs, where transformers has no class for
            it; code that its checkpoints name is not run. Empty: the family's own.
        interleaved: rope rotates neighbours 2i and 2i + 1 of a head. Else halves: i and i + half of what it rotates.
    """

    architecture: str
    plans: Callable[[ConfigFields, int], tuple[LayerPlan, ...]]
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scales: Callable[[ConfigFields], ModelScales] = _no_scales
    eps: str = "rms_norm_eps"
    inner: str = "intermediate_size"
    act: tuple[str, str] = ("hidden_act", "silu")
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    rope_layers: tuple[str, ...] = ()
    read_as: str = ""
    interleaved: bool = False
    partial_rope: bool = False
    text_part: bool = False
    transposed_experts: bool = False


def without_windows(fields: ConfigFields, layers: int) -> None:
    """Refuses a layer that asks for a window, in a model that has none.

    A `sliding_window` alone is ignored, as transformers does.
    """
    types = fields.layer_types(layers)
    if types is not None and "sliding_attention" in types:
        fields.refuse("layer_types", "sliding_attention", "'full_attention' here: there is no sliding_window")


def windows_by_layer_type(fields: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """The window of each layer where `layer_types` says which layers have one."""
    types = fields.layer_types(layers)
    if fields.get("sliding_window") is None:
        without_windows(fields, layers)
        return (None,) * layers
    window = fields.size("sliding_window")
    if types is None:
        fields.refuse("layer_types", None, f"one entry per layer with sliding_window={window}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def one_window(fields: ConfigFields, layers: int) -> int | None:
    """The window of all layers, where a `sliding_window` is one of every layer."""
    types = fields.layer_types(layers)
    if fields.get("sliding_window") is None:
        without_windows(fields, layers)
        return None
    window = fields.size("sliding_window")
    if types is not None and "full_attention" in types:
        fields.refuse("layer_types", "full_attention", f"'sliding_attention' here: sliding_window={window}")
    return window
