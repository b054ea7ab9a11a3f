"""DFlash heads in the loop: laws of drafts against those computed from scratch, texts against plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastspec import FastSpecGenerator, NGram
from fastspec.engine import settings as engine_settings
from fastspec.engine.engine import Engine
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.heads.passes import DFlash, DFlash2
from fastspec.proposers.dflash import DFlash2Drafts, DFlashDrafts, DSparkDrafts, InOrder
from fastspec.shapes import FULL, GREEDY, ForwardBatch
from fastspec.state import DecodeState
from tests.helpers import dflash_definition as definition
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.dflash import WRITERS, Head
from tests.helpers.dflash_definition import CASES, RELATIVES
from tests.scheduling.test_scheduler import run, sampled_row, texts
from tests.step.test_step_static import NoHostReads, run_step, start_rows

VOCAB = 11
HEAD = Head(32, VOCAB, block_size=16, mask_id=10, ids=(0, 2))
# sums of fp32 products in other orders, in a target of 3 layers and a head of 2; laws are numbers below 1
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "qwen3", vocab_size=VOCAB)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def generator(target: Path, head: Path, k: int = 7, **options: Any) -> Iterator[FastSpecGenerator]:
    sizes = {"max_batch_size": 3, "max_length": 120, "page_size": 16, "device": "cpu", "progress": False}
    with FastSpecGenerator(target, head, num_speculative_tokens=k, **(sizes | options)) as made:
        yield made


def engine_of(made: FastSpecGenerator) -> Engine:
    return made._open().engine


@dataclass(frozen=True)
class Seen:
    """What a step drafted for one row: its text, the law of each draft, and the drafts."""

    text: list[int]
    laws: Tensor
    drafts: list[int]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Fills a list with what is drafted from now on."""
    seen: list[Seen] = []

    def propose(
        self: DFlashDrafts, state: DecodeState, shape: Any, *rest: Any, original: Any = None, **more: Any
    ) -> None:
        original(self, state, shape, *rest, **more)
        for row in state.running.nonzero().flatten().tolist():
            text = state.tokens[row, : state.lengths[row]].tolist()
            laws, drafts = state.draft_probs[row, : shape.num_drafts], state.draft_tokens[row, : shape.num_drafts]
            seen.append(Seen(text, laws.clone(), drafts.tolist()))

    for kind in (DFlashDrafts, InOrder):
        monkeypatch.setattr(kind, "propose", partialmethod(propose, original=kind.propose))
    return seen


