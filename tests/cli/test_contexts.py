"""A GPU's context is made beside the imports of torch, where one process is to use a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

from fastspec.cli.contexts import make_context_ahead


class Driver:
    """Stands for the library of the driver: one of its functions fails."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[tuple[str, int]] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            self.asked.append((name, next((each for each in given if isinstance(each, int)), -1)))
            return int(name == self._fails)

        return call


def asked(monkeypatch: pytest.MonkeyPatch, device: str | None, fails: str = "") -> list[tuple[str, int]]:
    """What the driver was asked: functions, and the numbers among what they were given."""
    driver = Driver(fails)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = make_context_ahead(device)
    assert thread is not None
    thread.join()
    return driver.asked


@pytest.mark.parametrize(("device", "index"), [(None, 0), ("cuda", 0), ("cuda:3", 3)])
def test_the_driver_makes_the_context_that_torch_uses(
    device: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [("cuInit", 0), ("cuDeviceGet", index), ("cuDevicePrimaryCtxRetain", -1)]
    assert asked(monkeypatch, device) == made
    for count, (name, _) in enumerate(made):
        assert asked(monkeypatch, device, fails=name) == made[: count + 1]


def test_each_of_several_ranks_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = make_context_ahead("cuda", 4, rank=3)
    assert thread is not None
    thread.join()
    assert driver.asked[1] == ("cuDeviceGet", 3)
    assert make_context_ahead("cpu", 4, rank=3) is None


@pytest.mark.parametrize(
    ("device", "ranks", "platform"),
    [("cpu", None, "linux"), ("cuda", 2, "linux"), (None, 4, "linux"), ("cuda:x", 1, "linux"), ("cuda", 1, "win32")],
)
def test_nothing_is_made_where_no_gpu_or_several_processes_are_asked_for(
    device: str | None, ranks: int | None, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("asked"))
    assert make_context_ahead(device, ranks) is None


def test_a_machine_without_a_driver_goes_on() -> None:
    thread = make_context_ahead(None)  # here no command finds one
    assert thread is not None
    thread.join()


@pytest.mark.parametrize("collecting", [True, False])
def test_nothing_is_collected_while_modules_are_imported(collecting: bool) -> None:
    """And what was imported is left out later; a process of its own, for the collector is the whole process's."""
    code = f"""
import gc
from fastspec.cli.contexts import import_all
{"" if collecting else "gc.disable()"}
done = []
gc.callbacks.append(lambda phase, info: done.append(phase))
import_all()
assert not done, done
gc.callbacks.clear()
import sys
assert "fastspec.generator" in sys.modules
assert gc.isenabled() == {collecting}
frozen = gc.get_freeze_count()
assert frozen > 100_000
made = [[] for _ in range(frozen)]
import_all()  # nothing is left to be done
assert gc.get_freeze_count() <= frozen
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
