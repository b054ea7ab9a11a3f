"""lm-evaluation-harness, the real one: the model class and the server give the results of its `hf` model in fp32."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="runs with `make test-integrations`")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from fastspec import demo_pair  # noqa: E402
from fastspec.integrations.lm_eval import FastSpecLM  # noqa: E402
from tests.server.conftest import running  # noqa: E402

TARGET, DRAFT = map(str, demo_pair())
LENGTH = 512
PAIRS = [
    ("def add(a, b):\n    return", " a + b"),
    ("def add(a, b):\n    return", " a - b"),
    ("", "import os"),
    ("for i in range(10):", "\n    print(i)"),
    ("class Point:\n    ", "def __init__(self, x, y):"),
]
TEXTS = ["def f(x):\n    return x + 1\n", "import os\n" * 300, "x"]  # the second is longer than a window


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return HFLM(pretrained=TARGET, dtype="float32", device="cpu", max_length=LENGTH - 1, batch_size=1)


@pytest.fixture(scope="module", params=["plain", "drafts"])
def ours(request: pytest.FixtureRequest) -> Iterator[FastSpecLM]:
    draft = DRAFT if request.param == "drafts" else None
    made = FastSpecLM(TARGET, draft, batch_size=3, dtype="float32", device="cpu", max_length=LENGTH)
    yield made
    made.generator.close()


def test_loglikelihood(ours: FastSpecLM, theirs: Any) -> None:
    asked = instances("loglikelihood", [*PAIRS, ("a b c " * 400, " d")])
    wanted, found = theirs.loglikelihood(asked), ours.loglikelihood(asked)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], abs=2e-3)
    assert ours.loglikelihood(asked[::-1])[::-1] == found, "results do not depend on the batch"


def test_loglikelihood_rolling(ours: FastSpecLM, theirs: Any) -> None:
    asked = instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    wanted, found = theirs.loglikelihood_rolling(asked), ours.loglikelihood_rolling(asked)
    assert found == pytest.approx(wanted, abs=1e-2)
    assert ours.loglikelihood_rolling(asked[1:2]) == found[1:2]


def test_generate_until(ours: FastSpecLM, theirs: Any) -> None:
    options = {"until": ["\n\n"], "max_gen_toks": 32, "do_sample": False, "temperature": 0.0}
    asked = instances("generate_until", [(context, options) for context, _ in PAIRS if context])
    asked += instances("generate_until", [("def g():", {**options, "until": ["return"]})])
    assert ours.generate_until(asked) == theirs.generate_until(asked)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small tasks from local files: multiple choice, and continuation to the end of a line."""
    path = tmp_path_factory.mktemp("task")
    names = ["x", "value", "n", "item", "total", "name", "path", "line"]
    rows = [
        {"question": f"def f({a}, {b}):\n    return {a} + ", "choices": [b, a, "self", "0"], "answer": 0}
        for a in names
        for b in names
        if a != b
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {path}/rows.jsonl\ntest_split: test\n"
    (path / "names.yaml").write_text(
        "task: local_names\n" + shared + "output_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "target_delimiter: ''\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\n"
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    (path / "lines.yaml").write_text(
        "task: local_lines\n" + shared + "output_type: generate_until\ndoc_to_text: '{{question}}'\n"
        "doc_to_target: '{{choices[0]}}'\ngeneration_kwargs:\n  until: ['\\n']\n  max_gen_toks: 8\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    return path


def test_accuracies_on_local_tasks_are_those_of_hf(ours: FastSpecLM, theirs: Any, task: Path) -> None:
    manager = TaskManager(include_path=str(task), include_defaults=False)
    tables = [
        lm_eval.simple_evaluate(
            model=model, tasks=["local_names", "local_lines"], task_manager=manager, bootstrap_iters=0
        )
        for model in (theirs, ours)
    ]
    wanted, found = ({name: _numbers(each) for name, each in table["results"].items()} for table in tables)
    assert found == wanted
    assert 0.0 < found["local_names"]["acc,none"] < 1.0


def _numbers(results: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in results.items() if isinstance(value, float)}


def test_the_command_finds_the_model(task: Path, tmp_path: Path) -> None:
    """`python -m fastspec.integrations.lm_eval`, with batch sizes by memory."""
    arguments = f"pretrained={TARGET},draft={DRAFT},dtype=float32,max_length={LENGTH}"
    command = [sys.executable, "-m", "fastspec.integrations.lm_eval", "run", "--model", "fastspec"]
    command += ["--model_args", arguments, "--tasks", "local_names", "--include_path", str(task), "--limit", "6"]
    command += ["--batch_size", "auto", "--device", "cpu", "--output_path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "local_names" in done.stdout
    assert list(tmp_path.rglob("results*.json"))


def test_a_server_that_is_scored_through_its_protocol(ours: FastSpecLM, task: Path) -> None:
    """`local-completions`: loglikelihood, rolling and generate_until over HTTP, as by the model class."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with running(ours.generator, name="demo") as served:
        client = LocalCompletionsAPI(
            base_url=f"{served.url}/completions",
            model="demo",
            tokenizer=TARGET,
            tokenizer_backend="huggingface",
            max_length=LENGTH,
            max_retries=1,
        )
        pairs = instances("loglikelihood", PAIRS)
        found, wanted = client.loglikelihood(pairs), ours.loglikelihood(pairs)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
        assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], abs=2e-3)
        texts = instances("loglikelihood_rolling", [(TEXTS[0],), (TEXTS[2],)])  # its windows of long ones are others
        assert client.loglikelihood_rolling(texts) == pytest.approx(ours.loglikelihood_rolling(texts), abs=1e-2)
        options = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}
        asked = instances("generate_until", [(context, options) for context, _ in PAIRS if context])
        assert client.generate_until(asked) == ours.generate_until(asked)
