"""Plans of families with experts: which layers have them, what a config says of them, and what a plan may not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fastspec.distributed.slices import share_of
from fastspec.engine.explain import shared_expert
from fastspec.errors import UnsupportedModel
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.rank_slices import local_spec
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.config import ModelSpec, spec_from_config
from fastspec.models.families.plan import ExpertsPlan, LayerPlan
from fastspec.models.layer_table import DecoderWeights
from fastspec.shapes import ClampedGate, RoutingRule, Tiling
from tests.helpers import hybrid
from tests.helpers.families import FAMILIES, VOCAB, config_of, decoder, logits_of, make_family


def experts_of(family: str, **changes: Any) -> list[ExpertsPlan | None]:
    return [plan.experts for plan in spec_from_config(config_of(family, **changes)).plans]


def test_which_layers_have_experts() -> None:
    changes = {"num_hidden_layers": 5, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    assert [bool(each) for each in experts_of("qwen3_moe", **changes)] == [False, True, False, False, False]
    assert [bool(each) for each in experts_of("glm4_moe", first_k_dense_replace=2)] == [False, False, True]
    assert all(experts_of("glm4_moe", first_k_dense_replace=0))


def test_what_configs_say_of_them() -> None:
    (qwen,) = set(experts_of("qwen3_moe", mlp_only_layers=None))
    assert qwen == ExpertsPlan(8, 48, RoutingRule(3, normed=True))
    glm = experts_of("glm4_moe", n_shared_experts=2)[1]
    assert glm == ExpertsPlan(8, 48, RoutingRule(3, "sigmoid", True, 1.5, 4, 2), correction=True, shared=96)
    oss = experts_of("gpt_oss")[0]
    routing, clamp = RoutingRule(3, "logits"), ClampedGate(1.702, 1.0)
    assert oss == ExpertsPlan(8, 96, routing, activation=clamp, router_bias=True, bias=True)
    assert [plan.window for plan in spec_from_config(config_of("gpt_oss")).plans] == [8, None]


@pytest.mark.parametrize("fields", [{"post_norm": True}, {"parallel": True}, {"feeds": False}, {"mlp_bias": True}])
def test_a_mixture_that_no_decoder_computes_is_no_plan(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="experts go with"):
        LayerPlan(experts=ExpertsPlan(4, 8, RoutingRule(2)), **fields)


def test_each_of_several_ranks_has_columns_of_every_expert() -> None:
    spec = spec_from_config(config_of("qwen2_moe"))
    (own,) = {plan.experts for plan in local_spec(spec, share_of(spec, 1, 2, one_tree=True)).plans}
    assert own is not None
    assert (own.count, own.width, own.shared) == (8, 24, 40)


def test_more_experts_than_any_model_has_are_refused_before_anything_is_made_of_them() -> None:
    with pytest.raises(UnsupportedModel, match="num_experts=100000 is not supported, wanted a whole number from 1"):
        spec_from_config(config_of("olmoe", num_experts=100000))


def test_a_token_does_not_feel_which_experts_its_neighbours_have() -> None:
    """To the bit: among other tokens, in another place, and after a prompt that went through other experts."""
    checkpoint = resolve(make_family("glm4_moe"), role="target")
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    tiling = Tiling(rows=8, queries=8)
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(VOCAB, (1, 20), generator=generator)
    first = None
    for _ in range(4):
        model = decoder(checkpoint.native, weights)
        logits_of(model, prompt, 0, tiling)
        others = torch.randint(VOCAB, (1, 4), generator=generator)
        found = logits_of(model, torch.cat((prompt[:, :1], others), dim=1), 20, tiling)[:, 0]
        first = found if first is None else first
        assert torch.equal(found, first)


JOINING = TORCH_OPS.replaced(joins_shared=lambda dtype, hidden, device: True)


def joined_and_apart(model: PreTrainedModel) -> tuple[ModelSpec, DecoderWeights, DecoderWeights]:
    """A model's spec and its weights, with the shared expert among the others and beside them."""
    checkpoint = resolve(model, role="target")
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "progress": False}
    return (
        checkpoint.native,
        load_weights(checkpoint, ops=JOINING, **options),
        load_weights(checkpoint, **options),
    )


# family: width of the shared expert, in parts as wide as the others
SHARED = {
    "glm4_moe": {"n_shared_experts": 2},
    "qwen2_moe": {"shared_expert_intermediate_size": 48},
    "qwen3_5_moe": {"shared_expert_intermediate_size": 64},
    "next": {"shared_expert_intermediate_size": 32},
    "nemotron_h": {"moe_shared_expert_intermediate_size": 64},
    "granite4_moe": {"shared_intermediate_size": 64},
}


def model_of(family: str) -> PreTrainedModel:
    """A tiny model of a family of SHARED."""
    recurrent = hybrid.make_hybrid if family in hybrid.KINDS else hybrid.make_states
    return (make_family if family in FAMILIES else recurrent)(family, **SHARED[family])


@pytest.mark.parametrize("family", SHARED)
def test_a_shared_expert_may_be_the_last_of_all(family: str) -> None:
    """The same logits, from the same bytes; the correction, groups and scale of the router do not reach it."""
    model = model_of(family)
    spec, joined, apart = joined_and_apart(model)
    mixtures = [layer for layer in joined.layers if layer.experts is not None]
    assert all(layer.experts.joined and layer.gate_up is None for layer in mixtures if layer.experts)
    assert not any(layer.experts.joined for layer in apart.layers if layer.experts)
    assert joined.nbytes() == apart.nbytes() == spec.weight_bytes(torch.float32)
    ids = torch.randint(VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))
    made, found = (decoder, logits_of) if family in FAMILIES else (hybrid.decoder, hybrid.logits_of)
    tiling = Tiling(rows=8, queries=8)
    expected, given = found(made(spec, apart), ids, 0, tiling), found(made(spec, joined), ids, 0, tiling)
    torch.testing.assert_close(given, expected, rtol=2e-4, atol=2e-4)  # sums in another order, logits around 10
    for layer in mixtures:  # neither the shared expert nor its gate is idle
        assert layer.experts is not None
        layer.experts.down.data[-1] *= 1.5
    assert not torch.allclose(found(made(spec, joined), ids, 0, tiling), expected, rtol=1e-2, atol=1e-2)


def test_a_shared_expert_of_another_width_stays_beside_the_others() -> None:
    for model in (make_family("qwen2_moe"), make_family("glm4_moe", n_shared_experts=3)):
        _, joined, _ = joined_and_apart(model)
        assert not any(layer.experts.joined for layer in joined.layers if layer.experts)
        assert all(layer.gate_up is not None for layer in joined.layers)


def test_what_is_told_of_a_shared_expert() -> None:
    def told(family: str, which: int, ops: str = "triton", dtype: torch.dtype = torch.float32, **changes: Any) -> str:
        spec, *weights = joined_and_apart(make_family(family, **changes))
        modules = SimpleNamespace(target=decoder(spec, weights[which]), ops=SimpleNamespace(name=ops))
        settings: Any = SimpleNamespace(ranks=0, layout=SimpleNamespace(target_dtype=dtype))
        engine: Any = SimpleNamespace(modules=modules)
        return shared_expert(settings, engine)

    assert told("glm4_moe", 0).endswith("the shared expert runs in the same launches as the routed experts")
    assert told("glm4_moe", 1).endswith("in fp32")
    assert told("glm4_moe", 1, "torch").endswith("computed by torch")
    assert told("qwen2_moe", 1, dtype=torch.bfloat16).endswith("80 wide, the others 48")
    assert told("qwen3_moe", 0) == ""
