"""Which tensors a checkpoint of a spec must hold, by name and shape; checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.names import EMBED, HEAD
from fastspec.models.checkpoints.shards import TensorInfo

if TYPE_CHECKING:
    from fastspec.models.config import ModelSpec
    from fastspec.models.families.plan import ExpertsPlan, LayerNames, LayerPlan
    from fastspec.shapes import DeltaRule

NORM: Final = "model.norm.weight"
NORM_BIAS: Final = "model.norm.bias"
GATE_UP: Final = ("gate_proj", "up_proj")  # of one expert
DOWN: Final = "down_proj"
CORRECTION: Final = "e_score_correction_bias"  # of a router's scores


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this spec must hold, head included unless tied."""
    hidden, norm_bias = spec.hidden_size, spec.plans[0].norm_bias
    shapes: dict[str, tuple[int, ...]] = {EMBED: (spec.vocab_size, hidden), NORM: (hidden,)}
    if norm_bias:
        shapes[NORM_BIAS] = (hidden,)
    if not spec.tied:
        shapes[HEAD] = (spec.vocab_size, hidden)
    of_plan = {plan: _layer_shapes(spec, plan) for plan in dict.fromkeys(spec.plans)}
    for layer, plan in enumerate(spec.plans):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_plan[plan].items()}
    return shapes


def _layer_shapes(spec: ModelSpec, plan: LayerPlan) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors of a layer of this plan, below its prefix."""
    names, hidden = spec.names, spec.hidden_size
    shapes = _attention_shapes(spec, plan) if plan.delta is None else _delta_shapes(spec, plan.delta)
    if plan.experts is None:
        _add(shapes, names.gate_up, [spec.intermediate_size] * (2 if plan.gated else 1), hidden, plan.mlp_bias)
        _add(shapes, (names.down,), [hidden], spec.intermediate_size, plan.mlp_bias)
    else:
        shapes |= _expert_shapes(names, plan.experts, hidden)
    if plan.sinks:
        shapes[names.sinks] = (spec.num_heads,)
    for norm in layer_norms(spec).values():
        shapes[f"{norm}.weight"] = (hidden,)
        if plan.norm_bias:
            shapes[f"{norm}.bias"] = (hidden,)
    return shapes


def _add(shapes: dict[str, tuple[int, ...]], parts: tuple[str, ...], rows: list[int], columns: int, bias: bool) -> None:
    """Adds matrices with these rows, each or all in one, and their biases."""
    for part, each in zip(parts, rows if len(parts) == len(rows) else [sum(rows)], strict=True):
        shapes[f"{part}.weight"] = (each, columns)
        if bias:
            shapes[f"{part}.bias"] = (each,)


def _delta_shapes(spec: ModelSpec, rule: DeltaRule) -> dict[str, tuple[int, ...]]:
    """What a recurrent layer has in place of attention."""
    names, hidden, shapes = spec.names, spec.hidden_size, dict[str, tuple[int, ...]]()
    rows = [rule.channels, rule.values, rule.value_heads, rule.value_heads]
    if len(names.delta) == 2:
        rows = [rule.channels + rule.values, 2 * rule.value_heads]
    _add(shapes, names.delta, rows, hidden, False)
    _add(shapes, (names.delta_out,), [hidden], rule.values, False)
    shapes[f"{names.delta_conv}.weight"] = (rule.channels, 1, rule.width)
    shapes[names.delta_decay] = shapes[names.delta_step] = (rule.value_heads,)
    shapes[f"{names.delta_norm}.weight"] = (rule.value_dim,)
    return shapes


def _attention_shapes(spec: ModelSpec, plan: LayerPlan) -> dict[str, tuple[int, ...]]:
    """Projections of attention, and the norms of heads."""
    names, hidden, dim = spec.names, spec.hidden_size, spec.head_dim
    q_rows, kv_rows = spec.num_heads * dim, spec.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {}
    _add(shapes, names.qkv, [(1 + plan.output_gate) * q_rows, kv_rows, kv_rows], hidden, plan.qkv_bias)
    _add(shapes, (names.o,), [hidden], q_rows, plan.o_bias)
    if plan.qk_norm is not None:
        whole = plan.qk_norm == "projection"
        shapes[f"{names.q_norm}.weight"] = (q_rows if whole else dim,)
        shapes[f"{names.k_norm}.weight"] = (kv_rows if whole else dim,)
    return shapes


def _expert_shapes(names: LayerNames, plan: ExpertsPlan, hidden: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors of a mixture of experts."""
    shapes: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (plan.count, hidden)}
    if plan.router_bias:
        shapes[f"{names.router}.bias"] = (plan.count,)
    if plan.correction:
        shapes[f"{names.router}.{CORRECTION}"] = (plan.count,)
    for expert in range(plan.count):
        for part in (*GATE_UP, DOWN):
            rows, columns = (hidden, plan.width) if part == DOWN else (plan.width, hidden)
            shapes[f"{names.experts}.{expert}.{part}.weight"] = (rows, columns)
            if plan.bias:
                shapes[f"{names.experts}.{expert}.{part}.bias"] = (rows,)
    if plan.shared:
        shapes |= {f"{part}.weight": (plan.shared, hidden) for part in names.shared_gate_up}
        shapes[f"{names.shared_down}.weight"] = (hidden, plan.shared)
    if plan.shared_gate:
        shapes[f"{names.shared_gate}.weight"] = (1, hidden)
    return shapes


