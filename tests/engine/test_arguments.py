"""The constructor's arguments on their way: one list of names, one list of defaults."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from fastspec import FastSpecGenerator, UnsupportedOption, demo_pair
from fastspec.config import Config, PlanOptions

NO_MEMORY = {"release_source", "prefill_budget", "exact", "graphs", "compile", "nvtx", "progress"}
OF_RANKS = {"tensor_parallel", "draft_tensor_parallel"}


def test_the_constructor_its_plan_and_the_config_have_the_same_arguments_and_defaults() -> None:
    parameters = inspect.signature(FastSpecGenerator).parameters.values()
    constructor = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert constructor == {each.name: each.default for each in fields(Config)}
    assert PlanOptions.__annotations__.keys() == constructor.keys() - NO_MEMORY - OF_RANKS


def test_ranks_compare_every_argument_but_those_of_one_process() -> None:
    of_one_process = {"device", "progress", "nvtx", "release_source"}
    assert Config().shared().keys() == {each.name for each in fields(Config)} - of_one_process - OF_RANKS


@pytest.mark.parametrize("name", sorted(NO_MEMORY | OF_RANKS))
def test_a_plan_takes_no_argument_without_memory(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}', which takes no memory"):
        FastSpecGenerator.plan(*demo_pair(), **{name: None})  # type: ignore[misc]


@pytest.mark.parametrize("name", ["prefix_cache", "exact", "graphs", "compile", "release_source", "nvtx"])
def test_flags_are_bools(name: str) -> None:
    """A text such as "no", of an environment or a YAML file, would be true."""
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
        FastSpecGenerator(*demo_pair(), device="cpu", progress=False, **{name: "no"})


def test_progress_is_a_bool_or_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    FastSpecGenerator(*demo_pair(), device="cpu", max_length=64, progress=told.append).close()
    assert told[0].startswith("max_length = 64 (as asked); ")
    assert "target weights" in told[0]
    assert capsys.readouterr().err == ""  # no bars
    with pytest.raises(ValueError, match="progress must be True, False or a function of a line, got 'no'"):
        FastSpecGenerator(*demo_pair(), device="cpu", progress="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["prefix_cache", "exact", "compile"])
def test_none_is_no_way_to_say_false(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be True or False, got None; leave it out"):
        FastSpecGenerator(*demo_pair(), device="cpu", progress=False, **{name: None})


def test_a_revision_without_a_draft_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="draft_revision='main', and there is no draft"):
        FastSpecGenerator.plan(demo_pair()[0], draft_revision="main")


def test_a_plan_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'page_sise'"):
        FastSpecGenerator.plan(*demo_pair(), page_sise=3)  # type: ignore[call-arg]
