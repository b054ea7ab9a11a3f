"""`LayerPlan`, the operations of one decoder layer, and `ModelFamily`, which makes the plans of a config's layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fastspec.models.fields import ConfigFields
from fastspec.shapes import AttentionRule, ClampedGate, RoutingRule, SquaredRelu, StateRule

NormKind = Literal["rms", "rms_fp32", "rms_plus_one", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
MAX_SHARED_PARTS = 2  # with more parts a separate MLP would be faster for prompts
HeadNorm = Literal["head", "head_after_rope", "projection"]


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Mixture of experts as the MLP of a layer. h is the norm of the residual stream.

        ids, factors = routing(h Wrouter [+ bias])
        m = sum of factor_j expert_j(h) over a token's chosen experts, in the order in which they were chosen
            [with `latent`: expert_j reads h Wlatent_in, and the sum is multiplied with Wlatent_out]
        m = m + [sigmoid(h Wshared_gate) *] shared(h) [if there is a shared expert]

    Attributes:
        count: number of experts.
        width: intermediate size of one expert.
        routing: rule that chooses the experts of a token.
        activation: activation of the experts. None: silu(gate) * up.
        router_bias: True if the router's product has a bias.
        correction: True if each expert has a correction that is added to its score only to choose experts (as in
            DeepSeek-V3).
        bias: True if the experts' products have a bias.
        shared: intermediate size of the shared expert, which every token uses. 0: there is none.
        shared_gate: True if the shared expert's output is multiplied by a gate, one number per token.
        latent: width of the routed experts' input and output, if it is not the hidden size. Wlatent_in and Wlatent_out
            convert between both widths. The shared expert and the router read h itself. 0: the hidden size.
    """

    count: int
    width: int
    routing: RoutingRule
    activation: ClampedGate | SquaredRelu | None = None
    router_bias: bool = False
    correction: bool = False
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    latent: int = 0

    @property
    def shared_parts(self) -> int:
        """Number of parts, each as wide as a routed expert, into which the shared expert can be divided. 0: none."""
        parts, rest = divmod(self.shared, self.width)
        return parts if rest == 0 and parts <= MAX_SHARED_PARTS else 0

    @property
    def gated(self) -> bool:
        """True if the routed experts and the shared expert have a gate projection."""
        return not isinstance(self.activation, SquaredRelu)


