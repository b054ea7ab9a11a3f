"""The gate: what it lets pass, what it catches, and when it refuses to time at all."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fastspec import FastSpecGenerator, demo_pair
from perf import __main__ as cli
from perf import gate_worker
from perf.gate import OK, QUICK_TESTS, REGRESSION, UNDECIDED, Refused, Verdict, judged, require_green, tree_of
from perf.models import Run
from perf.records import ROOT, Row
from perf.step_hooks import around_steps
from tests.helpers.clocks import Clock

FAST = ("--workload", "shipped", "--device", "cpu", "--prompt", "16", "--new", "12", "--calls", "1", "--k", "0")


def noisy(mean: float, noise: float, seed: int, count: int = 15) -> list[float]:
    draw = random.Random(seed)
    return [mean * (1 + noise * draw.gauss(0, 1)) for _ in range(count)]


def calls(steps: list[float], tokens: float = 3.0) -> list[Row]:
    return [{"ms": step, "tokens_per_pass": tokens} for step in steps]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [0.002, 0.02])
def test_noise_passes_and_a_tenth_is_caught(seed: int, noise: float) -> None:
    base = noisy(5.0, noise, seed)
    same, slower = noisy(5.0, noise, seed + 100), noisy(5.5, noise, seed + 200)
    assert judged(4, {"base": calls(base), "candidate": calls(same)}, 4.0)["verdict"] == OK
    row = judged(4, {"base": calls(base), "candidate": calls(slower)}, 4.0)
    assert row["verdict"] == REGRESSION
    assert row["candidate_over_floor"] == pytest.approx(1.375, rel=0.03)
    assert cli.exit_code([row]) == 1


def test_a_machine_that_slows_down_is_no_regression() -> None:
    drift = [1 + 0.02 * turn for turn in range(15)]
    verdict = Verdict.of(drift, [1.001 * step for step in drift])
    assert (verdict.above, verdict.limit) == (False, 0.03)


def test_the_limit_grows_with_the_spread() -> None:
    wide = Verdict.of([1.0] * 16, noisy(1.1, 0.3, 3, 16))
    assert wide.limit == pytest.approx(3 * wide.spread)
    assert wide.limit > 0.1
    blind = judged(4, {"base": calls([1.0] * 16), "candidate": calls(noisy(1.02, 0.3, 3, 16))}, 4.0)
    assert blind["verdict"] == UNDECIDED
    assert cli.exit_code([blind]) == 1


def test_lost_acceptance_is_a_regression_and_speed_is_none() -> None:
    steps = noisy(5.0, 0.002, 1)
    lost = {"base": calls(steps), "candidate": calls(steps, tokens=2.8)}
    assert judged(4, lost, 4.0)["verdict"] == REGRESSION
    assert judged(4, {"base": calls(steps), "candidate": calls(steps, 3.2)}, 4.0)["verdict"] == OK
    quick = {"base": calls(steps), "candidate": calls([0.8 * step for step in steps])}
    assert judged(4, quick, 4.0)["verdict"] == "faster"
    assert cli.exit_code([judged(4, quick, 4.0)]) == 0


def test_red_tests_are_not_timed() -> None:
    with pytest.raises(Refused, match=r"the tests are red \(exit 3\), so nothing is timed"):
        cli.main(["gate", "--base", ".", *FAST, "--tests", "python -c 'raise SystemExit(3)'"])


def test_the_worker_needs_only_public_names_of_the_package(tmp_path: Path) -> None:
    package = tmp_path / "fastspec" / "__init__.py"
    package.parent.mkdir()
    names = "FastSpecGenerator", "GenerateOutput", "demo_pair"
    package.write_text("".join(f"class {name}: ...\n" for name in names))
    (tmp_path / "perf").symlink_to(ROOT / "perf", target_is_directory=True)
    command = [sys.executable, "-c", "import fastspec, perf.gate_worker; print(fastspec.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == package


def test_the_quick_tests_are_there_and_missing_ones_are_named(tmp_path: Path) -> None:
    assert all((ROOT / word).is_file() for word in QUICK_TESTS.split() if word.endswith(".py"))
    with pytest.raises(Refused, match=r"there is no tests/sampling/test_verify.py in"):
        require_green(QUICK_TESTS, tmp_path)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="neither a directory nor a revision"), tree_of("no-such-thing"):
        pass
    with pytest.raises(Refused, match="there is no fastspec in"):
        cli.main(["gate", "--base", str(tmp_path), *FAST, "--tests", ""])
    with pytest.raises(Refused, match="too few for a spread"):
        cli.main(["gate", "--base", ".", *FAST, "--rounds", "2"])


def test_a_revision_is_laid_out_and_goes_again() -> None:
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("no checkout of git")
    with tree_of("HEAD") as place:
        assert (place / "fastspec" / "__init__.py").is_file()
        assert place != ROOT
    assert not place.exists()


def test_both_trees_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """What they take is this machine's affair; that a delay is caught, the next test says."""
    options = ["gate", "--base", str(ROOT), *FAST, "--rounds", "5", "--most", "5", "--tests", "", "--plant", "1.0"]
    (row,) = cli.main(options)
    assert row["ratio"] > 0
    assert (row["planted"], row["rounds"], row["tokens_ratio"]) == (1.0, 5, 1)
    assert "no tests were run, as asked" in capsys.readouterr().err


def test_a_planted_delay_makes_each_step_longer_and_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(gate_worker, "time", clock)
    target, draft = demo_pair()
    run = Run(target, draft, [[[5, 6, 7]]], 12, (0,), False, "cpu", torch.float32)

    @contextmanager
    def taking(words: str) -> Iterator[None]:
        clock.sleep(0.001)
        yield

    def steps(count: int) -> list[Row]:
        return [gate_worker.timed_call(generator, run, 0, 0) for _ in range(count)]

    made = FastSpecGenerator(target, draft, max_length=64, device="cpu", progress=False)
    with made as generator, around_steps(generator, taking):
        before = steps(5)
        around, delays, delay = gate_worker.planted(generator, run, 0.1)
        with around:
            delay.seconds = delays[0]
            after = steps(5)
    assert [row["ms"] for row in before] == pytest.approx([1.0] * 5, rel=0.01)
    assert [row["ms"] for row in after] == pytest.approx([1.1] * 5, rel=0.01)
    assert judged(0, {"base": before, "candidate": after}, 0.5)["verdict"] == REGRESSION