def layer_norms(spec: ModelSpec) -> dict[str, str]:
    """Names of the norms of the residual stream, and of what is added to it, by the field of `LayerWeights`."""
    plan, names = spec.plans[0], spec.names
    norms = {"input_norm": names.input_norm, "post_norm": names.post_norm} if plan.pre_norm else {}
    if plan.parallel:
        del norms["post_norm"]
    if plan.post_norm:
        norms |= {"attended_norm": names.attended_norm, "mlp_norm": names.mlp_norm}
    return norms


def check_tensors(infos: Mapping[str, TensorInfo], spec: ModelSpec, name: str) -> None:
    """Compares what a checkpoint holds with what its config promises, before anything is allocated.

    Args:
        infos: the stored tensors. spec: of the same checkpoint. name: the checkpoint, for messages.

    Raises:
        CheckpointError: names are missing, or a shape is not the config's.
        UnsupportedModel: a tensor is stored in a dtype other than bfloat16, float16 or float32.
    """
    wanted = tensor_shapes(spec)
    missing = [tensor for tensor in wanted if tensor not in infos]
    if missing:
        raise CheckpointError(
            f"{name}: {listing(missing)} missing; the config of this {spec.family} model needs them{_advice(missing)}"
        )
    if spec.tied and HEAD in infos:
        wanted[HEAD] = wanted[EMBED]
    for tensor, shape in wanted.items():
        info = infos[tensor]
        if info.shape != shape:
            raise CheckpointError(
                f"{name}: {tensor} in {info.where} has shape {list(info.shape)}, wanted {list(shape)} from the "
                f"config (vocab_size={spec.vocab_size}, hidden_size={spec.hidden_size}, "
                f"intermediate_size={spec.intermediate_size}, num_attention_heads={spec.num_heads}, "
                f"num_key_value_heads={spec.num_kv_heads}, head_dim={spec.head_dim})"
            )
        if isinstance(info.dtype, str):
            raise UnsupportedModel(
                f"{name}: {tensor} in {info.where} is stored as {info.dtype}, wanted BF16, F16 or F32: load an "
                "unquantised checkpoint"
            )


def _advice(missing: list[str]) -> str:
    if missing == [HEAD]:
        return (
            "; tie_word_embeddings is false in the config, or absent, which transformers reads as false: it would fill "
            "the head with random numbers. If the head is the embedding, set tie_word_embeddings to true in config.json"
        )
    return ""


def check_no_others(infos: Mapping[str, TensorInfo], spec: ModelSpec, name: str) -> None:
    """Refuses parameters of a live model that its config has no place for: its layers compute with them.

    Raises:
        CheckpointError: names them.
    """
    wanted = {*tensor_shapes(spec), HEAD}
    extra = [tensor for tensor in infos if tensor not in wanted]
    if extra:
        raise CheckpointError(
            f"{name}: {listing(extra)} unexpected; the config of this {spec.family} model with {spec.num_layers} "
            "layers has no place for them"
        )


def listing(names: list[str]) -> str:
    """The number of names and the first three of them, for messages."""
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensor(s) ({shown}{more})"
