"""Shared ids: padding and added tokens are no obstacle; tokens of two tokenizers are matched by their bytes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from fastspec.models import vocab
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.resolve import load_tokenizer, resolve
from fastspec.models.vocab import SharedVocab, frequent_ids, shared_vocab
from tests.helpers.checkpoints import edit, make_checkpoint, make_model, write_tokenizer
from tests.helpers.tokenizers import byte_tokenizer, word_tokenizer

WORDS = [f"w{i}" for i in range(90)]


@pytest.fixture(autouse=True)
def _no_warnings() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def checkpoint(
    path: Path, role: str, vocab: int, texts: list[str] | None, added: list[str] | None = None
) -> Checkpoint:
    make_checkpoint(path / role, "llama2", vocab_size=vocab)
    if texts is not None:
        write_tokenizer(path / role, texts, added or [])
    return resolve(path / role, role=role)


@pytest.mark.parametrize(("p_rows", "q_rows"), [(97, 97), (97, 128), (128, 97)])
def test_padding_does_not_matter(tmp_path: Path, p_rows: int, q_rows: int) -> None:
    target = checkpoint(tmp_path, "target", p_rows, WORDS)
    draft = checkpoint(tmp_path, "draft", q_rows, WORDS)
    assert shared_vocab(target, draft) == SharedVocab(90)


@pytest.mark.parametrize(("rows", "shared"), [(97, 92), (64, 64)])
def test_equal_files_are_not_loaded(tmp_path: Path, rows: int, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids as when they are: base models and those for chats differ in what says nothing of ids."""
    target = checkpoint(tmp_path, "target", 97, WORDS, ["<end>", "<tool>"])
    draft = checkpoint(tmp_path, "draft", rows, WORDS, ["<end>", "<tool>"])
    edit(tmp_path / "draft/tokenizer_config.json", chat_template="{{ messages }}", model_max_length=4)
    tokenizers = {name: load_tokenizer(each) for name, each in (("target", target), ("draft", draft))}
    by_loading = shared_vocab(target, draft, target_tokenizer=tokenizers["target"])
    monkeypatch.setattr(vocab, "load_tokenizer", lambda checkpoint: pytest.fail("loaded"))
    assert shared_vocab(target, draft) == shared_vocab(draft, target) == by_loading == SharedVocab(shared)


def test_equal_files_of_tokenizers_that_differ_otherwise_are_loaded(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, "target", 97, WORDS)
    draft = checkpoint(tmp_path, "draft", 97, WORDS)
    edit(tmp_path / "target/tokenizer_config.json", pad_token="<target>")
    edit(tmp_path / "draft/tokenizer_config.json", pad_token="<draft>")
    with pytest.warns(UserWarning, match=r"token id 90 is '<target>' in the target .* '<draft>' in the draft"):
        assert shared_vocab(target, draft).count == 90


def test_ids_stop_at_the_smaller_embedding(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, "target", 97, WORDS)
    draft = checkpoint(tmp_path, "draft", 64, WORDS)
    assert shared_vocab(target, draft) == SharedVocab(64)
    assert shared_vocab(draft, target) == SharedVocab(64)


def test_a_difference_beyond_the_smaller_embedding_is_out_of_reach(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, "target", 97, WORDS)
    draft = checkpoint(tmp_path, "draft", 64, [*WORDS[:64], "other"])
    assert shared_vocab(target, draft) == SharedVocab(64)


def test_added_tokens_count_when_both_have_them(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, "target", 97, WORDS, ["<end>", "<tool>"])
    draft = checkpoint(tmp_path, "draft", 97, WORDS, ["<end>"])
    assert shared_vocab(target, draft) == SharedVocab(91)
    assert shared_vocab(draft, target) == SharedVocab(91)


@pytest.mark.parametrize("where", [1, 41, 89])
def test_tokens_with_another_id_or_text_are_matched_by_text(tmp_path: Path, where: int) -> None:
    """The warning names the first id that differs, both texts, and the number of shared tokens."""
    other = [*WORDS[:where], *(f"x{i}" for i in range(where, 89)), "w89"]
    target = checkpoint(tmp_path, "target", 97, ["w0", "w89", *WORDS[1:-1]])
    draft = checkpoint(tmp_path, "draft", 93, other)
    first = "w1" if where > 1 else "x1"
    with pytest.warns(
        UserWarning, match=rf"token id 1 is 'w89' .* '{first}' in the draft.* Only the {where + 1} tokens"
    ):
        found = shared_vocab(target, draft)
    assert found.target_ids is not None
    assert found.shown is not None
    assert (found.size, found.count) == (97, where + 1)
    assert found.target_ids.tolist() == [0, *range(2, where + 1), *[-1] * (89 - where), 1, *[-1] * 3]
    assert found.shown[: where + 1].tolist() == [0, 89, *range(1, where)]


