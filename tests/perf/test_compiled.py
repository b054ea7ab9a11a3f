"""The compiled peer: same text as transformers' own decoding, and the target's law when it samples."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from perf import compiled
from perf.compiled import judged_by_law
from perf.pairs import plant
from perf.peers import Setting, transformers_peers
from perf.workloads import WORKLOADS

NEW = 24


@pytest.mark.parametrize("batch", [1, 2])
def test_text_is_that_of_transformers(batch: int) -> None:
    pair = plant(WORKLOADS["tiny"])
    prompts = pair.prompts(2 * batch, 16)
    setting = Setting([prompts[:batch], prompts[batch:]], NEW, k=3)
    _, calls = transformers_peers(pair.target, None, setting, engines=("plain",))
    wanted = [call.text for call in calls["transformers plain"]]
    for k in (0, 3) if batch == 1 else (0,):
        with torch.inference_mode():
            engine = compiled.CompiledEngine(pair.target, pair.draft, setting, k)
            found = [engine.call(each) for each in setting.batches]
        assert [call.text for call in found] == wanted
        if k:
            assert 1.5 < sum(call.tokens for call in found) / sum(call.row_steps or 0 for call in found) <= 4
            assert all(0 < (call.accepted or 0) <= (call.drafted or 0) for call in found)


def small(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    fields = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING[kind](**fields, num_key_value_heads=2, vocab_size=128, tie_word_embeddings=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_has_the_same_logits(kind: str) -> None:
    model = small(kind)
    ids = torch.randint(0, 128, (2, 9))
    with torch.inference_mode():
        wanted = model(ids).logits
        decoder = compiled.StaticDecoder(model, 2, 12)
        first = decoder.logits(ids[:, :5], torch.arange(5), prompt=True)
        rest = decoder.logits(ids[:, 5:], torch.arange(5, 9))
    assert torch.allclose(first[:, 0], wanted[:, 4], atol=1e-3)
    assert torch.allclose(rest, wanted[:, 5:], atol=1e-3)


def test_sampled_drafts_leave_the_targets_law() -> None:
    torch.manual_seed(2)
    p, q = torch.rand(3, 6).pow(3), torch.rand(2, 6).pow(3)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    firsts = torch.zeros(6)
    count = 8000
    for _ in range(count):
        drafts = torch.cat([torch.multinomial(row, 1) for row in q])
        taken, token = judged_by_law(p, q, drafts)
        firsts[drafts[0] if taken else token[0]] += 1
    # each share has a standard error of at most sqrt(1/4 / 8000) = 0.0056
    assert torch.allclose(firsts / count, p[0], atol=0.025)


def test_sampled_decoding_runs_with_vocabularies_of_two_sizes() -> None:
    target, draft = small("llama"), small("qwen3")
    prompts = [[[1, 2, 3, 4]]]
    rows = compiled.rows(target, draft, Setting(prompts, NEW, k=2, sampled=True))
    assert [(row["k"], row["status"], row["new_tokens"]) for row in rows] == [(0, "ok", NEW), (2, "ok", NEW)]
    narrow = torch.tensor([[0.5, 0.5]])
    assert judged_by_law(torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), narrow, torch.tensor([1]))[1].tolist() == [2]


def test_a_batch_has_no_speculation_and_a_failure_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = small("llama"), small("llama")
    setting = Setting([[[1, 2], [3, 4]]], 4, k=2)
    assert [row["status"] for row in compiled.rows(target, draft, setting)] == ["ok", "takes one prompt at a time"]

    def breaks(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(compiled, "CompiledEngine", breaks)
    assert [row["status"] for row in compiled.rows(target, None, setting)] == ["failed: RuntimeError"]


def test_one_compilation_serves_all_layers() -> None:
    torch.compiler.reset()
    counters.clear()
    decoder = compiled.StaticDecoder(small("qwen3"), 1, 8)
    decoder._compiled = torch.compile(compiled.layer_pass, fullgraph=True, dynamic=False, backend="eager")
    with torch.inference_mode():
        for place in range(3):
            decoder.logits(torch.tensor([[place]]), torch.tensor([place]))
    assert counters["stats"]["unique_graphs"] == 1