@dataclass(frozen=True, slots=True)
class BranchFactors:
    """Factors inside a layer that has attention and a recurrent state (Falcon-H1).

    Attributes:
        attention: factor on the input of attention. Queries, keys and values get it.
        key: further factor on keys.
        attended: factor on the output of attention.
        state: factors on z, x, B, C and the time steps of the recurrent op.
        stated: factor on the output of the recurrent op.
        gate: factor on the gate of the MLP, before its activation.
        down: factor on the output of the MLP.
    """

    attention: float
    key: float
    attended: float
    state: tuple[float, ...]
    stated: float
    gate: float
    down: float


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). It is computed with q, k and v of each head.

        q = h Wq [with q_rank: norm(h Wq_in) Wq_out], for each head [q1 q2]
        c, r = h Wkv;   k1, v = norm(c) Wkv_out, for each head;   k = [k1 r], with the same r in all heads

    rope rotates only q2 and r. KV cache pages hold k, and v padded with zeros to the length of k.

    Attributes:
        rank: elements of c.
        q_rank: width between the two projections of queries. 0: queries have one projection.
        plain: elements of q1 and of k1.
        shared: elements of q2 and of r.
        value: elements of v of a head.
    """

    rank: int
    q_rank: int
    plain: int
    shared: int
    value: int

    @property
    def dim(self) -> int:
        """Elements of q and of k of a head."""
        return self.plain + self.shared


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Transformer block before the recurrent op of a layer (Zamba2). Several layers share its weights.

        b = norm([x, e])                            e: the token's embedding
        q, k, v = b Wqkv + b A_in A_out             one A for q, k and v each [with `adapts`]
        h = norm(attention(q, k, v) Wo)
        g, u = h Wgate_up + h B_in B_out
        x = x + recurrent op(norm(x + (f(g) * u) Wdown Wlinear))

    A, B and Wlinear are the layer's own. The keys and values in the cache are its own, too.

    Attributes:
        rank: inner width of the adapters A and B.
        lender: index of the earlier layer whose weights this layer uses. None: it has weights of its own.
        adapts: True if q, k and v have adapters.
    """

    rank: int
    lender: int | None = None
    adapts: bool = False


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Plan of one decoder layer. x is the residual stream; f is the activation.

        h = norm(x) [x itself without pre_norm]
        q, k, v = h Wqkv [+ bias]                   one product
        q, k = norm(q), norm(k) [see qk_norm], v = v / rms(v) [with value_norm]
        q, k = rope(q, k) [see rope], q = query_scale(position) q
        [with latent: q, k and v as in `LatentPlan`]
        a = attention(q, k, v)                      over all keys, or over the `window` newest
        a = sigmoid(gate) a [with output_gate, whose rows come after those of v in Wqkv, or with head_gate]
        [with a state and no attention: a = `reference.delta_rule`, `short_conv`, `mamba` or `selective_scan` of
            h Wqkv, whose rows are then those of `state`]
        a = a Wo [+ bias], a = norm(a) [with post_norm]
        x = x + residual_scale * a
        h = norm(x) [x itself without pre_norm; the first h if parallel]
        g, u = h Wgate_up [+ bias]                  one product
        m = (f(g) * u) Wdown [+ bias] [without gated: f(h Wup) Wdown], m = norm(m) [with post_norm]
            [with experts: see `ExpertsPlan`]
        x = x + residual_scale * m
        x = x + norm((f(x Wgate) * inputs) Wproj) [with inputs: the layer's part of the inputs of all layers]
        x = scalar * x [with scaled]

    A layer may have attention and a recurrent state side by side. Both read the same h, and `factors` has the factors
    on their inputs and outputs. A layer may also have no MLP, or only an MLP.

    Attributes:
        window: number of newest keys to which a query attends, including its own. None: all keys.
        attention_scale: factor on q . k. None: 1 / sqrt(head_dim).
        softcap: scores become softcap * tanh(scores / softcap). None: no softcap.
        qkv_bias: True if q, k and v projections have a bias.
        o_bias: True if the output projection has a bias.
        mlp_bias: True if gate, up and down projections have a bias.
        qk_norm: norm of queries and keys. "head": of each head, before rope. "head_after_rope": of each head, after
            rope. "projection": of all heads as one vector, before rope. None: no norm.
        rope: index of the rotary table in `ModelSpec.ropes`. None: no rotation.
        norm: type of all norms of the layer. The norm before the LM head has the type of the last layer.
            "rms": RMSNorm, rounded to the dtype before it is multiplied by its weight. "rms_fp32": RMSNorm, rounded
            after this product. "rms_plus_one": like "rms_fp32" with the factor 1 + weight. "layer": LayerNorm, rounded
            at its end.
        norm_bias: True if the norms have a bias. Only for norm "layer".
        pre_norm: True if there are norms before attention and MLP.
        post_norm: True if there are norms of the outputs of attention and MLP.
        parallel: True if attention and MLP read the same norm of x. pre_norm must then be True, and post_norm False.
        activation: f, the activation of the MLP.
        gated: True if the MLP has a gate.
        residual_scale: factor on the outputs of attention and MLP.
        output_gate: True if the output of attention is multiplied by sigmoid(gate), element by element. For each head,
            q_proj has the rows of the query, then those of the gate.
        head_gate: True if the output of each attention head is multiplied by sigmoid(h Wg), one number per head.
        attends: True if the layer has attention.
        state: kind and sizes of the layer's recurrent state. None: the layer has no state.
        state_bias: True if the input and output projections of the recurrent op have a bias.
        conv_bias: True if the convolution of the recurrent op has a bias.
        factors: factors of a layer with attention and a state. None: all are 1.
        feeds: True if the layer has an MLP or experts.
        sinks: True if every head has an attention sink: one more key, with a learned score and no value (gpt-oss).
        experts: mixture of experts as MLP. None: a dense MLP.
        kv_heads, head_dim: KV heads, and elements of a head, of this layer. None: those of the model.
        width: intermediate size of this layer's MLP. None: that of the model.
        value_norm: True if each head of v is divided by its root mean square.
        value_is_key: True if v is a copy of k before k's norm and rotation. There is no projection of v.
        shares: index of the layer whose keys and values this layer reads. This layer then projects only queries. None:
            it has keys and values of its own.
        inputs: elements per position of this layer's own input (Gemma's per-layer embedding). 0: no such input.
        scaled: True if the layer's result is multiplied by a number from the checkpoint.
        latent: sizes of latent attention. kv_heads must then be the number of query heads, and head_dim the elements of
            a key. None: usual projections of q, k and v.
        block: the layer's attention and MLP are a block before its recurrent op. None: they are not.
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
    head_gate: bool = False
    attends: bool = True
    state: StateRule | None = None
    state_bias: bool = False
    conv_bias: bool = False
    factors: BranchFactors | None = None
    feeds: bool = True
    sinks: bool = False
    experts: ExpertsPlan | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    width: int | None = None
    value_norm: bool = False
    value_is_key: bool = False
    shares: int | None = None
    inputs: int = 0
    scaled: bool = False
    latent: LatentPlan | None = None
    block: BlockPlan | None = None

    def __post_init__(self) -> None:
        if self.experts is not None and not (self._holds_experts and self.feeds):
            raise ValueError("experts go with pre_norm, and silu or relu2, and without post_norm, parallel and bias")
        if not (self.mixes or self.feeds):
            raise ValueError("a layer without attention, state and MLP; wanted one of them")
        if (self.factors is not None or self.block is not None) != (self.attends and self.state is not None):
            raise ValueError("a layer with attention and a state has factors or a block; wanted both, or neither")
        if self.parallel and (self.post_norm or not self.pre_norm):
            raise ValueError("a parallel layer has other norms; wanted pre_norm and no post_norm")
        if self.gated != (self.activation == "silu") and self.activation not in ("gelu", "gelu_tanh"):
            raise ValueError(
                f"activation={self.activation!r} with gated={self.gated}; wanted silu with a gate, relu2 without"
            )
        if self.norm_bias and (self.norm != "layer" or self.post_norm):
            raise ValueError("norm_bias goes with norm='layer' before attention and MLP; wanted it without post_norm")
        if self.latent is not None and (self.head_dim != self.latent.dim or self.qk_norm or self.output_gate):
            raise ValueError(
                "latent attention has keys of its own size and no norm of heads; wanted head_dim=latent.dim"
            )
        if self.fused_tail and self.output_gate:
            raise ValueError("a gated layer with a fused tail; wanted norm='rms_plus_one'")

    @property
    def fused_tail(self) -> bool:
        """True if `Ops.layer_tail` can compute the layer after its attention: norms, MLP and sums are as in Llama."""
        whole = self.attends and self.state is None and self.feeds and not self.head_gate and self.latent is None
        plain = self._plain and self._ends_in_mlp and self.experts is None
        return whole and plain and self.fused_norm and self.fused_gate

    @property
    def mixes(self) -> bool:
        """True if the layer has attention or a recurrent state. False: it has only an MLP."""
        return self.attends or self.state is not None

    @property
    def sandwiched(self) -> bool:
        """True if `Ops.add_norm` can compute the norms and sums before and after attention and MLP."""
        norms = self.post_norm and self.pre_norm and self.norm == "rms_plus_one" and self.gated
        own = self.state is None and not self.head_gate and self.latent is None
        return norms and self._ends_in_mlp and self.residual_scale == 1.0 and own

    @property
    def owns(self) -> bool:
        """True if weights of attention and MLP are the layer's own. False: those of the layer `BlockPlan.lender`."""
        return self.block is None or self.block.lender is None

    @property
    def caches(self) -> bool:
        """True if the layer writes keys and values to the cache."""
        return self.attends and self.shares is None

    @property
    def _ends_in_mlp(self) -> bool:
        """True if nothing in the layer follows the sum with the MLP's result."""
        return self.inputs == 0 and not self.scaled

    @property
    def _plain(self) -> bool:
        return not (self.post_norm or self.parallel) and self.residual_scale == 1.0

    @property
    def _holds_experts(self) -> bool:
        gate = self.activation == ("silu" if self.gated else "relu2")
        return gate and self.pre_norm and not (self.post_norm or self.parallel or self.mlp_bias)

    @property
    def fused_norm(self) -> bool:
        """True if `Ops.linear` computes each norm together with the product after it."""
        return self.norm == "rms" and self.pre_norm

    @property
    def gating(self) -> dict[str, bool]:
        """Options with which `Ops.linear` computes gate and up projections, and their activation, in one call.

        Empty: `Ops.linear` does not compute the activation.
        """
        fused = self.gated and self.factors is None and self.block is None
        return {"gated": True, "gelu": self.activation == "gelu_tanh"} if fused else {}

    @property
    def fused_gate(self) -> bool:
        """True if the MLP has a gate with the activation silu."""
        return self.gated and self.activation == "silu"

    @property
    def rule(self) -> AttentionRule:
        """Window, scale and softcap of attention scores, in the form that `Ops.attend` takes."""
        return AttentionRule(self.window, self.attention_scale, self.softcap)


