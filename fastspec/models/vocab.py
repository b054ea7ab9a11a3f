"""Finds the tokens that target and draft share: by equal ids, or by equal bytes if their tokenizers differ."""

from __future__ import annotations

import filecmp
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fastspec.models.checkpoints.resolve import TOKENIZER_CONFIG, load_tokenizer
from fastspec.models.checkpoints.safetensors_files import read_json
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.pairs import suggestion
from fastspec.models.remote_code import refuse_remote_code
from fastspec.text.token_bytes import BYTE_TOKEN, special_tokens, token_bytes

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


@dataclass(frozen=True, slots=True)
class SharedVocab:
    """Token ids that target and draft share.

    Attributes:
        size: target ids below this number may be drafted. If `target_ids` is set: size of the target's vocabulary.
        target_ids: int64 [rows of the draft's embedding] on the CPU, the target id of each draft id; -1 for an id that
            is never drafted. None: draft ids are target ids.
        shown: int64 [rows of the target's embedding] on the CPU, the draft id that replaces each target id in the
            draft's input. None if `target_ids` is None.
    """

    size: int
    target_ids: Tensor | None = None
    shown: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of target ids that may be drafted."""
        return self.size if self.target_ids is None else int((self.target_ids >= 0).sum())


def shared_vocab(
    target: Checkpoint,
    draft: Checkpoint | HeadCheckpoint,
    *,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
) -> SharedVocab:
    """Finds the token ids that target and draft share.

    Embeddings may be padded to different sizes, and either tokenizer may lack ids that the other has. If an id has
    different texts in the two tokenizers, tokens are matched by their bytes (token-level intersection,
    arXiv 2502.05202), with a warning.

    Args:
        target, draft: resolved checkpoints.
        target_tokenizer, draft_tokenizer: their tokenizers, if already loaded. Default: those in the checkpoints.

    Returns:
        If equal ids have equal texts, only `size`: the rows of the smaller embedding, or 1 + the highest id that both
        tokenizers define, if that is less. Otherwise also the maps between the ids of the two tokenizers.

    Raises:
        ValueError: the tokenizers share no token. Or a tokenizer is missing, and padding does not explain the different
            sizes of the embeddings. The message names drafts that fit, if the table of pairs has some.
    """
    if isinstance(draft, HeadCheckpoint):
        return SharedVocab(target.spec.vocab_size)  # a learned head drafts ids of the target
    rows = min(target.spec.vocab_size, draft.spec.vocab_size)
    if _same_source(target, draft):
        return SharedVocab(rows)
    given = target_tokenizer is not None or draft_tokenizer is not None
    if ids := [] if given else [each for each in _ids_of_equal_files(target, draft) if each < rows]:
        return SharedVocab(max(ids) + 1)
    target_tokenizer = target_tokenizer or load_tokenizer(target)
    draft_tokenizer = draft_tokenizer or load_tokenizer(draft)
    if target_tokenizer is None or draft_tokenizer is None:
        return SharedVocab(_compare_sizes(target, draft))
    p_texts, q_texts = _texts(target_tokenizer, rows), _texts(draft_tokenizer, rows)
    common = sorted(p_texts.keys() & q_texts.keys())
    differs = next((token for token in common if p_texts[token] != q_texts[token]), None)
    if common and differs is None:
        return SharedVocab(min(rows, common[-1] + 1))
    found = _matched(target, draft, target_tokenizer, draft_tokenizer)
    reason = f"they share no token id below {rows}"
    if differs is not None:
        reason = f"token id {differs} is {p_texts[differs]!r} in the target but {q_texts[differs]!r} in the draft"
    if not found.count:
        raise ValueError(
            f"the tokenizers of the target {target.name} and the draft {draft.name} have no token in common "
            f"({reason}); choose a draft with the target's tokenizer{suggestion(target.name)}"
        )
    warnings.warn(
        f"the target {target.name} and the draft {draft.name} have different tokenizers ({reason}). Only the "
        f"{found.count} tokens that both have are drafted, of {target.spec.vocab_size} in the target. The text is the "
        f"same; a draft with the target's tokenizer has more drafts accepted{suggestion(target.name)}",
        stacklevel=4,
    )
    return found


def _matched(
    target: Checkpoint,
    draft: Checkpoint,
    target_tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase,
) -> SharedVocab:
    """Matches the tokens of two tokenizers by their bytes. Special tokens: see `_special_pairs`."""
    p_rows, q_rows = target.spec.vocab_size, draft.spec.vocab_size
    p_bytes = {token: text for token, text in token_bytes(target_tokenizer).items() if token < p_rows}
    q_bytes = {token: text for token, text in token_bytes(draft_tokenizer).items() if token < q_rows}
    p_ids, q_ids = _by_bytes(p_bytes, target_tokenizer), _by_bytes(q_bytes, draft_tokenizer)
    target_ids = torch.full((q_rows,), -1, dtype=torch.int64, device="cpu")
    shown = torch.zeros(p_rows, dtype=torch.int64, device="cpu")
    for token, text in p_bytes.items():
        shown[token] = _last_token(text, q_ids)
    specials = _special_pairs(target_tokenizer, draft_tokenizer)
    ordinary = [(p_ids[text], token) for text, token in q_ids.items() if text in p_ids]
    for of_target, of_draft in [*ordinary, *((p, q) for p, q in specials if p < p_rows and q < q_rows)]:
        target_ids[of_draft], shown[of_target] = of_target, of_draft
    return SharedVocab(p_rows, target_ids, shown)


def _by_bytes(texts: Mapping[int, bytes], tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """Returns the bytes of each token -> id of the token.

    If several tokens have the same bytes, one that is not a byte token (`<0xE9>`) is taken, as the tokenizer does.

    Args:
        texts: bytes of each token id.
        tokenizer: tokenizer of these tokens.
    """
    names = dict(zip(texts, tokenizer.convert_ids_to_tokens(list(texts)), strict=True))
    found: dict[bytes, int] = {}
    for token in sorted(texts, key=lambda each: (BYTE_TOKEN.fullmatch(names[each]) is not None, each)):
        if texts[token]:
            found.setdefault(texts[token], token)
    return found


def _last_token(text: bytes, ids: Mapping[bytes, int]) -> int:
    """Returns the id of the longest token with which `text` ends. 0 if there is none.

    `ids`: bytes of each token -> token id.
    """
    return next((ids[text[start:]] for start in range(len(text)) if text[start:] in ids), 0)


def _special_pairs(
    target_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, int]]:
    """Returns pairs (target id, draft id) of special tokens that have the same text.

    The two EOS tokens are also a pair, if neither of them is in another pair.
    """
    p_special, q_special = special_tokens(target_tokenizer), special_tokens(draft_tokenizer)
    pairs = [(token, q_special[text]) for text, token in p_special.items() if text in q_special]
    p_end, q_end = target_tokenizer.eos_token_id, draft_tokenizer.eos_token_id
    both_special = p_end in p_special.values() and q_end in q_special.values()
    if both_special and all(p_end != p and q_end != q for p, q in pairs):
        pairs.append((p_end, q_end))
    return pairs


def _same_source(target: Checkpoint, draft: Checkpoint) -> bool:
    if target.module is not None or draft.module is not None:
        return target.module is draft.module
    if target.gguf is not None and draft.gguf is not None:
        return target.gguf.samefile(draft.gguf)
    if target.directory is None or draft.directory is None:
        return False
    return target.directory.samefile(draft.directory)


def _ids_of_equal_files(target: Checkpoint, draft: Checkpoint) -> list[int]:
    """Reads all token ids from tokenizer.json, if the tokenizer files of both checkpoints are equal.

    This is faster than loading two tokenizers. Returns an empty list if the files differ, or have an unknown format.
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
        stacklevel=5,
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
