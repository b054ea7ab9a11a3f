"""Each keyword of `generate` is one row of OPTIONS, and the parser, front ends, ranks, types and docs have that row."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

from fastspec import FastSpecGenerator
from fastspec.cli import app as cli
from fastspec.inputs import options
from fastspec.inputs.options import Options
from fastspec.inputs.row_options import RowOptions
from fastspec.inputs.table import (
    ADVICE,
    ARGUMENTS,
    IGNORED,
    NUMBERS,
    OFF,
    OPTIONS,
    ROWS,
    Flag,
    GenerateOptions,
    keywords_of,
)
from fastspec.server.errors import _FIELDS
from fastspec.server.fields import Chat, Completion
from fastspec.state import MAX_STOP_IDS, MAX_TOP_LOGPROBS, DecodeState
from tests.helpers.options import resolve

ROOT = Path(__file__).parents[2]
SERVED = {*Completion.model_fields, *Chat.model_fields}


def test_the_parser_takes_what_the_table_has_and_nothing_else() -> None:
    assert len(ROWS) == len(OPTIONS)
    assert {*options.SUPPORTED, *options.OWN} == ROWS.keys()
    assert not ROWS.keys() & {*IGNORED, *OFF, *ADVICE, *ARGUMENTS}


def test_every_keyword_has_its_type() -> None:
    assert {*GenerateOptions.__annotations__} - {"inputs"} == ROWS.keys() - {"return_dict_in_generate"}
    for name in ("stream", "submit", "calibrate"):
        annotation = inspect.signature(getattr(FastSpecGenerator, name)).parameters["keywords"].annotation
        assert annotation == "Unpack[GenerateOptions]"


def test_every_keyword_has_its_flag_or_says_why_not() -> None:
    flags = inspect.signature(cli.generate).parameters
    for row in OPTIONS:
        if isinstance(row.flag, Flag):
            assert row.keyword in flags
            assert row.flag.help.endswith(".")
        else:
            assert row.flag, row.keyword


def test_every_keyword_has_its_field_or_says_why_not() -> None:
    for row in OPTIONS:
        assert row.field.removeprefix("-"), row.keyword
        assert row.field.startswith("-") or row.field in SERVED, row.keyword
        assert (row.keyword in _FIELDS) == (not row.field.startswith("-"))


def test_what_options_hold_is_called_by_its_keyword() -> None:
    held = {field.name for kind in (Options, RowOptions) for field in fields(kind)} - {"rows", "given"}  # of `score`
    assert {field for row in OPTIONS for field in row.sets} == held
    assert keywords_of("stop_ids") == "eos_token_id"
    assert keywords_of("grammar") == "json_schema, regex or grammar"


def test_every_number_fills_a_buffer_and_has_its_neutral_value() -> None:
    buffers = {field.name for field in fields(DecodeState)}
    assert {number.fills for number in NUMBERS.values()} <= buffers
    (row,) = resolve(do_sample=True, **dict.fromkeys(NUMBERS)).rows
    for name, number in NUMBERS.items():
        assert number.low <= number.neutral <= number.high
        assert getattr(row, name) == number.neutral
    assert resolve(do_sample=True).rows[0].top_k == 50, "transformers' default"
    assert resolve().max_new_tokens == 20


def test_limits_of_the_state_are_those_of_the_table() -> None:
    assert str(MAX_STOP_IDS) in ROWS["eos_token_id"].takes
    assert str(MAX_TOP_LOGPROBS) in ROWS["logprobs"].takes


def test_every_keyword_is_on_the_page() -> None:
    page = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    assert [name for name in (*ROWS, *OFF, *ADVICE, *ARGUMENTS, *IGNORED) if f"`{name}`" not in page] == []
