"""The gate: finds out if one tree is slower than another. Both are measured in turn, in processes of their own.

A step's time is compared as a ratio call by call, so that a machine that slows down slows both. The limit is 3%, or
three times the spread where that is more; the spread is the standard error of the median ratio, from the quartiles.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from transformers import AutoConfig, PretrainedConfig

from fastspec import demo_pair
from perf.models import add_pair_options
from perf.records import ROOT, Row
from perf.timing import NOISE_FLOOR, read_ceiling, summarise
from perf.workloads import OWN, WORKLOADS, Bytes, step_bytes

REGRESSION, OK, FASTER, UNDECIDED = "REGRESSION", "ok", "faster", "UNDECIDED: too noisy"
SPREADS = 3  # spreads beyond which a difference counts
LEAST_ROUNDS = 5
SHARP, BLUNT = 0.05, 0.10  # with a limit above the first more rounds are made; above the second nothing is decided
# standard error of a median over the interquartile range, for samples that are about normal
MEDIAN_ERROR = math.sqrt(math.pi / 2) / 1.349
QUICK_TESTS = (
    "python -m pytest -q -x -p no:cacheprovider tests/sampling/test_verify.py tests/scheduling/test_generator.py"
)


class Refused(SystemExit):
    """Nothing is timed; the message says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The candidate compared with the base.

    Attributes:
        ratio: median over rounds. spread: its standard error. limit: how far from 1 it may lie.
    """

    ratio: float
    spread: float
    limit: float

    @classmethod
    def of(cls, base: Sequence[float], candidate: Sequence[float]) -> Verdict:
        """The verdict on samples taken in turn."""
        ratios = [after / before for before, after in zip(base, candidate, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        spread = MEDIAN_ERROR * (high - low) / math.sqrt(len(ratios))
        return cls(statistics.median(ratios), spread, max(NOISE_FLOOR, SPREADS * spread))

    @property
    def above(self) -> bool:
        """True if the candidate's figure is larger, beyond the limit."""
        return self.ratio > 1 + self.limit

    @property
    def below(self) -> bool:
        """True if the candidate's figure is smaller, beyond the limit."""
        return self.ratio < 1 - self.limit


class Side:
    """The process of one tree.

    Args:
        name: "base" or "candidate".
        tree: its checkout; of it only the package is used.
        scratch: an empty directory of its own.
        options: of the worker.
    """

    def __init__(self, name: str, tree: Path, scratch: Path, options: Sequence[str]) -> None:
        self.name = name
        # one place that has that tree's fastspec and this tree's perf; what is run from there comes first on the path
        for link, where in (("fastspec", tree / "fastspec"), ("perf", ROOT / "perf")):
            if not where.is_dir():
                raise Refused(f"{name}: there is no {link} in {tree}")
            (scratch / link).symlink_to(where.resolve(), target_is_directory=True)
        command = [sys.executable, "-m", "perf.gate_worker", *options]
        self._process = subprocess.Popen(command, cwd=scratch, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> Row:
        """Reads the next line of the process.

        Raises:
            Refused: the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Refused(f"{self.name} ended with code {self._process.wait()}: see above")
        answer: Row = json.loads(line)
        return answer

    def call(self, index: int, k: int) -> Row:
        """Lets the process measure one call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"index": index, "k": k}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process; it stops by itself when nothing more can come."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60 if kind is None else 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def tree_of(named: str) -> Iterator[Path]:
    """Gives the directory itself, or a worktree of that revision that is removed when the context is left."""
    if Path(named).is_dir():
        yield Path(named).resolve()
        return
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        done = subprocess.run([*git, "add", "--detach", str(place), named], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(f"{named!r} is neither a directory nor a revision: {done.stderr.strip()}")
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], capture_output=True, check=False)


def require_green(command: str, tree: Path) -> None:
    """Runs the tests of the tree that is judged. The base's are not run: an older tree may have them elsewhere.

    Raises:
        Refused: the tests fail, do not exist, or cannot be run.
    """
    words = shlex.split(command)
    if missing := [word for word in words if word.endswith(".py") and not (tree / word).is_file()]:
        raise Refused(f"there is no {missing[0]} in {tree}, so nothing is timed; name other tests with --tests")
    if words[:1] == ["python"]:
        words[0] = sys.executable
    done = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise Refused(f"{tail}\nthe tests are red (exit {done.returncode}), so nothing is timed: {command}")


def candidate_of(given: argparse.Namespace) -> Path:
    """The tree that is judged."""
    return Path(given.candidate).resolve() if given.candidate else ROOT


def measured(given: argparse.Namespace, base: Path) -> dict[int, dict[str, list[Row]]]:
    """Measures the calls of both sides for every k, in turn; every second round begins with the candidate."""
    names = ("workload", "target", "draft", "batch", "prompt", "new", "calls", "seed", "acceptance", "device")
    options = [f"--{name}={value}" for name in names if (value := getattr(given, name)) is not None]
    options += ["--k", *map(str, given.k)]
    options += ["--sampled"] if given.sampled else []
    candidate = candidate_of(given)
    with ExitStack() as stack:
        sides = []
        for name, tree, more in (("base", base, []), ("candidate", candidate, [f"--plant={given.plant}"])):
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            side = stack.enter_context(Side(name, tree, scratch, [*options, *more]))
            # one after the other: a side that is being made holds its weights twice, and both may not fit like that
            if (found := Path(side.answer()["ready"])) != tree.resolve():
                raise Refused(f"{name} measures the fastspec of {found}, not of {tree}")
            sides.append(side)
        print("gate: both sides are ready", file=sys.stderr, flush=True)
        calls: dict[int, dict[str, list[Row]]] = {k: {side.name: [] for side in sides} for k in given.k}
        for number in range(max(given.rounds, given.most)):
            if number >= given.rounds and all(steps_of(each).limit <= SHARP for each in calls.values()):
                break
            for k in given.k:
                for side in sides if number % 2 == 0 else sides[::-1]:
                    calls[k][side.name].append(side.call(number, k))
    return calls


