"""Which experts rows have: the torch definition against transformers, and the kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Glm4MoeConfig, GptOssConfig, Qwen3MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from fastspec.kernels import reference
from fastspec.shapes import RoutingRule
from tests.helpers.devices import devices

RULES = {
    "qwen": RoutingRule(3),
    "qwen normed": RoutingRule(8, normed=True),
    "glm": RoutingRule(3, "sigmoid", True, 2.5),
    "glm groups": RoutingRule(4, "sigmoid", True, 1.5, 6, 2),
    "lfm2": RoutingRule(3, "sigmoid", True, 1.5, eps=0.5),
    "gpt-oss": RoutingRule(4, "logits"),
    "qwen shared": RoutingRule(8, normed=True, shared="gated"),
    "glm shared": RoutingRule(3, "sigmoid", True, 2.5, shared="whole"),
    "shared in parts": RoutingRule(3, "sigmoid", True, 2.5, shared="whole", shared_parts=2),
    "gated in parts": RoutingRule(4, shared="gated", shared_parts=2),
}
EXPERTS, HIDDEN = 24, 16


def logits_and_correction(rows: int, device: str, experts: int = EXPERTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = 2 * torch.randn(rows, experts, generator=generator)
    return logits.to(device), (0.3 * torch.randn(experts, generator=generator)).to(device)


def test_the_definition_is_what_transformers_computes() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, HIDDEN, generator=generator)
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": 4}
    groups = {"n_routed_experts": EXPERTS, "n_group": 6, "topk_group": 2, "routed_scaling_factor": 1.5}
    glm = Glm4MoeTopkRouter(Glm4MoeConfig(**sizes, **groups))
    qwen = Qwen3MoeTopKRouter(Qwen3MoeConfig(**sizes, num_experts=EXPERTS, norm_topk_prob=True))
    oss = GptOssTopKRouter(GptOssConfig(**sizes, num_local_experts=EXPERTS))
    rules = RULES["glm groups"], RoutingRule(4, normed=True), RULES["gpt-oss"]
    for router, rule in zip((glm, qwen, oss), rules, strict=True):
        with torch.no_grad():
            for tensor in (*router.parameters(), *router.buffers()):
                tensor.normal_(0, 0.5, generator=generator)
            logits, theirs, chosen = router(x)
        ids, factors = reference.route(logits, rule, getattr(router, "e_score_correction_bias", None))
        table = torch.zeros_like(logits)  # transformers leaves the order of some of its choices open
        found, expected = table.scatter(1, ids.long(), factors), table.scatter(1, chosen, theirs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_equal_scores_go_to_the_lowest_ids_and_choices_are_in_order() -> None:
    ids, factors = reference.route(torch.zeros(2, EXPERTS), RoutingRule(3))
    assert ids.tolist() == [[0, 1, 2]] * 2
    logits, _ = logits_and_correction(5, "cpu")
    ids, factors = reference.route(logits, RULES["gpt-oss"])
    assert torch.equal(factors, factors.sort(descending=True).values)
    torch.testing.assert_close(factors.sum(-1), torch.ones(5))
    assert ids.dtype == torch.int32


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_equals_its_definition(name: str, device: str) -> None:
    pytest.importorskip("triton", reason="Triton ships for Linux only")
    from fastspec.kernels.experts.route import route

    rule = RULES[name]
    logits, correction = logits_and_correction(7, device, EXPERTS + rule.gates)
    correction = correction[:EXPERTS].contiguous()
    logits[3] = 0.0  # all are equal
    logits[3, 1::2] = -0.0
    given = correction if rule.scores == "sigmoid" else None
    ids, factors = route(logits, rule, given)
    expected, wanted = reference.route(logits, rule, given)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(factors, wanted, rtol=2e-6, atol=1e-7)  # sums of 24 numbers in another order
    for row in range(7):  # to the bit, alone
        one = route(logits[row : row + 1], rule, given)
        assert torch.equal(one[0][0], ids[row])
        assert torch.equal(one[1][0], factors[row])


@pytest.mark.parametrize("device", devices())
def test_rows_that_are_no_numbers_name_experts_that_are_there(device: str) -> None:
    pytest.importorskip("triton", reason="Triton ships for Linux only")
    from fastspec.kernels.experts.route import route

    nan = torch.full((2, EXPERTS), float("nan"), device=device)
    nan[1] = nan[1].copysign(torch.tensor(-1.0))  # which is below all numbers in some orders
    for name in ("qwen", "gpt-oss"):
        ids, _ = route(nan, RULES[name])
        assert bool(((ids >= 0) & (ids < EXPERTS)).all())
        assert all(len(set(row)) == RULES[name].chosen for row in ids.tolist())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_the_norm_beside_it(weight_dtype: torch.dtype, device: str) -> None:
    """The choice is the same, and a row's norm does not depend on others."""
    pytest.importorskip("triton", reason="Triton ships for Linux only")
    from fastspec.kernels.experts.route import route, route_normed

    rule = RULES["qwen normed"]
    logits, _ = logits_and_correction(6, device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 300, generator=generator).to(device, torch.bfloat16)
    weight = (1 + 0.3 * torch.randn(300, generator=generator)).to(device, weight_dtype)
    ids, factors, normed = route_normed(logits, rule, None, x, weight, 1e-5)
    for found, expected in zip((ids, factors), route(logits, rule), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)  # more threads: sums in another order
    expected = reference.norm(x, weight, 1e-5)
    eps = 2 * torch.finfo(torch.bfloat16).eps  # a rounding or two
    torch.testing.assert_close(normed, expected, rtol=eps, atol=eps)
    alone = route_normed(logits[4:5], rule, None, x[1:, 1:2], weight, 1e-5)
    for found, whole in zip(alone, (ids[4:5], factors[4:5], normed[1:, 1:2]), strict=True):
        assert torch.equal(found, whole)
    with pytest.raises(ValueError, match="for 6 rows of logits"):
        route_normed(logits, rule, None, x[:1], weight, 1e-5)


def test_what_does_not_fit_is_refused() -> None:
    pytest.importorskip("triton", reason="Triton ships for Linux only")
    from fastspec.kernels.experts.route import route

    with pytest.raises(ValueError, match="2 experts; wanted 3"):
        route(torch.zeros(1, 2), RULES["qwen"])
    with pytest.raises(ValueError, match="logits is bfloat16"):
        route(torch.zeros(1, EXPERTS, dtype=torch.bfloat16), RULES["qwen"])
