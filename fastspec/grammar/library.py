"""Compiles grammars and computes token masks with llguidance. Only this file imports it, on first use.

A mask is a function of the grammar, the vocabulary and the text so far.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from fastspec.errors import UnsupportedOption
from fastspec.grammar.row import RowGrammar
from fastspec.grammar.spec import JSON_SCHEMA, REGEX, GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 64  # compiled grammars
_QUOTED = 300  # characters of the library's message, or of a grammar, that an error quotes


class Grammars:
    """Grammars of one vocabulary, each compiled once. Any thread may use them.

    Args:
        vocab_size: width of the target's logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: tuple[Any, LLTokenizer] | None = None  # the last tokenizer, of transformers and of llguidance
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def row(self, spec: GrammarSpec, tokenizer: Any, prompt: list[int], stop_ids: tuple[int, ...]) -> RowGrammar:
        """Creates the grammar state of a row without tokens.

        Args:
            spec: the grammar that its text follows.
            tokenizer: the target's, of transformers; None: the checkpoint brings none.
            prompt: token ids of the row's prompt.
            stop_ids: end the row; they are allowed where the text is complete.

        Raises:
            ValueError: the grammar cannot be read, or allows no text, or there is no tokenizer.
            UnsupportedOption: the library is not installed, or cannot read this tokenizer.
        """
        if tokenizer is None:
            raise ValueError(
                f"{spec.kind} needs a tokenizer, and the target's checkpoint brings none; pass tokenizer=..."
            )
        with self._lock:
            vocabulary = self._vocabulary(spec, tokenizer)
            matcher = self._matcher(spec, vocabulary).deep_copy()
        ends = [token for token in vocabulary.eos_tokens if token < self._vocab_size]
        row = RowGrammar(matcher, self._vocab_size, stop_ids, ends, prompt)
        if not row.possible:
            raise ValueError(
                f"{spec.kind} allows no text that this vocabulary can write, got {_short(spec.text)}; loosen it"
            )
        return row

    def _matcher(self, spec: GrammarSpec, vocabulary: LLTokenizer) -> LLMatcher:
        """Compiled grammar in its start state."""
        if spec not in self._compiled:
            self._compiled[spec] = _compiled(spec, vocabulary)
        self._compiled.move_to_end(spec)
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[spec]

    def _vocabulary(self, spec: GrammarSpec, tokenizer: Any) -> LLTokenizer:
        if self._tokenizer is None or self._tokenizer[0] is not tokenizer:
            self._tokenizer = tokenizer, _vocabulary(spec, tokenizer, self._vocab_size)
            self._compiled.clear()
        return self._tokenizer[1]


def _vocabulary(spec: GrammarSpec, tokenizer: Any, vocab_size: int) -> LLTokenizer:
    """Converts the tokenizer to llguidance's."""
    try:
        from llguidance.hf import from_tokenizer
    except ImportError:
        raise UnsupportedOption(spec.missing_library) from None
    try:
        return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)))
    except (ValueError, RuntimeError) as error:
        raise UnsupportedOption(
            f"{spec.kind} needs a fast tokenizer of bytes or with byte fallback; llguidance cannot read this "
            f"{type(tokenizer).__name__}: {_short(str(error))}"
        ) from None


def _compiled(spec: GrammarSpec, vocabulary: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    try:
        spec.text.encode("utf-8")
    except UnicodeEncodeError as error:
        reason = f"character {error.start} is {spec.text[error.start]!r}, which is no text"
        raise ValueError(f"{spec.kind} cannot be used: {reason}; write it in UTF-8") from None
    if spec.kind == JSON_SCHEMA:
        source = LLMatcher.grammar_from_json_schema(spec.text)
    elif spec.kind == REGEX:
        source = LLMatcher.grammar_from_regex(spec.text)
    else:
        source = LLMatcher.grammar_from_lark(spec.text)
    matcher = LLMatcher(vocabulary, source, log_level=0)
    if matcher.is_error():
        reason = _short(matcher.get_error().strip())
        raise ValueError(f"{spec.kind} cannot be used: {reason}. Got {_short(spec.text)}; mend it")
    return matcher


def _short(text: str) -> str:
    return text if len(text) <= _QUOTED else text[:_QUOTED] + " ..."
