"""Families with Mamba, short convolutions or Kimi delta attention.

Logits are transformers', no part can be left out, bad configs are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec.distributed.slices import check_divides
from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.kernels.common.experts import ExpertWeights
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.config import ModelSpec, spec_from_config
from fastspec.models.families.plan import LatentPlan, LayerPlan, ModelScales
from fastspec.models.layer_table import BlockWeights, LatentWeights, LayerWeights, StateWeights
from fastspec.shapes import ConvRule, DeltaRule, MambaRule, RoutingRule, SelectiveRule
from tests.helpers.hybrid import STATES, VOCAB, config_of, decoder, logits_of, make_states
from tests.helpers.parts import Case, Changed, case_of, none_is_idle, turned, with_layer

TOKENS = 40
CPU = torch.device("cpu")
COUNTS = {"falcon_h1": (2, 2), "lfm3": (2, 2), "zamba2": (3, 2)}  # of layers with a state, and with attention


@pytest.fixture(scope="module", params=STATES)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(make_states(request.param), VOCAB, TOKENS)


def test_a_live_model_gives_the_logits_of_transformers(case: Case) -> None:
    found = logits_of(decoder(case.spec, case.weights), case.ids)
    # fp32 sums in another order, and chunks of tokens there: some units in the last place of logits around 10
    torch.testing.assert_close(found, case.logits, rtol=3e-4, atol=3e-4)
    assert case.weights.nbytes() == case.spec.weight_bytes(torch.float32)
    assert (len(case.spec.state_rules), len(case.spec.attending)) == COUNTS.get(case.spec.family, (2, 1))


def with_plans(spec: ModelSpec, **changed: Any) -> ModelSpec:
    """The spec with fields of all plans changed where a plan has them set."""
    plans = []
    for plan in spec.plans:
        own = {name: value for name, value in changed.items() if getattr(plan, name) is not None}
        plans.append(replace(plan, **own))
    return replace(spec, plans=tuple(plans))


def changes(case: Case) -> Iterator[Changed]:
    """Every part of the model once left out, or turned around."""
    spec, weights = case.spec, case.weights
    for at in [spec.plans.index(plan) for plan in dict.fromkeys(spec.plans)]:
        layer = weights.layers[at]
        parts = {"": LayerWeights, "state": StateWeights, "latent": LatentWeights, "experts": ExpertWeights}
        parts["block"] = BlockWeights
        for part, kind in parts.items():
            held = getattr(layer, part) if part else layer
            if part == "state" and not spec.plans[at].owns:
                continue  # as in the layer whose block it shares
            for field in dataclasses.fields(kind) if held is not None else ():
                value = getattr(held, field.name)
                if value is None or field.name in (*parts, "joined"):
                    continue
                value = turned(value) if part != "experts" else replace_columns(value)
                other = value if not part else replace(held, **{field.name: value})
                yield f"{part} {field.name} {at}", spec, with_layer(weights, at, **{part or field.name: other})
    for field in dataclasses.fields(ModelScales):
        if getattr(spec.scales, field.name) != field.default:
            yield (
                f"scale {field.name}",
                replace(spec, scales=replace(spec.scales, **{field.name: field.default})),
                weights,
            )
    for name in ("rope", "qk_norm", "attention_scale", "window"):
        if any(getattr(plan, name) is not None for plan in spec.plans):
            yield name, with_plans(spec, **{name: None}), weights
    if spec.plans[0].residual_scale != 1.0:
        yield "residual_scale", with_plans(spec, residual_scale=1.0), weights
    yield from (("plan " + name, with_rules(spec, plan), weights) for name, plan in rule_changes(spec))


def replace_columns(value: Any) -> Any:
    """The last axis turned round, which the order of experts has no part in."""
    return value.flip(-1) if isinstance(value, torch.Tensor) else replace(value, data=value.data.flip(-1))


def with_rules(spec: ModelSpec, changed: dict[str, Any]) -> ModelSpec:
    """The spec with fields of the plans that have all of these set."""
    plans = (
        replace(plan, **changed) if all(getattr(plan, name) is not None for name in changed) else plan
        for plan in spec.plans
    )
    return replace(spec, plans=tuple(plans))


def rule_changes(spec: ModelSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the states, the factors and the routers compute, each part once without what the family has there."""
    rule = spec.state_rules[0]
    if isinstance(rule, MambaRule):
        if rule.norm is not None:
            yield "norm", {"state": rule._replace(norm="gate_first" if rule.norm == "norm_first" else "norm_first")}
        yield "steps", {"state": rule._replace(least_step=0.5)}
    elif isinstance(rule, SelectiveRule):
        return
    elif isinstance(rule, DeltaRule):
        yield "gate", {"state": rule._replace(gate="silu")}
        yield "floor", {"state": rule._replace(floor=0.0 if rule.floor else -5.0)}
    else:
        assert isinstance(rule, ConvRule)
    factors = spec.plans[0].factors
    for field in dataclasses.fields(factors) if factors is not None else ():
        value = getattr(factors, field.name)
        for at, each in enumerate(value if isinstance(value, tuple) else (value,)):
            if each != 1.0:
                one = (*value[:at], 1.0, *value[at + 1 :]) if isinstance(value, tuple) else 1.0
                yield f"{field.name} {at}", {"factors": replace(factors, **{field.name: one})}
    experts = next((plan.experts for plan in spec.plans if plan.experts is not None), None)
    if experts is None:
        return
    routing, plain = experts.routing, RoutingRule(experts.routing.chosen)
    for name in ("scores", "scale", "groups"):
        if getattr(routing, name) != getattr(plain, name):
            other = replace(experts, routing=routing._replace(**{name: getattr(plain, name)}))
            yield f"routing {name}", {"experts": other}
    if routing.normed:
        yield "normed", {"experts": replace(experts, routing=routing._replace(normed=False))}