def steps_of(calls: dict[str, list[Row]]) -> Verdict:
    """The verdict on the steps' times of one k."""
    return Verdict.of(*([row["ms"] for row in calls[name]] for name in ("base", "candidate")))


def judged(k: int, calls: dict[str, list[Row]], floor_ms: float) -> Row:
    """The row of one k: times, ratios and verdict."""
    base, candidate = calls["base"], calls["candidate"]

    def column(rows: list[Row], name: str) -> list[float]:
        return [row[name] for row in rows]

    steps = steps_of(calls)
    tokens = Verdict.of(column(base, "tokens_per_pass"), column(candidate, "tokens_per_pass"))
    row: Row = {"bench": "gate", "k": k, "status": "ok", "floor_ms": round(floor_ms, 4)}
    for name, rows in (("base", base), ("candidate", candidate)):
        took = summarise(column(rows, "ms"), "wall", "").median
        row[f"{name}_ms"] = round(took, 4)
        row[f"{name}_over_floor"] = round(took / floor_ms, 3)
        row[f"{name}_tokens_per_pass"] = round(statistics.mean(column(rows, "tokens_per_pass")), 3)
    row |= {"ratio": round(steps.ratio, 4), "spread": round(steps.spread, 4), "limit": round(1 + steps.limit, 4)}
    row |= {"tokens_ratio": round(tokens.ratio, 4), "rounds": len(base)}
    row["verdict"] = REGRESSION if steps.above or tokens.below else (FASTER if steps.below else OK)
    if row["verdict"] == OK and steps.limit > BLUNT:
        row["verdict"] = UNDECIDED
    return row


def floor(given: argparse.Namespace, k: int, ceiling: float) -> float:
    """Milliseconds that reading alone takes in a step of k drafts."""
    workload = WORKLOADS[OWN if given.target else given.workload]
    if workload.target:
        configs: list[PretrainedConfig] = [workload.config("target"), workload.config("draft")]
    else:
        places = (given.target, given.draft) if given.target else demo_pair()
        configs = [AutoConfig.from_pretrained(str(place)) for place in places if place]
    target, draft = (Bytes.of(config, workload.dtype) for config in (*configs, configs[0])[:2])
    context = given.prompt + given.new / 2
    return step_bytes(target, draft if k else None, k=k, batch=given.batch, context=context) / ceiling / 1e6


def command_gate(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Measures this tree against another, and fails when it is slower or its drafts are accepted less often."""
    if given.rounds < LEAST_ROUNDS:
        raise Refused(f"--rounds {given.rounds} is too few for a spread; at least {LEAST_ROUNDS}")
    if given.tests:
        require_green(given.tests, candidate_of(given))
    else:
        print("gate: no tests were run, as asked", file=sys.stderr)
    ceiling = read_ceiling(device=given.device)
    if torch.device(given.device).type == "cuda":
        torch.cuda.empty_cache()
    with tree_of(given.base) as base:
        for number in range(given.times):
            calls = measured(given, base)
            labels: Row = {
                "workload": OWN if given.target else given.workload,
                "batch": given.batch,
                "prompt": given.prompt,
                "new": given.new,
            }
            labels |= {"sampled": given.sampled, "time": number + 1, "read_gb_s": round(ceiling)}
            labels |= {"planted": given.plant} if given.plant else {}
            yield [{**labels, **judged(k, calls[k], floor(given, k, ceiling))} for k in given.k]


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf gate`."""
    made.add_argument("--base", required=True, help="the tree to compare with: a directory, or a revision of git")
    made.add_argument("--candidate", help="the tree that is judged; this one by default")
    made.add_argument("--tests", default=QUICK_TESTS, help="must pass before anything is timed; '' runs none")
    made.add_argument("--rounds", type=int, default=15, help="calls of each side and k")
    made.add_argument("--most", type=int, default=45, help="rounds at most, where the first are too noisy")
    made.add_argument("--times", type=int, default=1, help="how often all of it is done, with new processes")
    made.add_argument(
        "--plant", type=float, default=0.0, help="slow the candidate's steps by this share, to see it caught"
    )
    add_pair_options(made, "shipped")
    made.add_argument("--batch", type=int, default=1, help="prompts at once")
    made.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    made.add_argument("--new", type=int, default=128, help="new tokens a prompt")
    made.add_argument("--calls", type=int, default=3, help="batches of prompts that rounds go through in turn")
    made.add_argument("--k", type=lambda text: tuple(map(int, text.split(","))), default=(0, 4), help="such as 0,4")
    made.add_argument("--sampled", action="store_true", help="temperature 1, whole vocabulary; else greedy")
