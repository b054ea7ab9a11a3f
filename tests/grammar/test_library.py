"""What cannot be used is refused by name, before anything runs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fastspec.errors import UnsupportedOption
from fastspec.grammar.library import Grammars
from fastspec.grammar.spec import GrammarSpec
from tests.helpers.tokenizers import byte_tokenizer

STRICT = {"type": "object", "required": ["a"]}


class Pydantic:
    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return STRICT


@pytest.mark.parametrize("schema", [STRICT, '{"type": "object", "required": ["a"]}', Pydantic], ids=repr)
def test_a_schema_is_a_dict_or_json_or_a_class(schema: Any) -> None:
    spec = GrammarSpec.read({"json_schema": schema, "regex": None})
    assert spec == GrammarSpec("json_schema", '{"type": "object", "required": ["a"]}')
    assert GrammarSpec.read({"json_schema": None}) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"json_schema": STRICT, "regex": "a"}, "json_schema and regex are given for one prompt"),
        ({"json_schema": 3}, "json_schema must be a JSON schema .*got 3"),
        ({"json_schema": "{"}, "json_schema must be a JSON schema, got a text that is not JSON"),
        ({"json_schema": {"a": {1}}}, "json_schema must be .*a dict that cannot be written as JSON"),
        ({"regex": ""}, "regex must be a text, got ''"),
        ({"grammar": 3}, "grammar must be a text, got 3"),
    ],
)
def test_values_that_are_none(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GrammarSpec.read(given)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (GrammarSpec("regex", "a("), "regex cannot be used: .*unclosed group"),
        (GrammarSpec("regex", "a\udcff"), "regex cannot be used: character 1 is '.udcff', which is no text"),
        (GrammarSpec("json_schema", '{"type": "nonsense"}'), "json_schema cannot be used: Invalid type: nonsense"),
        (GrammarSpec("json_schema", '{"enum": []}'), "json_schema "),
        (GrammarSpec("grammar", "start: FOO"), "grammar cannot be used: .*unknown name"),
        (GrammarSpec("regex", "[a&&b]"), "regex "),
    ],
)
def test_grammars_that_cannot_be_used(spec: GrammarSpec, says: str) -> None:
    grammars = Grammars(259)
    with pytest.raises(ValueError, match=f"(?s)^{says}"):
        grammars.row(spec, byte_tokenizer(), [], ())
    assert grammars.row(GrammarSpec("regex", "a"), byte_tokenizer(), [], ()).possible, "the others stay usable"


def test_a_vocabulary_that_cannot_write_the_text() -> None:
    with pytest.raises(ValueError, match=r"regex allows no text of this vocabulary's tokens, got 'z\+'|got z\+"):
        Grammars(10).row(GrammarSpec("regex", "z+"), byte_tokenizer(), [], ())


def test_no_tokenizer_or_one_that_cannot_be_read() -> None:
    spec = GrammarSpec("regex", "a")
    with pytest.raises(ValueError, match="regex needs a tokenizer"):
        Grammars(3).row(spec, None, [], ())
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(UnsupportedOption, match="regex needs a fast tokenizer"):
        Grammars(3).row(spec, words, [], ())


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastspec.grammar.library as library

    made = []
    compiled = library._compiled
    monkeypatch.setattr(library, "_compiled", lambda *given: made.append(given) or compiled(*given))
    grammars, tokenizer = Grammars(259), byte_tokenizer()
    first, second = (grammars.row(GrammarSpec("regex", "ab"), tokenizer, [], ()) for _ in range(2))
    first.advance(first.next_step(1).drafts)
    assert second.next_step(2).drafts == grammars.row(GrammarSpec("regex", "ab"), tokenizer, [], ()).next_step(2).drafts
    assert len(made) == 1


def test_the_library_comes_in_when_it_is_asked_for() -> None:
    code = "import sys, fastspec.generator, fastspec.server.app; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_llguidance_a_grammar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(UnsupportedOption, match=r"regex needs the package llguidance.*pip install 'llguidance>=1\.9'"):
        Grammars(259).row(GrammarSpec("regex", "a"), byte_tokenizer(), [], ())


FORMATS = ["path", "password", "binary", "base64", "ipvanyaddress", "ipv4network", "int32", "decimal", "byte", "regex"]


@pytest.mark.parametrize("where", ["property", "items", "definition", "branch"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_format_that_is_not_known_constrains_nothing(form: str, where: str) -> None:
    inner = {"type": "integer" if form == "int32" else "string", "format": form}
    schema: dict[str, Any] = {
        "property": {"type": "object", "properties": {"format": inner}, "required": ["format"]},
        "items": {"type": "array", "items": inner, "minItems": 1},
        "definition": {"$defs": {"D": inner}, "$ref": "#/$defs/D"},
        "branch": {"anyOf": [inner, {"type": "null"}]},
    }[where]
    plain = json.loads(json.dumps(schema).replace(f', "format": "{form}"', ""))
    row, other = (
        Grammars(259).row(GrammarSpec("json_schema", json.dumps(each)), byte_tokenizer(), [], ())
        for each in (schema, plain)
    )
    assert (row.next_step(0).masks == other.next_step(0).masks).all()


def test_a_known_format_constrains_and_data_are_no_schemas() -> None:
    known = GrammarSpec("json_schema", json.dumps({"type": "string", "format": "uuid"}))
    data = GrammarSpec("json_schema", json.dumps({"const": {"format": "path"}}))
    tokenizer = byte_tokenizer()
    quote, letter = tokenizer.convert_tokens_to_ids('"'), tokenizer.convert_tokens_to_ids("z")
    row = Grammars(259).row(known, tokenizer, [], ())
    row.advance([quote])
    assert not row.next_step(0).masks[0, letter // 32] >> letter % 32 & 1
    row = Grammars(259).row(data, tokenizer, [], ())
    for token in tokenizer('{"format": "path"}')["input_ids"]:
        assert row.next_step(0).masks[0, token // 32] >> token % 32 & 1
        row.advance([token])
