"""Batches of prompts through Ray Data, real Ray: every row once, with the text of `generate`, whoever dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="runs with `make test-integrations`")

from fastspec import FastSpecGenerator, UnsupportedOption, demo_pair  # noqa: E402
from fastspec.integrations.ray import Generate  # noqa: E402

TARGET, DRAFT = map(str, demo_pair())
OPTIONS = {"max_new_tokens": 12, "do_sample": True, "top_p": 0.9}
GENERATOR = {"device": "cpu", "max_length": 64, "max_batch_size": 4}
ROWS = [
    {"id": index, "prompt": f"def f{index}(x):\n", "seed": index, "temperature": [0.0, 0.8][index % 2]}
    for index in range(24)
]


class DiesOnce(Generate):
    """Kills its process in the middle of the data set, once."""

    def __init__(self, *models: str, mark: str, **options: Any) -> None:
        self._mark = Path(mark)
        super().__init__(*models, **options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if 13 in batch["id"] and not self._mark.exists():
            self._mark.write_text("died")
            os._exit(1)
        return super().__call__(batch)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # logical ones: two replicas, and the tasks that hand them their rows
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def meant() -> dict[int, list[int]]:
    """The new tokens of every row, one prompt at a time."""
    with FastSpecGenerator(TARGET, DRAFT, progress=False, **GENERATOR) as generator:
        found = {}
        for row in ROWS:
            options = {**OPTIONS, "seed": [row["seed"]], "temperature": row["temperature"]}
            ids = generator.tokenizer(row["prompt"])["input_ids"]
            found[row["id"]] = generator.generate([ids], return_dict_in_generate=True, **options).new_tokens[0]
    return found


def mapped(generate: type, **more: Any) -> list[dict[str, Any]]:
    arguments = {"option_columns": ("seed", "temperature"), "options": OPTIONS, "generator_options": GENERATOR}
    data = ray.data.from_items(ROWS).repartition(6)
    return data.map_batches(
        generate,
        fn_constructor_args=(TARGET, DRAFT),
        fn_constructor_kwargs={**arguments, **more},
        batch_size=4,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    ).take_all()


@pytest.mark.parametrize("dies", [False, True])
def test_every_row_comes_once_with_its_own_text(
    cluster: None, meant: dict[int, list[int]], tmp_path: Path, dies: bool
) -> None:
    mark = tmp_path / "mark"
    rows = mapped(DiesOnce, mark=str(mark)) if dies else mapped(Generate)
    assert mark.exists() == dies
    assert sorted(row["id"] for row in rows) == [row["id"] for row in ROWS]
    for row in rows:
        assert row["generated_ids"].tolist() == meant[row["id"]], row["id"]
        assert row["new_tokens"] == len(meant[row["id"]])
        assert row["new_tokens"] <= row["target_steps"] + row["accepted"]
        assert row["finish_reason"] in ("length", "stop")
        assert row["generated_text"]


def test_a_batch_keeps_its_columns_and_takes_ids_too() -> None:
    generate = Generate(TARGET, DRAFT, prompt_column="ids", options={"max_new_tokens": 3}, generator_options=GENERATOR)
    ids = np.empty(2, dtype=object)
    ids[0], ids[1] = np.asarray([5, 6, 7]), np.asarray([8, 9])
    out = generate({"ids": ids, "other": np.asarray(["a", "b"])})
    assert out["other"].tolist() == ["a", "b"]
    assert [len(each) for each in out["generated_ids"]] == [3, 3]
    with pytest.raises(KeyError, match="no column"):
        generate({"prompt": np.asarray(["a"])})


def test_wrong_options_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(UnsupportedOption, match="options max_tokens are not known"):
        Generate("no such directory", options={"max_tokens": 3})
    with pytest.raises(UnsupportedOption, match="option_columns max_new_tokens: no row has such an option"):
        Generate("no such directory", option_columns=("max_new_tokens",))
    with pytest.raises(UnsupportedOption, match="seed: given for all rows and as a column"):
        Generate("no such directory", option_columns=("seed",), options={"seed": 1})
