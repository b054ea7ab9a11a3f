"""Compares the vocabularies of two models: the same token id must mean the same text in both."""

from __future__ import annotations

import filecmp
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from fastspec.models.checkpoints.resolve import TOKENIZER_CONFIG, load_tokenizer
from fastspec.models.checkpoints.safetensors_files import read_json
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.pairs import suggestion
from fastspec.models.remote_code import refuse_remote_code

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from fastspec.models.checkpoints.checkpoint import Checkpoint

_TOKENIZER: Final = "tokenizer.json"
_FILES: Final = (
    *(_TOKENIZER, "added_tokens.json", "special_tokens_map.json"),
    *("tokenizer.model", "vocab.json", "merges.txt"),
)
# fields of tokenizer_config.json that do not affect ids and their texts
_NOT_OF_IDS: Final = frozenset(
    ["chat_template", "model_max_length", "padding_side", "truncation_side", "processor_class", "name_or_path"]
)
MAX_PADDING: Final = 1024
"""Largest difference of embedding rows that padding explains, when there are no tokenizers to compare."""


def shared_vocab(
    target: Checkpoint,
    draft: Checkpoint | HeadCheckpoint,
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
) -> int:
    """Returns the number of leading token ids that mean the same in both models.

    Embeddings may be padded to different sizes, and either tokenizer may lack ids that the other has. An id that both
    define must have one text.

    Args:
        target, draft: resolved checkpoints.
        target_tokenizer, draft_tokenizer: their tokenizers, if already loaded. Default: those in the checkpoints.

    Returns:
        n such that ids 0..n-1 may be drafted: the rows of the smaller embedding, or the highest id that both tokenizers
        define, plus one, if that is less.

    Raises:
        ValueError: the tokenizers differ in an id, or share none. Without tokenizers: the embeddings differ by more
            than padding. The message has the first id that differs and both texts, and drafts that fit, if known.
    """
    if isinstance(draft, HeadCheckpoint):
        return target.spec.vocab_size  # a head drafts the target's ids
    rows = min(target.spec.vocab_size, draft.spec.vocab_size)
    if _same_source(target, draft):
        return rows
    captured_shape = target_tokenizer is not None or draft_tokenizer is not None
    if ids := [] if captured_shape else [each for each in _ids_of_equal_files(target, draft) if each < rows]:
        return max(ids) + 1
    target_tokenizer = target_tokenizer or load_tokenizer(target)
    draft_tokenizer = draft_tokenizer or load_tokenizer(draft)
    if target_tokenizer is None or draft_tokenizer is None:
        return _compare_sizes(target, draft)
    p_texts, q_texts = _texts(target_tokenizer, rows), _texts(draft_tokenizer, rows)
    common = sorted(p_texts.keys() & q_texts.keys())
    if not common:
        raise ValueError(
            f"the tokenizers of {target.name} and {draft.name} share no token id below {rows}; choose a draft with "
            f"the target's tokenizer{suggestion(target.name)}"
        )
    for token in common:
        if p_texts[token] != q_texts[token]:
            raise ValueError(
                f"token id {token} is {p_texts[token]!r} in the target {target.name} but {q_texts[token]!r} in the "
                f"draft {draft.name}; choose a draft with the target's tokenizer{suggestion(target.name)}"
            )
    return min(rows, common[-1] + 1)


def _same_source(target: Checkpoint, draft: Checkpoint) -> bool:
    if target.module is not None or draft.module is not None:
        return target.module is draft.module
    if target.directory is None or draft.directory is None:
        return False
    return target.directory.samefile(draft.directory)


def _ids_of_equal_files(target: Checkpoint, draft: Checkpoint) -> list[int]:
    """Reads token ids from tokenizer.json if both checkpoints have the same file. Loading two tokenizers is slow.

    Empty if the files differ, or are of another type.
    """
    first, second = target.directory, draft.directory
    if first is None or second is None or not all(_equal(first / name, second / name) for name in _FILES):
        return []
    config, other = (
        {} if not path.is_file() else read_json(path) for path in (first / TOKENIZER_CONFIG, second / TOKENIZER_CONFIG)
    )
    raw = read_json(first / _TOKENIZER) if (first / _TOKENIZER).is_file() else {}
    for path, fields in (
        (first / TOKENIZER_CONFIG, config),
        (second / TOKENIZER_CONFIG, other),
        (first / _TOKENIZER, raw),
    ):
        refuse_remote_code(path, fields)
    if "tokenizer_class" not in config or _of_ids(config) != _of_ids(other):
        return []
    try:
        vocabulary = raw["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [each["id"] for each in raw["added_tokens"]]
        return [int(each) for each in (*ids, *config.get("added_tokens_decoder", {}))]
    except (AttributeError, KeyError, TypeError, ValueError):  # loading the tokenizer will report the error
        return []


def _equal(path: Path, other: Path) -> bool:
    """True if neither file exists, or both have the same bytes."""
    if not (path.is_file() and other.is_file()):
        return path.is_file() == other.is_file()
    return filecmp.cmp(path, other, shallow=False)


def _of_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _NOT_OF_IDS}


def _texts(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[int, str]:
    return {token: text for text, token in tokenizer.get_vocab().items() if token < rows}


def _compare_sizes(target: Checkpoint, draft: Checkpoint) -> int:
    p_size, q_size = target.spec.vocab_size, draft.spec.vocab_size
    if abs(p_size - q_size) > MAX_PADDING:
        raise ValueError(
            f"vocab_size is {p_size} in the target {target.name} but {q_size} in the draft {draft.name}, and there "
            "are no two tokenizers to compare; pass directories with tokenizer files, or choose a draft of the same "
            f"family{suggestion(target.name)}"
        )
    warnings.warn(
        f"the tokenizers of {target.name} and {draft.name} are not both known: their ids are taken to mean the same "
        f"because their vocab_size is {p_size} and {q_size}; pass directories with tokenizer files to have them "
        "compared",
        stacklevel=3,
    )
    return min(p_size, q_size)


def frequent_ids(texts: Iterable[Iterable[int]], count: int) -> list[int]:
    """Returns the `count` most frequent ids in texts, ascending. Of equally frequent ids the lowest are taken.

    For `draft_vocab`: pass texts like those that the target will write.

    Args:
        texts: token ids of each text.
        count: number of ids. Fewer are returned if the texts have fewer.

    Raises:
        ValueError: `count` is below 1, or texts are empty.
    """
    found = Counter(int(each) for text in texts for each in text)
    if count < 1 or not found:
        raise ValueError(f"got {len(found)} different ids in texts and count={count}; wanted one of each at least")
    return sorted(sorted(found, key=lambda each: (-found[each], each))[:count])
