"""Compiles grammars and computes token masks with llguidance. Only this file imports llguidance, at the first use.

A mask depends on the grammar, the vocabulary and the text so far.
"""

from __future__ import annotations

import copy
import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from fastspec.grammar.row import RowGrammar
from fastspec.grammar.spec import JSON_SCHEMA, REGEX, GrammarError, GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 64  # number of compiled grammars that are cached
_QUOTED = 300  # longest quote of the library's message or of a grammar in an error, in characters
# values of a schema's `format` that llguidance enforces
_FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"]
)
_BY_NAME: Final = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "schemas"])
_VALUES: Final = frozenset(["const", "enum", "default", "examples"])  # keywords whose values are data, not schemas


class Grammars:
    """Cache of compiled grammars over one vocabulary. The method `row` may be called from any thread.

    Args:
        vocab_size: number of logits of the target.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        # the last tokenizer: transformers' and llguidance's object
        self._tokenizer: tuple[Any, LLTokenizer] | None = None
        self._dropped: list[int] = []  # result of `_dropped_blanks` for that tokenizer
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def row(self, spec: GrammarSpec, tokenizer: Any, prompt: list[int], stop_ids: tuple[int, ...]) -> RowGrammar:
        """Creates the grammar state of a row that has no new tokens yet.

        Args:
            spec: the grammar that the row's text must follow.
            tokenizer: the target's tokenizer. None: the checkpoint has none.
            prompt: token ids of the row's prompt.
            stop_ids: token ids that end the row. They are allowed where the text is complete.

        Raises:
            GrammarError: the grammar cannot be parsed or allows no text, there is no tokenizer, or llguidance is not
                installed or does not support the tokenizer.
        """
        if tokenizer is None:
            raise GrammarError(
                f"{spec.kind} needs a tokenizer, and the target's checkpoint has none; pass tokenizer=..."
            )
        with self._lock:
            vocabulary = self._vocabulary(spec, tokenizer)
            matcher, dropped = self._matcher(spec, vocabulary).deep_copy(), self._dropped
        ends = [token for token in vocabulary.eos_tokens if token < self.vocab_size]
        row = RowGrammar(matcher, self.vocab_size, stop_ids, ends, prompt, dropped)
        if not row.possible:
            raise GrammarError(
                f"{spec.kind} allows no text of this vocabulary's tokens, got {_short(spec.text)}; loosen it"
            )
        return row

    def _matcher(self, spec: GrammarSpec, vocabulary: LLTokenizer) -> LLMatcher:
        """Returns the cached matcher of the compiled grammar, in its start state. It must be copied before use."""
        if spec not in self._compiled:
            self._compiled[spec] = _compiled(spec, vocabulary)
        self._compiled.move_to_end(spec)
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[spec]

    def _vocabulary(self, spec: GrammarSpec, tokenizer: Any) -> LLTokenizer:
        if self._tokenizer is None or self._tokenizer[0] is not tokenizer:
            vocabulary = _vocabulary(spec, tokenizer, self.vocab_size)
            self._tokenizer, self._dropped = (tokenizer, vocabulary), _dropped_blanks(tokenizer, vocabulary)
            self._compiled.clear()
        return self._tokenizer[1]


def _vocabulary(spec: GrammarSpec, tokenizer: Any, vocab_size: int) -> LLTokenizer:
    """Converts a transformers tokenizer to llguidance's."""
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise GrammarError(spec.missing_library) from None
    try:
        described = _described(tokenizer)
        return LLTokenizer(described, n_vocab=max(vocab_size, len(tokenizer)), eos_token=tokenizer.eos_token_id)
    except (ValueError, RuntimeError, AttributeError) as error:
        raise GrammarError(
            f"{spec.kind} needs a fast tokenizer of bytes or with byte fallback; llguidance cannot read this "
            f"{type(tokenizer).__name__}: {_short(str(error))}"
        ) from None


def _described(tokenizer: Any) -> str:
    """Returns a fast tokenizer as JSON, with its `Metaspace` decoder replaced by `Replace`.

    llguidance computes the bytes of tokens from the decoder. It supports `Replace`, which turns the mark for a blank
    into a blank. It does not support `Metaspace`, and would treat that mark as a character of the text.
    """
    backend = copy.copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    described: dict[str, Any] = json.loads(backend.to_str())
    decoder = described.get("decoder") or {}
    parts = decoder.get("decoders", [decoder]) if decoder.get("type") in ("Sequence", "Metaspace") else []
    if any(part.get("type") == "Metaspace" for part in parts):
        parts = [_blanks(part) if part.get("type") == "Metaspace" else part for part in parts]
        if all(part.get("type") != "ByteFallback" for part in parts):
            parts = [*parts, {"type": "ByteFallback"}]
        described["decoder"] = {"type": "Sequence", "decoders": [*parts, {"type": "Fuse"}]}
    return json.dumps(described)


def _blanks(metaspace: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": metaspace["replacement"]}, "content": " "}


def _dropped_blanks(tokenizer: Any, vocabulary: LLTokenizer) -> list[int]:
    """Returns the ids of tokens whose leading blank the tokenizer's `decode` drops at the start of a text.

    Empty if it drops none.
    """
    blank = [token for token in range(vocabulary.vocab_size) if vocabulary.decode_bytes([token])[:1] == b" "]
    probe = next((token for token in blank if len(vocabulary.decode_bytes([token])) > 1), None)
    if probe is None or probe >= len(tokenizer):
        return []
    text = str(tokenizer.decode([probe], clean_up_tokenization_spaces=False))
    return [] if text[:1] == " " else blank


def _compiled(spec: GrammarSpec, vocabulary: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    try:
        spec.text.encode("utf-8")
    except UnicodeEncodeError as error:
        reason = f"character {error.start} is {spec.text[error.start]!r}, which is no text"
        raise GrammarError(f"{spec.kind} cannot be used: {reason}; write it in UTF-8") from None
    if spec.kind == JSON_SCHEMA:
        source = LLMatcher.grammar_from_json_schema(json.dumps(constraints(json.loads(spec.text))))
    elif spec.kind == REGEX:
        source = LLMatcher.grammar_from_regex(spec.text)
    else:
        source = LLMatcher.grammar_from_lark(spec.text)
    matcher = LLMatcher(vocabulary, source, log_level=0)
    if matcher.is_error():
        reason = _short(matcher.get_error().strip())
        raise GrammarError(f"{spec.kind} cannot be used: {reason}. Got {_short(spec.text)}; mend it")
    return matcher


def constraints(schema: Any) -> Any:
    """Returns a copy of a JSON schema without keywords that have no effect. llguidance would refuse these keywords."""
    if isinstance(schema, list):
        return [constraints(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if not _is_annotation(name, value)}
    for name, value in kept.items():
        if name in _BY_NAME and isinstance(value, dict):  # the keys of this value are property names, not keywords
            kept[name] = {key: constraints(each) for key, each in value.items()}
        elif name not in _VALUES:
            kept[name] = constraints(value)
    return kept


def _is_annotation(name: str, value: Any) -> bool:
    """True if a keyword with this value has no effect on the text.

    An unknown `format` is an annotation (JSON Schema 2020-12, Validation, 7.2.1). The library zod writes
    `propertyNames` for every record, but property names are always strings.
    """
    if name == "format":
        return isinstance(value, str) and value not in _FORMATS
    if name == "uniqueItems":
        return value is False
    return name == "propertyNames" and value in ({}, {"type": "string"}, True)


def _short(text: str) -> str:
    return text if len(text) <= _QUOTED else text[:_QUOTED] + " ..."
