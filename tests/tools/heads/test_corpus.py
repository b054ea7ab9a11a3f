"""Where training text comes from, what is held out, and the command line from end to end."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny_targets import VOCAB, tiny_model
from tools.heads.__main__ import main
from tools.heads.corpus import cut_prompts, read_texts

WORDS = [f"{first}{second}" for first in "abcdefgh" for second in "aeiouy"]


def texts(count: int, words: int) -> list[str]:
    drawn = torch.randint(VOCAB, (count, words), generator=torch.Generator().manual_seed(9))
    return [" ".join(WORDS[index] for index in row) for row in drawn.tolist()]


def folder_of(path: Path, contents: list[str]) -> Path:
    path.mkdir()
    for index, content in enumerate(contents):
        (path / f"{index}{('.py', '.txt', '.md')[index % 3]}").write_text(content)
    (path / "image.png").write_bytes(b"\x89PNG")
    return path


def test_a_folder_and_its_archive_are_split_alike_and_nothing_is_in_both_parts(tmp_path: Path) -> None:
    contents = texts(200, 12)
    folder = folder_of(tmp_path / "corpus", contents)
    with tarfile.open(tmp_path / "corpus.tar", "w") as archive:
        archive.add(folder, arcname=".")
    found = read_texts(folder)
    assert read_texts(tmp_path / "corpus.tar") == found
    assert sorted(found.train + found.held_out) == sorted(contents)
    assert set(found.train).isdisjoint(found.held_out)
    assert 1 <= len(found.held_out) <= 20


def test_lines_and_paragraphs_are_texts(tmp_path: Path) -> None:
    contents = texts(200, 12)
    lines, paragraphs = tmp_path / "corpus.jsonl", tmp_path / "corpus.txt"
    lines.write_text("\n".join(json.dumps({"text": content, "more": 1}) for content in contents))
    paragraphs.write_text("\n\n".join(contents))
    assert read_texts(lines) == read_texts(paragraphs)
    assert len(read_texts(lines).train) + len(read_texts(lines).held_out) == 200


def test_a_corpus_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"content": "b"}\n')
    with pytest.raises(ValueError, match='Line 2 of the corpus has no "text"'):
        read_texts(broken)
    with pytest.raises(ValueError, match="0 held-out texts"):
        read_texts(folder_of(tmp_path / "few", texts(3, 12)))
    with pytest.raises(ValueError, match="the longest has 4"):
        cut_prompts([torch.arange(4)], 2, 5, torch.Generator())


def save_tokenizer(path: Path, chat_template: str | None = None) -> None:
    """Writes a tokenizer whose tokens are WORDS."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=WORDS[0])
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)


def test_prompts_come_from_every_place_of_a_text() -> None:
    pieces = cut_prompts([torch.arange(5), torch.arange(100, 108)], 200, 5, torch.Generator().manual_seed(1))
    assert set(pieces[:, 0].tolist()) == {0, 100, 101, 102, 103}
    assert torch.equal(pieces - pieces[:, :1], torch.arange(5).repeat(200, 1))


def test_the_command_trains_writes_and_measures(tmp_path: Path) -> None:
    target = tmp_path / "target"
    tiny_model("qwen3").save_pretrained(target)
    save_tokenizer(target)
    corpus = folder_of(tmp_path / "corpus", texts(200, 40))
    common = [str(target), str(corpus), "--device", "cpu", "--beside", str(target), "--dtype", "float32"]
    common += ["--prompts", "3", "--prompt-length", "8", "--new-tokens", "12", "--places", "2"]
    training = ["--out", str(tmp_path / "head"), "--work", str(tmp_path / "work"), "--steps", "4", "--unroll", "2"]
    training += ["--own-rows", "6", "--own-batch", "4", "--own-length", "16", "--own-prompts", "4", "8"]
    training += ["--real-rows", "4", "--real-length", "16", "--draft-vocab", "30", "--batch-tokens", "64"]
    assert main(common + training) == 0
    report = json.loads((tmp_path / "head" / "report.json").read_text())
    assert {"config.json", "model.safetensors", "report.json"} == {path.name for path in (tmp_path / "head").iterdir()}
    assert report["boundaries"] == [2, 3, 4]
    assert report["held_out"]["draft model, temperature 0.0"]["accepted_at_least"] == [1.0, 1.0]  # the target itself
    assert main([*common, "--out", str(tmp_path / "again"), "--measure", str(tmp_path / "head")]) == 0
    again = json.loads((tmp_path / "again" / "report.json").read_text())
    assert again["held_out"] == report["held_out"]
    written = (tmp_path / "work" / "own.safetensors").stat().st_mtime_ns
    assert main(common + training) == 0  # the text that the target wrote is used again
    assert (tmp_path / "work" / "own.safetensors").stat().st_mtime_ns == written
    assert json.loads((tmp_path / "head" / "report.json").read_text())["held_out"] == report["held_out"]
