"""An assistant of Gemma 4: drafts in the loop are those of transformers over the whole text; no text changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastspec import FastSpecGenerator, SyntheticAcceptance, UnsupportedModel, UnsupportedOption
from fastspec.errors import CheckpointError
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.heads.assistant_spec import AssistantSpec
from fastspec.proposers.chain import AssistantDrafts
from fastspec.shapes import FULL, GREEDY
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.gemma4 import known_version, make_assistant, make_gemma4, write_assistant, write_gemma4
from tests.helpers.heads import engine_with
from tests.proposers.test_eagle3 import Seen, uneven, watched
from tests.scheduling.test_scheduler import GREEDY_ROW, prompts, run, texts
from tests.step.test_step_static import NoHostReads, run_step, start_rows

pytestmark = [
    pytest.mark.skipif(not hasattr(transformers, "Gemma4AssistantForCausalLM"), reason=known_version()),
    pytest.mark.filterwarnings("ignore:.*not used. they are for images or sound"),
]
GIVEN, CAPS = [*prompts(3, seed=5), [7] * 40], [12, 9, 3, 7]
Made = tuple[Path, Path, Any, Any]


def made(path: Path, centroids: int) -> Made:
    target = make_gemma4("every part")
    head = write_assistant(path / "assistant", target, centroids=centroids)
    return write_gemma4(path / "target", target), head, target, make_assistant(target, centroids=centroids)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Files of a target and its assistant, whose ids are in groups, and both live."""
    return made(tmp_path_factory.mktemp("pair"), 16)


@torch.inference_mode()
def wanted(target: Any, assistant: Any, text: list[int], k: int, window: int = 8) -> tuple[list[int], list[float]]:
    """Drafts of transformers' own modules after a text, and by how much each is the best."""
    known = torch.tensor([text])
    out = target.model(known[:, :-1], use_cache=False, return_shared_kv_states=True)
    h, token = out.last_hidden_state[:, -1:], known[:, -1:]
    # in a layer with a window the newest keys; transformers' own code shows one more, and the same up to its length
    keys = {name: tuple(each[:, :, -window if "sliding" in name else 0 :] for each in pair)
            for name, pair in out.shared_kv_states.items()}  # fmt: skip
    drafts, margins = [], []
    for _ in range(k):
        embedded = torch.cat((target.model.embed_tokens(token), h), dim=-1)
        at = torch.tensor([[len(text) - 1]])
        made = assistant(inputs_embeds=embedded, position_ids=at, shared_kv_states=keys)
        best = made.logits[0, 0].topk(2).values
        token, h = made.logits[:, 0].argmax(-1, keepdim=True), made.last_hidden_state
        drafts.append(int(token))
        margins.append(float(best[0] - best[1]))
    return drafts, margins


def wrong_drafts(pair: Made, seen: list[Seen]) -> int:
    """How many rows were drafted otherwise; ties are nobody's fault."""
    wrong = 0
    for each in seen:
        if len(each.text) < 2:
            assert each.drafts == [], "there is no hidden state yet"
            continue
        for got, want, margin in zip(each.drafts, *wanted(*pair[2:], each.text, len(each.drafts)), strict=True):
            if got != want:
                wrong += margin > 1e-3
                break
    return wrong


def test_drafts_are_those_of_transformers(pair: Made) -> None:
    """Rows are admitted, moved and end; drafts are paused; steps accept all numbers of drafts."""
    seen: list[Seen] = []
    engine = watched(engine_with(*pair[:2], verification=SyntheticAcceptance(pattern=[3, 0, 2, 1])), seen)
    assert isinstance(engine.modules.proposer, AssistantDrafts)
    run(engine, GIVEN, CAPS, k=uneven)
    assert len(seen) >= 10
    assert len({each.drafts[0] for each in seen if each.drafts}) > 5, "they say something"
    assert wrong_drafts(pair, seen) == 0


def test_an_assistant_may_score_all_ids(tmp_path: Path) -> None:
    seen: list[Seen] = []
    pair = made(tmp_path, 0)
    found = run(watched(engine_with(*pair[:2]), seen), GIVEN[:3], CAPS[:3], k=uneven)
    assert texts(found) == plain_texts(pair[0])[:3]
    assert wrong_drafts(pair, seen) == 0


@cache
def plain_texts(target: Path) -> list[list[int]]:
    return texts(run(engine_with(target, None), GIVEN, CAPS, k=0))  # type: ignore[arg-type]


