"""The gate: what it lets pass, what it catches, and when it refuses to time at all."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from perf import __main__ as cli
from perf.gate import OK, QUICK_TESTS, REGRESSION, UNDECIDED, Refused, Verdict, judged, require_green, tree_of
from perf.records import ROOT, Row

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


def test_both_trees_are_measured_and_a_planted_delay_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    # twice as slow, so that no load of this machine hides it
    options = ["gate", "--base", str(ROOT), *FAST, "--rounds", "5", "--most", "5", "--tests", "", "--plant", "1.0"]
    (row,) = cli.main(options)
    assert row["verdict"] == REGRESSION
    assert row["ratio"] > 1.3
    assert (row["planted"], row["rounds"], row["tokens_ratio"]) == (1.0, 5, 1)
    assert "no tests were run, as asked" in capsys.readouterr().err