def hidden_states(model: PreTrainedModel, text: list[int], boundaries: tuple[int, ...]) -> Tensor:
    """[tokens, boundaries, hidden] of transformers' own model: the residual stream in front of the final norm."""
    found: dict[int, Tensor] = {}

    def keep(boundary: int) -> Callable[..., None]:
        return lambda _module, _inputs, out: found.update({boundary: (out[0] if isinstance(out, tuple) else out)[0]})

    hooks = [model.get_input_embeddings().register_forward_hook(keep(0))]
    hooks += [layer.register_forward_hook(keep(index + 1)) for index, layer in enumerate(model.model.layers)]
    model(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return torch.stack([found[each] for each in boundaries], dim=1)


@torch.no_grad()
def distance(target: Path, path: Path, head: Head, rules: definition.Rules, seen: list[Seen]) -> float:
    """The largest difference of a draft's law to the one computed from the row's text, by the straight definition."""
    model = AutoModelForCausalLM.from_pretrained(target)
    tensors = load_file(path / "model.safetensors")
    embed = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    lm_head = tensors.get("lm_head.weight", model.lm_head.weight)
    if (path / "mask_embedding.safetensors").exists():
        embed = embed.clone()
        embed[head.mask_id] = load_file(path / "mask_embedding.safetensors")["mask_embedding"]
    anchored = bool(head.more.get("sample_from_anchor", head.markov))
    worst = 0.0
    for each in seen:
        k = len(each.drafts)
        features = hidden_states(model, each.text, head.boundaries)[:-1]
        block = embed[[each.text[-1], *[head.mask_id] * (k - anchored)]]
        logits = definition.logits(head, rules, tensors, features, block, lm_head)[1 - anchored :]
        rows = definition.hidden_rows(head, rules, tensors, features, block)[1 - anchored :]
        before = [each.text[-1], *each.drafts]
        chain = [definition.after(tensors, rows[j], logits[j], before[j], head) for j in range(k)]
        logits = torch.stack(chain) if chain else logits
        ids = definition.target_ids(tensors, torch.arange(len(lm_head)))
        law = torch.zeros(k, VOCAB).index_copy_(1, ids, logits.softmax(-1))
        worst = max(worst, float((each.laws - law).abs().max()))
    return worst


def drafted(
    target: Path, path: Path, head: Head, rules: definition.Rules, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> float:
    """`distance` over a run: rows come and go, k changes, and some steps are plain."""
    seen = watch(monkeypatch)
    with generator(target, path, verification="rejection") as made:
        rows = prompts(1, 2, 30, 5, 17)
        ks = [7, 3, 0, 7, 0, 0, 1, 5]
        run(engine_of(made), rows, 20, k=lambda step: ks[step % len(ks)], options=[sampled_row(9)] * len(rows))
    assert len(seen) > 40
    assert {len(each.drafts) for each in seen} == {1, 3, 5, 7}
    return distance(target, path, head, rules, seen)


@pytest.mark.parametrize("case", [*CASES, *RELATIVES])
def test_laws_are_those_computed_from_the_text(
    case: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, changes, rules = (CASES | RELATIVES)[case]
    head = replace(HEAD, **changes)
    path = WRITERS[layout](tmp_path, head)
    assert drafted(target, path, head, replace(definition.full(head), **rules), monkeypatch) < TOLERANCE


def test_masks_embedded_as_a_vector_of_their_own(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = WRITERS["z-lab"](tmp_path, HEAD)
    mask = torch.randn(32, generator=torch.Generator().manual_seed(4))
    save_file({"mask_embedding": mask}, path / "mask_embedding.safetensors")
    assert drafted(target, path, HEAD, definition.full(HEAD), monkeypatch) < TOLERANCE


def shifted(self: DFlash, features: Tensor, rows: ForwardBatch, original: Any = DFlash.store_context) -> None:
    original(self, features, replace(rows, positions=rows.positions + 1))


def causal(self: DFlash, rows: ForwardBatch, original: Any = DFlash.block) -> Tensor:
    self.head = replace(self.head, causal=(True,) * HEAD.layers)
    return original(self, rows)


def only_prompts(
    self: DFlashDrafts, state: Any, shape: Any, features: Tensor, rows: Any, original: Any = DFlashDrafts.take_features
) -> None:
    if rows.positions.shape[1] > 16:
        original(self, state, shape, features, rows)


def not_plain_steps(
    self: DFlashDrafts, state: Any, shape: Any, features: Tensor, rows: Any, original: Any = DFlashDrafts.take_features
) -> None:
    if rows.positions.shape[1] > 1:
        original(self, state, shape, features, rows)


def wrong_boundary(self: DFlashDrafts, *given: Any, original: Any = DFlashDrafts.__init__) -> None:
    original(self, *given)
    self.features = tuple(layer - 1 for layer in self.features)


@pytest.mark.parametrize(
    ("kind", "name", "planted"),
    [
        (DFlash, "store_context", shifted),
        (DFlash, "block", causal),
        (DFlashDrafts, "take_features", only_prompts),  # keys of earlier blocks are seen as the context's
        (DFlashDrafts, "take_features", not_plain_steps),
        (DFlashDrafts, "__init__", wrong_boundary),
    ],
    ids=["position off by one", "causal", "stale block", "plain steps left out", "wrong boundary"],
)
def test_a_planted_bug_is_seen(
    kind: type, name: str, planted: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = WRITERS["z-lab"](tmp_path, HEAD)
    monkeypatch.setattr(kind, name, planted)
    assert drafted(target, path, HEAD, definition.full(HEAD), monkeypatch) > 100 * TOLERANCE


def before_off_by_one(self: InOrder, x: Tensor, shape: Any, original: Any) -> Callable[[int, Tensor], Tensor]:
    logits, kept = original(self, x, shape), list[Tensor]()

    def wrong(j: int, before: Tensor) -> Tensor:
        kept.append(before)
        return logits(j, kept[max(j - 1, 0)])

    return wrong


def places_off_by_one(self: InOrder, x: Tensor, shape: Any, original: Any) -> Callable[[int, Tensor], Tensor]:
    logits, last = original(self, x, shape), x.shape[1] - 1
    return lambda j, before: logits(min(j + 1, last), before)


def conv_across(self: DFlash2, index: int, which: str, side: int, h: Tensor, kernel: Tensor, original: Any) -> Tensor:
    return original(self, index, which, side, h.roll(1, 1), kernel)


@pytest.mark.parametrize(
    ("case", "kind", "name", "planted"),
    [
        ("DSpark", DSparkDrafts, "_candidates_after", before_off_by_one),
        ("DFlash2 of speculators", DFlash2Drafts, "_candidates_after", places_off_by_one),
        ("DFlash2", DFlash2, "_convolution", conv_across),
    ],
)
def test_a_planted_bug_in_a_relative_is_seen(
    case: str, kind: Any, name: str, planted: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, changes, rules = RELATIVES[case]
    head = replace(HEAD, **changes)
    path = WRITERS[layout](tmp_path, head)
    monkeypatch.setattr(kind, name, partialmethod(planted, original=getattr(kind, name)))
    assert drafted(target, path, head, replace(definition.full(head), **rules), monkeypatch) > 100 * TOLERANCE


@pytest.mark.parametrize("case", ["DSpark", "DFlash2"])
def test_texts_with_a_relative_are_those_of_plain_decoding(case: str, target: Path, tmp_path: Path) -> None:
    layout, changes, _ = RELATIVES[case]
    path, rows = WRITERS[layout](tmp_path, replace(HEAD, **(changes | {"block_size": 16}))), prompts(5, 20, 1)
    with generator(target, path, k=15, verification="coupled") as found:
        engine = engine_of(found)
        for options in (None, [sampled_row(seed) for seed in range(len(rows))]):
            plain, *others = (texts(run(engine, rows, 9, k=k, options=options)) for k in (0, 1, 3, 5, 8, 15))
            assert others == [plain] * 5
        assert f"a {case.split()[0]} head" in found.explain()


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastSpecGenerator]:
    path = WRITERS["speculators"](tmp_path_factory.mktemp("head"), replace(HEAD, draft_vocab=7))
    with generator(target, path, k=15, max_batch_size=8, verification="coupled") as found:
        yield found


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("batch", [1, 8])
def test_texts_are_those_of_plain_decoding(made: FastSpecGenerator, batch: int, sampled: bool) -> None:
    """At batch 8 with more prompts than rows, so that rows come and go."""
    rows = prompts(*((40,) if batch == 1 else (5, 40, 3, 1, 17, 33, 8, 2, 61)))
    options = [sampled_row(seed) for seed in range(len(rows))] if sampled else None
    caps = [18 - index for index in range(len(rows))]
    engine = engine_of(made)
    plain = texts(run(engine, rows, caps, k=0, options=options))
    for k in (1, 3, 5, 8, 15):
        found = run(engine, rows, caps, k=k, options=options)
        assert texts(found) == plain
        assert sum(request.drafted for request in found) > 0
    ks = [15, 0, 3, 0, 0, 7]
    assert texts(run(engine, rows, caps, k=lambda step: ks[step % 6], options=options)) == plain


@pytest.mark.parametrize(
    ("case", "sampler"),
    [
        ("reduced vocabulary", GREEDY),
        ("reduced vocabulary", FULL),
        ("DSpark of speculators", FULL),
        ("DFlash2", GREEDY),
    ],
)
def test_a_step_reads_nothing_back(
    case: str, sampler: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the ops that graphs capture; those of the CPU read positions."""
    monkeypatch.setattr(engine_settings, "ops_for", lambda device: TORCH_OPS)
    layout, changes, _ = (CASES | RELATIVES)[case]
    with generator(target, WRITERS[layout](tmp_path, replace(HEAD, **changes))) as made:
        engine = engine_of(made)
        start_rows(engine.state)
        with NoHostReads(), torch.inference_mode():
            for k in (0, 7):
                run_step(engine, k, sampler)
        assert engine.state.emitted[:2].min() >= 1


def test_behind_lookup_and_by_itself(target: Path, tmp_path: Path) -> None:
    path, rows = WRITERS["z-lab"](tmp_path, HEAD), torch.tensor(prompts(12, 12))
    options = {"max_new_tokens": 40, "eos_token_id": []}
    with generator(target, path, k="auto", proposer=NGram()) as both:
        assert engine_of(both).shapes.max_drafts == 15, "as many as a block has"
        assert "then a DFlash head" in both.explain()
        plain = both.generate(rows, num_speculative_tokens=0, **options)
        assert torch.equal(both.generate(rows, **options), plain)
        assert torch.equal(both.generate(rows, num_speculative_tokens=7, **options), plain)


def test_more_drafts_than_a_block_has_are_refused(target: Path, tmp_path: Path) -> None:
    path = WRITERS["z-lab"](tmp_path, replace(HEAD, block_size=6))
    with pytest.raises(ValueError, match=r"num_speculative_tokens=6, and .* drafts 5 tokens a step at most"):
        FastSpecGenerator(target, path, num_speculative_tokens=6, device="cpu", progress=False)
    with generator(target, path, k="auto") as made:
        assert engine_of(made).shapes.max_drafts == 5


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compile": True, "exact": False}, r"compile=True .* is a head \(DFlash head"),
    ],
)
def test_what_heads_have_no_use_for_is_refused(
    options: dict[str, Any], match: str, target: Path, tmp_path: Path
) -> None:
    path = WRITERS["z-lab"](tmp_path, HEAD)
    with pytest.raises(ValueError, match=match):
        FastSpecGenerator(target, path, device="cpu", progress=False, **options)
