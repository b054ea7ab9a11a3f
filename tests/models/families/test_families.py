"""A new family is one file and one line of a table: here Granite once more, with no more than its residual factor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from fastspec import FastSpecGenerator
from fastspec.errors import UnsupportedModel
from fastspec.kernels.ops import TORCH_OPS
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.config import spec_from_config
from fastspec.models.decoder import Decoder
from fastspec.models.families import FAMILIES
from fastspec.models.families.plan import LayerPlan, ModelFamily, without_windows
from fastspec.models.fields import ConfigFields
from fastspec.shapes import UNTILED, ForwardBatch

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_multiplier": 0.25,  # 1 / sqrt(head_dim)
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    for field in ("embedding_multiplier", "logits_scaling"):
        if fields.get(field) != 1.0:
            fields.refuse(field, fields.get(field), "1.0")
    without_windows(fields, layers)
    return (LayerPlan(residual_scale=fields.positive("residual_multiplier")),) * layers


@pytest.fixture(autouse=True)
def granite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "granite", ModelFamily("GraniteForCausalLM", _plans))


def model(scale: float) -> GraniteForCausalLM:
    made = GraniteForCausalLM(GraniteConfig(**SIZES, residual_multiplier=scale)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return made


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_a_new_family_decodes_as_transformers(scale: float, tmp_path: Path) -> None:
    theirs = model(scale)
    theirs.save_pretrained(tmp_path)
    prompt = [5, 6, 7, 8]
    with FastSpecGenerator(tmp_path, max_length=64, dtype="float32", device="cpu", progress=False) as gen:
        text = gen.generate([prompt], max_new_tokens=20, eos_token_id=None)
        assert "granite, " in gen.explain()
        target = gen._open().engine.modules.target
    assert isinstance(target, Decoder)
    assert {plan.fused_tail for plan in target.spec.plans} == {scale == 1.0}
    given = torch.tensor([prompt])
    expected = theirs.generate(given, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(torch.as_tensor(text)[:, -20:], expected[:, 4:])


@torch.inference_mode()
def test_its_logits_are_those_of_transformers() -> None:
    theirs = model(0.5)
    checkpoint = resolve(theirs, role="target")
    device = torch.device("cpu")
    weights = load_weights(checkpoint, dtype=torch.float32, device=device, progress=False)
    cache = PagedKVCache.allocate(3, 3, 16, 2, 16, dtype=torch.float32, device=device)
    ours = Decoder(checkpoint.spec, weights, cache, TORCH_OPS, max_positions=32, batch=1, max_queries=8)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    positions = torch.arange(6)[None]
    rows = ForwardBatch(ids, positions, torch.ones_like(ids, dtype=torch.bool), torch.tensor([[1, 2]]), 1, UNTILED)
    found = ours.logits(ours.hidden(rows), UNTILED)
    # fp32 sums in another order: a few units in the last place of logits around 10
    torch.testing.assert_close(found, theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_it_refuses_what_its_plan_has_no_place_for() -> None:
    config = GraniteConfig(**{**SIZES, "logits_scaling": 2.0})
    with pytest.raises(
        UnsupportedModel, match=r"logits_scaling=2.0 is not supported, wanted 1.0; supported: .*llama, "
    ):
        spec_from_config(config)


def test_a_family_that_is_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, "granite")
    with pytest.raises(UnsupportedModel, match=r"model_type='granite' is not supported, wanted one of .*llama, "):
        spec_from_config(GraniteConfig(**SIZES))