def test_tokenizers_without_a_token_in_common_are_refused(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, "target", 97, WORDS)
    draft = checkpoint(tmp_path, "draft", 97, [f"x{i}" for i in range(90)])
    with pytest.raises(
        ValueError, match=r"no token in common \(token id 0 is 'w0' in the target but 'x0' in the draft"
    ):
        shared_vocab(target, draft)


def test_an_added_token_that_differs_is_not_drafted(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, "target", 97, WORDS, ["<end>", "<tool>"])
    draft = checkpoint(tmp_path, "draft", 97, WORDS, ["<stop>", "<end>"])
    with pytest.warns(UserWarning, match=r"token id 90 is '<end>' in the target .* '<stop>' in the draft"):
        found = shared_vocab(target, draft)
    assert found.target_ids is not None
    assert found.target_ids[89:93].tolist() == [89, -1, 90, -1]


def test_tokenizers_at_hand_are_used(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, "target", 97, WORDS)
    draft = checkpoint(tmp_path, "draft", 97, None)
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path / "elsewhere", ["x", *WORDS[1:]])
    found = AutoTokenizer.from_pretrained(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match=r"token id 0 is 'w0' .* 'x' in the draft"):
        assert shared_vocab(target, draft, draft_tokenizer=found).count == 89


def test_tokens_are_matched_whatever_letters_spell_their_bytes(tmp_path: Path) -> None:
    """Byte-level BPE against words with byte fallback; the ends of a text are one token, by their role."""
    target, draft = checkpoint(tmp_path, "target", 270, None), checkpoint(tmp_path, "draft", 266, None)
    p, q = byte_tokenizer(), word_tokenizer(end="</s>")
    with pytest.warns(UserWarning, match="have different tokenizers"):
        found = shared_vocab(target, draft, target_tokenizer=p, draft_tokenizer=q)
    assert found.target_ids is not None
    assert found.shown is not None
    for token, target_id in enumerate(found.target_ids.tolist()):
        if target_id >= 0 and token != q.eos_token_id:
            assert q.decode([token, token])[-1] == p.decode([target_id, target_id])[-1]
    assert found.target_ids[q.eos_token_id] == p.eos_token_id
    for text in (" ", "s", "."):  # a token of its own comes before the byte token of the same byte
        [token] = [
            each for each in q.get_vocab().values() if q.convert_ids_to_tokens(each) in {text, text.replace(" ", "▁")}
        ]
        assert found.target_ids[token] == p.encode(text)[0]
        assert found.shown[p.encode(text)[0]] == token
    assert found.shown[256] == q.convert_tokens_to_ids("<0x65>"), '"he" of the target: "e" is what it ends with'


def test_without_tokenizers_a_padding_sized_difference_is_accepted_with_a_warning(tmp_path: Path) -> None:
    draft = resolve(make_model("llama2", vocab_size=97), role="draft")
    for rows, with_tokenizer in ((97, False), (97 + 1024, False), (97, True)):
        target = checkpoint(tmp_path / str((rows, with_tokenizer)), "target", rows, WORDS if with_tokenizer else None)
        with pytest.warns(UserWarning, match=f"vocab_size is {rows} and 97") as caught:
            assert shared_vocab(target, draft) == SharedVocab(97)
        assert len(caught) == 1


@pytest.mark.parametrize("swap", [False, True])
def test_without_tokenizers_a_larger_difference_is_refused(swap: bool) -> None:
    pair = [resolve(make_model("llama2", vocab_size=rows), role="target") for rows in (97, 97 + 1025)]
    if swap:
        pair.reverse()
    sizes = [each.spec.vocab_size for each in pair]
    with pytest.raises(ValueError, match=f"vocab_size is {sizes[0]} in the target .* {sizes[1]} in the draft"):
        shared_vocab(*pair)


def test_one_model_in_both_roles_needs_no_tokenizer(tmp_path: Path) -> None:
    model = make_model("llama2")
    assert shared_vocab(resolve(model, role="target"), resolve(model, role="draft")) == SharedVocab(97)
    make_checkpoint(tmp_path / "m", "llama2")
    (tmp_path / "link").symlink_to(tmp_path / "m")
    pair = resolve(tmp_path / "m", role="target"), resolve(tmp_path / "link", role="draft")
    assert shared_vocab(*pair) == SharedVocab(97)


def test_frequent_ids_are_those_that_come_most_often() -> None:
    texts = [[5, 6, 5], torch.tensor([9, 5, 9]), [1]]
    assert frequent_ids(texts, 2) == [5, 9]
    assert frequent_ids(texts, 3) == [1, 5, 9], "of equals the lowest"
    assert frequent_ids(texts, 99) == [1, 5, 6, 9]
    for wrong in ((texts, 0), ([], 3), ([[]], 3)):
        with pytest.raises(ValueError, match="wanted one of each"):
            frequent_ids(*wrong)