def shifted(change: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[..., None]:
    """A planted fault: `change` gets the places and ids of a step, and the decode state, and returns others."""

    def plant(drafts: AssistantDrafts, monkeypatch: pytest.MonkeyPatch) -> None:
        original = drafts._places
        monkeypatch.setattr(drafts, "_places", lambda state, shape: change(*original(state, shape), state))

    return plant


PLANTS = {
    "turned one before": shifted(lambda places, ids, state: (places._replace(turned=places.seen), ids)),
    "one key more": shifted(lambda places, ids, state: (places._replace(seen=places.turned), ids)),
    "token before": shifted(
        lambda places, ids, state: (places, state.tokens.gather(1, places.seen.positions)),
    ),
}


def keys_of_another_layer(drafts: AssistantDrafts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts.model, "_places", [0, 0, drafts.model._places[2]])


@pytest.mark.parametrize("plant", [*PLANTS.values(), keys_of_another_layer], ids=[*PLANTS, "keys of another layer"])
def test_a_planted_fault_is_seen_in_drafts_and_never_in_the_text(
    plant: Any, pair: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Seen] = []
    engine = engine_with(*pair[:2])
    plant(engine.modules.proposer, monkeypatch)
    found = run(watched(engine, seen), GIVEN, CAPS, k=uneven)
    assert texts(found) == plain_texts(pair[0])
    assert wrong_drafts(pair, seen) > 2


def test_text_is_that_without_drafts(pair: Made) -> None:
    engine, given, caps = engine_with(*pair[:2], k=15, verification="coupled"), GIVEN[:3], [7, 5, 6]
    options = [replace(GREEDY_ROW, temperature=0.9, seed=seed, top_p=0.9) for seed in range(3)]
    for each in (None, options):
        plain, *found = (texts(run(engine, given, caps, k=k, options=each)) for k in (0, 1, 3, 5, 8, 15))
        assert found == [plain] * 5


def test_the_law_of_a_draft_is_that_of_the_module(pair: Made) -> None:
    """Ids outside of the chosen groups are never drafted: their probability is 0."""
    engine, assistant = engine_with(*pair[:2], k=2, batch=1), pair[3]
    drafts = engine.modules.proposer
    assert isinstance(drafts, AssistantDrafts)
    x = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: Tensor = drafts.model.logits(x, engine.shapes.tiling)
        normed = assistant.model.norm(x)
        theirs = assistant.masked_embedding(normed, assistant.lm_head.weight)
        kept = found.isfinite()
        assert int(kept.sum()) == 2 * 5 * 128 // 16, "5 of 16 groups"
        torch.testing.assert_close(found[kept], theirs[kept], rtol=1e-5, atol=1e-5)  # sums of 32 products in fp32
        out = torch.zeros(2, dtype=torch.int64)
        drafts.model.argmax(x[:, 0], 128, engine.shapes.tiling, out)
    assert torch.equal(out, theirs[:, 0].argmax(-1))


def test_a_step_reads_nothing_back(pair: Made) -> None:
    engine = engine_with(*pair[:2], k=3, ops=TORCH_OPS)
    start_rows(engine.state)
    with NoHostReads(), torch.inference_mode():
        for k, sampler in ((0, GREEDY), (2, FULL), (3, GREEDY)):
            run_step(engine, k, sampler)
    assert engine.state.emitted[:2].min() >= 1


def test_a_generator_finds_it_by_its_config(pair: Made) -> None:
    target, head, live, _ = pair
    options: dict[str, Any] = {"max_length": 80, "device": "cpu", "progress": False, "num_speculative_tokens": 3}
    with FastSpecGenerator(target, head, **options) as gen:
        found = gen.generate([[5, 6, 7]], max_new_tokens=9)
        assert torch.equal(found, gen.generate([[5, 6, 7]], max_new_tokens=9, num_speculative_tokens=0))
        assert "Gemma 4 assistant (layout of Google) that reads boundaries final norm" in gen.explain()
    with FastSpecGenerator(live, head, **options) as gen:
        assert torch.equal(found, gen.generate([[5, 6, 7]], max_new_tokens=9))


def refused(kind: type[Exception], target: Path, head: Path, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        resolve_pair(target, head, (None, None), (None, None), **options)
    return str(caught.value)


def test_what_does_not_fit_is_refused_in_words(pair: Made, tmp_path: Path) -> None:
    target, head, live, _ = pair
    _, found = resolve_pair(target, head, (None, None), (None, None))
    assert found is not None
    assert isinstance(found.spec, AssistantSpec)
    assert found.spec.sources == (3, 3, 2)
    assert "is llama; use it with its own target" in refused(
        UnsupportedModel, make_checkpoint(tmp_path / "llama", "llama3"), head
    )
    assert "feature_layers=(1,) does not go with" in refused(UnsupportedOption, target, head, feature_layers=[1])
    assert "draft_vocab does not go with" in refused(UnsupportedOption, target, head, draft_vocab=[1])
    other = write_assistant(tmp_path / "a", live, sliding_window=16)
    assert "(KV heads, head_dim, window) (4, 16, 16), and layer 3 of the target has (4, 16, 8)" in refused(
        CheckpointError, target, other
    )
    edit(other / "config.json", backbone_hidden_size=48)
    assert "backbone_hidden_size=48 in its config, and the target has 64" in refused(CheckpointError, target, other)
    other = write_assistant(tmp_path / "b", live)
    text = json.loads((other / "config.json").read_text())["text_config"]
    edit(other / "config.json", text_config={**text, "hidden_size_per_layer_input": 8})
    assert "hidden_size_per_layer_input=8 is not supported, wanted 0" in refused(UnsupportedModel, target, other)
    edit(other / "config.json", text_config=text)
    tensors = load_file(other / "model.safetensors")
    order = tensors["masked_embedding.token_ordering"]
    order[3] = order[4]
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="token_ordering does not have each of 128 ids once"):
        engine_with(target, other)