def test_no_part_can_be_left_out(case: Case) -> None:
    others = ((name, decoder(spec, weights)) for name, spec, weights in changes(case))
    names = none_is_idle(decoder(case.spec, case.weights), case, others)
    assert len(names) == len(set(names)) >= 15


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("lfm2", {"layer_types": ["conv", "linear_attention", "conv"]}, "layer_types='linear_attention'"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1"),
        ("granite4", {"mamba_n_groups": 3}, "mamba_n_groups=3 .* a divisor of mamba_n_heads=8"),
        ("granite4", {"time_step_limit": (2.0, 1.0)}, "time_step_limit"),
        ("granite4", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi' .* 'rope', 'nope' or null"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("falcon_h1", {"attention_bias": True}, "attention_bias=True .* products with factors have no bias"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 1.0]}, "ssm_multipliers=.* 5 positive numbers"),
        ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size=0"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias=True"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias=True .* False"),
        ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias=True .* False"),
        ("nemotron_h", {"residual_in_fp32": True}, "residual_in_fp32=True .* False"),
        ("nemotron_h", {"sliding_window": 8}, "sliding_window=8 .* null"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts=2 .* 1"),
        ("nemotron_h", {"time_step_limit": (0.0, 0.1)}, r"time_step_limit=\(0.0, 0.1\) .* no upper limit"),
        ("zamba2", {"use_conv_bias": False}, "use_conv_bias=False .* True"),
        ("zamba2", {"layers_block_type": ["hybrid", "conv", "hybrid"]}, "layer_types='conv'"),
        ("zamba2", {"add_bias_linear": True}, "add_bias_linear=True"),
        ("zamba2", {"use_long_context": True}, "use_long_context=True"),
        ("zamba2", {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 .* 1e-05, the constant"),
        ("zamba2", {"num_key_value_heads": 2}, "num_key_value_heads=2 .* num_attention_heads=4, with use_shared"),
        ("zamba2", {"mamba_ngroups": 3}, "mamba_ngroups=3 .* a divisor of n_mamba_heads=8"),
        ("jamba", {"mamba_d_conv": 1}, "mamba_d_conv=1"),
        ("jamba", {"num_experts_per_tok": 7}, "num_experts_per_tok=7"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False .* True"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("kimi_linear", {"attention_bias": True}, "attention_bias=True"),
        ("kimi_linear", {"num_key_value_heads": 2}, "num_key_value_heads=2 .* num_attention_heads=4"),
        ("kimi_linear", {"v_head_dim": 21}, "v_head_dim=21 .* at most .* 20"),
        ("kimi_linear", {"qk_nope_head_dim": 13}, "qk_nope_head_dim=13 .* even"),
        ("ling", {"kda_lower_bound": 1.0}, "kda_lower_bound=1.0 .* a negative number"),
        ("ling", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='yarn'"),
    ],
)
def test_what_a_family_needs_beyond_its_plan_is_refused(kind: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        spec_from_config(config_of(kind, **fields))


def test_configs_of_publishers_say_the_same_in_other_words(tmp_path: Path) -> None:
    """Nemotron's pattern, lists of layers of LFM2 and Kimi-Linear, and Granite's older names of them."""
    kda = {"full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4}
    for kind, dropped, given in (
        (
            "nemotron_h",
            ("layers_block_type", "layer_types"),
            {"hybrid_override_pattern": "ME*-ME", "time_step_limit": [0.0, 1e30]},
        ),
        ("lfm2", ("layer_types",), {"full_attn_idxs": [1]}),
        (
            "kimi_linear",
            ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
            {"linear_attn_config": kda, "moe_router_activation_func": "sigmoid", "mla_use_nope": True},
        ),
        ("granite4", ("layer_types",), {"layer_types": ["mamba", "attention", "mamba"]}),
    ):
        wanted = make_states(kind)
        wanted.save_pretrained(tmp_path / kind)
        path = tmp_path / kind / "config.json"
        fields = {name: value for name, value in json.loads(path.read_text()).items() if name not in dropped}
        path.write_text(json.dumps({**fields, **given}))
        assert resolve(tmp_path / kind, role="target").native.plans == spec_from_config(wanted.config).plans


def test_the_mlp_of_lfm2_is_as_wide_as_its_config_adjusts_it() -> None:
    sizes = {"intermediate_size": 100, "block_multiple_of": 24, "block_ffn_dim_multiplier": 1.5}
    live = make_states("lfm2", **sizes)
    assert (
        spec_from_config(live.config).intermediate_size
        == 120
        == live.get_submodule("model.layers.0.feed_forward.w1").out_features
    )
    plain = config_of("lfm2", **sizes, block_auto_adjust_ff_dim=False)
    assert spec_from_config(plain).intermediate_size == 100


def test_blocks_of_zamba2_are_shared_in_turn_and_copies_must_be_equal(tmp_path: Path) -> None:
    """As transformers saves them: a block in its first layer, with the adapters of all layers that share it."""
    blocks = {"layers_block_type": ["hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"], "num_mem_blocks": 2}
    plain = {"use_shared_attention_adapter": False, "use_mem_rope": False, "num_key_value_heads": 2}
    case = case_of(make_states("zamba2", 0, 0.1, num_hidden_layers=5, **blocks, **plain), VOCAB, TOKENS)
    found = logits_of(decoder(case.spec, case.weights), case.ids)
    torch.testing.assert_close(found, case.logits, rtol=3e-4, atol=3e-4)  # sums in another order, see above
    assert [plan.block and plan.block.lender for plan in case.spec.plans] == [None, None, None, 0, 1]
    case.model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    mlp, adapter = "shared_transformer.feed_forward.down_proj", "shared_transformer.feed_forward.gate_up_proj_adapter"
    assert f"model.layers.1.{adapter}_list.3.0.weight" in stored
    name = f"model.layers.{{}}.{mlp}.weight"
    assert name.format(3) not in stored
    weights = load_weights(resolve(tmp_path, role="target"), dtype=torch.float32, device=CPU, progress=False)
    assert torch.equal(logits_of(decoder(case.spec, weights), case.ids), found)
    copies = {**stored, name.format(3): stored[name.format(0)].clone(), name.format(4): stored[name.format(0)].clone()}
    save_file(copies, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\..* and '.*layers\.4\..* one weight .* values differ"):
        resolve(tmp_path, role="target")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("falcon_h1", "layers with attention and a state 1"),
        ("nemotron_h", "layers without an MLP, or with nothing else 1"),
        ("granite4_moe", "groups of recurrent heads 1"),
        ("jamba", "layers with Mamba-1 1"),
    ],
)
def test_layers_that_ranks_cannot_split_are_refused(kind: str, words: str) -> None:
    with pytest.raises(UnsupportedOption, match=words):
        check_divides(spec_from_config(config_of(kind)), 2, "m")


@pytest.mark.parametrize(
    "fields",
    [
        *({"attends": False, "feeds": False}, {"state": ConvRule(8, 3)}, {"activation": "relu2"}),
        {"latent": LatentPlan(rank=8, q_rank=0, plain=8, shared=8, value=8), "head_dim": 8},
    ],
)
def test_a_plan_that_no_decoder_computes_is_no_plan(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        LayerPlan(**fields)
