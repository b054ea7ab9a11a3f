"""The target's answers to prompts: what is asked, what is answered, and that only answers teach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.tiny_targets import VOCAB, tiny_model
from tests.tools.heads.test_corpus import WORDS, save_tokenizer, texts
from tools.heads.__main__ import main
from tools.heads.answers import answer_rows
from tools.heads.corpus import last_tokens, read_texts
from tools.heads.loss import chain_loss, law_temperatures
from tools.heads.recipe import Recipe
from tools.heads.rows import Chunks, Rows
from tools.heads.target import Target, encode_prompts
from tools.heads.train import choose_drafted, coverage, make_head, train

LENGTH, HALF = 24, 12
RECIPE = Recipe(own_rows=8, own_length=LENGTH, own_batch=4, own_temperatures=(0.0, 1.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer that has a chat template, in which a message ends with the word "ha"."""
    path = tmp_path_factory.mktemp("target")
    tiny_model("llama", max_position_embeddings=512).save_pretrained(path)
    save_tokenizer(path, "{% for message in messages %}{{ message.content }} ha {% endfor %}")
    return path


@pytest.fixture(scope="module")
def answered(folder: Path) -> tuple[list[Tensor], Rows]:
    """Prompts of 3 to 6 tokens, and the rows with their answers."""
    drawn = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (length,), generator=drawn) for length in (3, 4, 5, 6)]
    return prompts, answer_rows(folder, prompts, RECIPE, "cpu", torch.float32)


def test_every_prompt_is_answered_at_every_temperature(answered: tuple[list[Tensor], Rows]) -> None:
    prompts, rows = answered
    target = Target(tiny_model("llama", max_position_embeddings=512), (1, 2, 3))
    assert rows.begins is not None
    assert rows.begins.tolist() == [3, 4, 5, 6] * 2
    assert rows.lengths.tolist() == [begin + HALF for begin in rows.begins.tolist()]
    greedy = [0, 2, 5, 7]  # neighbours differ, and so do the two rows of a prompt
    for row in range(8):
        prompt = prompts[row % 4]
        wanted = target.write(prompt[None], HALF, 0.0)[0][0]
        assert torch.equal(rows.ids[row, : len(prompt)], prompt)
        assert torch.equal(rows.ids[row, : len(wanted)], wanted) == (row in greedy)


def test_writing_ends_after_its_time(folder: Path) -> None:
    prompts = [torch.tensor([1, 2, 3])]
    whole = answer_rows(folder, prompts, Recipe(own_rows=3, own_length=LENGTH, own_batch=1), "cpu", torch.float32)
    short = Recipe(own_rows=3, own_length=LENGTH, own_batch=1, own_seconds=0.0)
    rows = answer_rows(folder, prompts, short, "cpu", torch.float32)
    assert len(whole.ids) == 3
    assert len(rows.ids) == 1  # one row at a time was begun, and rows without a token are left out
    assert rows.lengths[0] < 3 + HALF
    assert torch.equal(rows.ids[0, : rows.lengths[0]], whole.ids[0, : rows.lengths[0]])


def test_prompts_longer_than_half_of_a_row_are_left_out_or_refused(folder: Path) -> None:
    long, short = torch.zeros(HALF + 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    recipe = Recipe(own_rows=1, own_length=LENGTH, own_batch=1)
    assert answer_rows(folder, [long, short], recipe, "cpu", torch.float32).begins.tolist() == [2]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="The shortest prompt has 13 tokens, more than half of a row of 24"):
        answer_rows(folder, [long], recipe, "cpu", torch.float32)


def test_lines_with_prompts_are_messages_in_the_chat_template(folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"prompt": text}) for text in texts(200, 12)))
    found = read_texts(corpus)
    assert found.prompts
    assert len(found.train) + len(found.held_out) == 200
    (ids,) = encode_prompts(folder, found.train[:1])
    assert ids.tolist() == [WORDS.index(word) for word in [*found.train[0].split(), "ha"]]
    corpus.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match='Line 2 of the corpus has no "prompt"'):
        read_texts(corpus)


def test_held_out_prompts_are_measured_at_their_ends() -> None:
    documents = [torch.arange(3), torch.arange(5), torch.arange(9), torch.arange(20, 24)]
    assert last_tokens(documents, 2, 4).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    with pytest.raises(ValueError, match="No held-out prompt has 40 tokens"):
        last_tokens(documents, 2, 40)