@dataclass(frozen=True, slots=True)
class ModelScales:
    """Factors on the embedding and on the logits of a model.

        x = embed * Wembed[id]
        y = logits * (norm(x) Whead)                the logits
        y = softcap * tanh(y / softcap) [with softcap]

    Attributes:
        embed: factor on the embedding. The decoder rounds it to the model's dtype, as transformers does.
        logits: factor on the logits.
        softcap: limit of a logit's magnitude, see the formula. None: no softcap.
    """

    embed: float = 1.0
    logits: float = 1.0
    softcap: float | None = None


def _no_scales(fields: ConfigFields) -> ModelScales:
    return ModelScales()


def _hosts_none(config: object) -> bool:
    return False


def _as_named(plans: tuple[LayerPlan, ...], name: str) -> str:
    return name


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One family of models. Says how to read the configs and the stored tensors of the family.

    Attributes:
        architecture: name of transformers' model class. A config must name it, and a live module must be of this class.
        plans: function of (config fields, number of layers) that returns the plan of each layer. It raises
            UnsupportedModel for a setting that changes the arithmetic and that plans cannot express.
        names: name of a row of `layer_table.LAYER` -> stored names of its tensors, if they differ from the row's.
        scales: function of the config fields that returns the factors outside of layers.
        other_names: name of a row -> further stored names. Live modules have them, and checkpoints that are saved from
            live modules without a conversion.
        flat: endings of names. Vectors with such a name are stored with additional axes of size 1.
        renamed: part of a stored name -> its replacement, applied in this order. It is for tensors outside of layers,
            and for names that differ between files and live modules.
        located: function of (plans of all layers, name of a tensor after `renamed`) that returns the name of the same
            tensor in the layer that uses it. It gives copies of a tensor the same name.
        eps: config field with the epsilon of norms.
        inner: config field with the intermediate size of the MLP, or a function of the config fields that returns it.
        act: (config field of the activation, the one value that the plans implement). None: the config has no such
            field.
        rope_kinds: types of rotary scaling with which this family is tested. Empty: it has no rope.
        rope_layers: layer types that have rotary settings of their own, in the order of `ModelSpec.ropes`. Empty: all
            layers have the same settings.
        text_part: True if a checkpoint also contains other parts, such as a vision encoder, which are not loaded. The
            config of its text model is the field `text_config`.
        partial_rope: True if a config may ask for rotation of only the first part of a head.
        transposed_experts: True if a tensor with all experts of a layer may be stored transposed.
        read_as: `model_type` whose config class in transformers reads this family's configs, if the family has no class
            there. Code that its checkpoints name is not run. Empty: the family has a class.
        rotary: name of the submodule of a live module that has the rotary frequencies.
        identities: names of submodules of a layer that are `nn.Identity` in some models.
        mixed_heads: True if layers may have different numbers and sizes of heads (`per_layer_config` of the config).
        hosts: function of a config. It is true if transformers' own module runs the model, because plans cannot express
            it.
        interleaved: True if rope rotates elements 2i and 2i + 1 of a head as a pair. False: it rotates i and i + half.
    """

    architecture: str
    plans: Callable[[ConfigFields, int], tuple[LayerPlan, ...]]
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scales: Callable[[ConfigFields], ModelScales] = _no_scales
    renamed: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flat: tuple[str, ...] = ()
    located: Callable[[tuple[LayerPlan, ...], str], str] = _as_named
    eps: str = "rms_norm_eps"
    inner: str | Callable[[ConfigFields], int] = "intermediate_size"
    act: tuple[str, str] | None = ("hidden_act", "silu")
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    rope_layers: tuple[str, ...] = ()
    read_as: str = ""
    interleaved: bool = False
    partial_rope: bool = False
    rotary: str = "model.rotary_emb"
    identities: tuple[str, ...] = ()
    text_part: bool = False
    transposed_experts: bool = False
    mixed_heads: bool = False
    hosts: Callable[[object], bool] = _hosts_none


def without_windows(fields: ConfigFields, layers: int) -> None:
    """Refuses a config in which a layer has a sliding window, for a family without windows.

    A `sliding_window` alone is ignored, as in transformers.
    """
    types = fields.layer_types(layers)
    if types is not None and "sliding_attention" in types:
        fields.refuse("layer_types", "sliding_attention", "'full_attention' here: there is no sliding_window")


def windows_by_layer_type(fields: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Returns the attention window of each layer, for families whose config names windowed layers in `layer_types`.

    `layers` is the number of layers. None: the layer attends to all keys.
    """
    types = fields.layer_types(layers)
    if fields.get("sliding_window") is None:
        without_windows(fields, layers)
        return (None,) * layers
    window = fields.size("sliding_window")
    if types is None:
        fields.refuse("layer_types", None, f"one entry per layer with sliding_window={window}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def one_window(fields: ConfigFields, layers: int) -> int | None:
    """Returns the attention window of all layers, for families in which `sliding_window` is for every layer.

    `layers` is the number of layers. None: layers attend to all keys.
    """
    types = fields.layer_types(layers)
    if fields.get("sliding_window") is None:
        without_windows(fields, layers)
        return None
    window = fields.size("sliding_window")
    if types is not None and "full_attention" in types:
        fields.refuse("layer_types", "full_attention", f"'sliding_attention' here: sliding_window={window}")
    return window
