"""The constructor's arguments on their way: one list of names, one list of defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from fastspec import FastSpecGenerator, UnsupportedOption, demo_pair
from fastspec.engine.arguments import PlanOptions
from fastspec.engine.settings import Caches, settings_of


def defaults(function: Any) -> dict[str, Any]:
    return {name: each.default for name, each in inspect.signature(function).parameters.items()}


def test_a_plan_has_the_defaults_of_a_generator() -> None:
    ours, theirs = defaults(FastSpecGenerator), {**defaults(settings_of), **Caches._field_defaults}
    assert ours.keys() >= PlanOptions.__annotations__.keys()
    shared = ours.keys() & theirs.keys() - {"target", "draft"}
    assert len(shared) == 13
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    others = {name: ours[name] for name in PlanOptions.__annotations__ if name not in theirs and ours[name] is not None}
    assert others == {"draft_quantization": "auto"}


@pytest.mark.parametrize("name", ["prefix_cache", "exact", "graphs", "compile", "release_source", "nvtx"])
def test_flags_are_bools(name: str) -> None:
    """A text such as "no", of an environment or a YAML file, would be true."""
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
        FastSpecGenerator(*demo_pair(), device="cpu", progress=False, **{name: "no"})


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