def test_rows_of_one_length_share_a_part_and_only_answers_teach() -> None:
    ids = torch.arange(1, 41).view(4, 10)
    rows = Rows(ids, torch.tensor([10, 3, 4, 9]), torch.tensor([8, 1, 2, 5]))
    parts = rows.by_length(4)
    assert [part.ids.tolist() for part in parts] == [ids[[1, 2], :4].tolist(), ids[[0, 3]].tolist()]
    assert [part.texts()[0].tolist() for part in parts] == [[12, 13], [9, 10]]
    assert choose_drafted([rows], 50, 2).tolist() == [9, 10]
    assert coverage([rows], torch.tensor([9, 10, 12, 13])) == pytest.approx(4 / 10)
    target = Target(tiny_model("llama"), (1, 2, 3))
    chunks = Chunks(target, [Rows(ids % VOCAB, rows.lengths, rows.begins)], torch.device("cpu"), torch.Generator())
    batch = next(chunks.batches(1000))
    for row in range(4):
        (index,) = (ids[:, 0] % VOCAB == batch.ids[row, 0]).nonzero()[:, 0].tolist()
        taught = [int(rows.begins[index]) <= place < int(rows.lengths[index]) for place in range(10)]  # type: ignore[index]
        assert batch.text[row].tolist() == taught


@pytest.mark.parametrize("rows", [5, 7, 9])
def test_batches_of_a_chunk_have_one_size(rows: int) -> None:
    target = Target(tiny_model("llama"), (1, 2, 3))
    ids = torch.zeros(rows, 4, dtype=torch.int64)
    chunks = Chunks(target, [Rows(ids, torch.full((rows,), 4))], torch.device("cpu"), torch.Generator())
    batches = chunks.batches(16)
    sizes = [len(next(batches).ids) for _ in range(-(-rows // 4))]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1


def test_kept_sums_give_the_same_loss() -> None:
    torch.manual_seed(3)
    target, recipe = Target(tiny_model("qwen3"), (1, 2, 3)), Recipe(unroll=2, greedy_temperature=0.5)
    rows = Rows(torch.randint(VOCAB, (4, 9)), torch.full((4,), 9))
    head = make_head(target, torch.arange(0, VOCAB, 2), recipe)
    losses = []
    for temperatures in ((), law_temperatures(recipe)):
        generator = torch.Generator().manual_seed(1)
        chunks = Chunks(target, [rows], torch.device("cpu"), generator, temperatures)
        batch = next(chunks.batches(64))
        assert set(batch.log_sums) == set(temperatures)
        losses.append(chain_loss(head, target, batch, recipe))
    # float32, a sum over 48 tokens in another order
    torch.testing.assert_close(losses[0][0], losses[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=1e-5, atol=1e-6)


def test_training_ends_after_its_time() -> None:
    target, rows = (
        Target(tiny_model("llama"), (1, 2, 3)),
        Rows(torch.zeros(2, 8, dtype=torch.int64), torch.tensor([8, 8])),
    )
    recipe = Recipe(steps=10**6, seconds=0.2, warmup=1, unroll=2)
    head = make_head(target, torch.arange(VOCAB), recipe)
    chunks = Chunks(target, [rows], torch.device("cpu"), torch.Generator())
    history = train(head, target, chunks.batches(16), recipe)
    assert 0.2 <= history.seconds < 10
    assert len(history.losses) == history.accepted[-1][0] + 1


def test_the_command_writes_first_and_trains_later(folder: Path, tmp_path: Path) -> None:
    corpus, work = tmp_path / "corpus.jsonl", tmp_path / "work"
    corpus.write_text("\n".join(json.dumps({"prompt": text}) for text in texts(200, 7)))
    common: list[Any] = [
        str(folder),
        str(corpus),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--out",
        str(tmp_path / "head"),
    ]
    common += ["--own-rows", "6", "--own-length", "20", "--own-batch", "4", "--steps", "3", "--unroll", "2"]
    common += ["--prompts", "2", "--prompt-length", "6", "--new-tokens", "8", "--places", "2", "--draft-vocab", "20"]
    with pytest.raises(SystemExit, match="--write needs --work"):
        main([*common, "--write"])
    common += ["--work", str(work), "--keep", "cpu"]
    assert main([*common, "--write"]) == 0
    assert not (tmp_path / "head").exists()
    written = load_file(work / "own.safetensors")
    assert written["begins"].tolist() == [8] * 6  # seven words and the template's
    assert main(common) == 0
    assert {path.name for path in work.iterdir()} == {"own.safetensors"}  # with --keep no features lie in files
    report = json.loads((tmp_path / "head" / "report.json").read_text())
    assert report["held_out"]["head, temperature 0.0"]["steps"] > 0
