"""Kernels that nobody waits for: who compiles them, in which order, and what a launch that needs one gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.common import compilers as module
from fastspec.kernels.common.compile_jobs import EARLY_PART, NotSendable
from fastspec.kernels.common.compilers import SLOWEST, Behind, Compilers
from fastspec.kernels.sampling import distribution, draw, sampled_commit
from fastspec.kernels.select import KERNELS
from tests.helpers.modules import module_output


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a call is its kernel's name. A kernel named "cached" is in the cache; one named "odd" has no text."""

    def told(compiling: Callable[[], Any]) -> bytes:
        if (name := named(compiling)) == "odd":
            raise NotSendable(name)
        return name.encode()

    def named(compiling: Callable[[], Any]) -> str:
        return str(module.getclosurevars(compiling).nonlocals["src"].name)

    monkeypatch.setattr(module, "job_of", told)
    monkeypatch.setattr(module, "is_cached", lambda compiling: named(compiling) == "cached")


def call(name: str, compile_it: Callable[[str], Any] = str.upper) -> Callable[[], Any]:
    """A call of the compiler, as Triton submits it."""
    src = SimpleNamespace(name=name)
    return lambda: compile_it(src.name)


class Asked:
    """A process that compiles one job at a time, when `go` is set."""

    def __init__(self) -> None:
        self.jobs, self.go, self.has_one = list[str](), threading.Event(), threading.Event()

    def __call__(self, job: bytes, early: bool) -> None:
        self.jobs.append(job.decode() + " early" * early)
        self.has_one.set()
        assert self.go.wait(60)


def ended(behind: Behind) -> None:
    """Waits until no kernel is left."""
    done = threading.Event()
    behind.at_end(done.set)
    assert done.wait(60)


def test_a_kernel_is_read_by_the_thread_that_needs_it_when_its_process_has_ended() -> None:
    asked, threads = Asked(), list[int]()
    behind = Behind(asked, 1)
    kernel = behind.submit(call("sampled", lambda name: threads.append(threading.get_ident())))
    assert not asked.jobs, "begin starts the queue"
    behind.begin()
    assert asked.has_one.wait(60)
    assert not kernel.done()
    asked.go.set()
    kernel.result()
    assert (asked.jobs, threads) == (["sampled"], [threading.get_ident()])


def test_a_kernel_that_is_cached_or_has_no_text_is_left_to_its_launch() -> None:
    behind = Behind(Asked(), 1)
    kernels = [behind.submit(call(name)) for name in ("cached", "odd")]
    behind.begin()
    assert [kernel.result() for kernel in kernels] == ["CACHED", "ODD"]
    assert behind.uncached == 1
    ended(behind)


def test_a_kernel_that_a_launch_needs_comes_first() -> None:
    asked = Asked()
    behind = Behind(asked, 1)
    kernels = [behind.submit(call(name)) for name in "abcd"]
    behind.begin()
    assert asked.has_one.wait(60)
    kernels[3].hurry()
    asked.go.set()
    assert kernels[3].result() == "D"
    ended(behind)
    assert asked.jobs == ["a", "d", "b", "c"]


def test_a_rank_begins_with_its_share_and_then_with_the_end_of_the_others() -> None:
    asked = Asked()
    asked.go.set()
    behind = Behind(asked, 1, rank=1, ranks=2)
    for name in "abcdef":
        behind.submit(call(name))
    behind.begin()
    ended(behind)
    assert asked.jobs == ["b", "d", "f", "e", "c", "a"]


def test_early_kernels_come_first_and_take_a_third_of_the_processes() -> None:
    asked = Asked()
    behind = Behind(asked, 6)
    for name in "abc":
        behind.submit(call(name))
    behind.begin_early()
    assert behind._running == 2
    behind.submit(call("d"))
    behind.begin()
    asked.go.set()
    ended(behind)
    assert sorted(asked.jobs) == ["a early", "b early", "c early", "d"]


def test_early_kernels_that_take_longest_to_compile_come_first() -> None:
    asked = Asked()
    behind = Behind(asked, EARLY_PART)
    for name in ("few_rows_kernel", *reversed(SLOWEST), "_verify_kernel"):
        behind.submit(call(name))
    behind.begin_early()
    asked.go.set()
    ended(behind)
    assert asked.jobs == [f"{name} early" for name in (*SLOWEST, "few_rows_kernel", "_verify_kernel")]


def test_a_kernel_behind_waits_until_the_early_ones_are_compiled_unless_a_launch_needs_it() -> None:
    asked = Asked()
    behind = Behind(asked, EARLY_PART)
    early = behind.submit(call("early"))
    behind.begin_early()
    assert asked.has_one.wait(60)
    others = [behind.submit(call(name)) for name in "ab"]
    behind.begin()
    assert behind._running == EARLY_PART, "threads are there for all"
    with behind._changing:
        assert not behind._may_begin()
    others[1].hurry()
    asked.go.set()
    assert others[1].result() == "B"
    assert early.result() == "EARLY"
    ended(behind)
    assert asked.jobs == ["early early", "b", "a"]


def test_early_kernels_that_come_late_are_compiled_before_the_others() -> None:
    asked = Asked()
    behind = Behind(asked, EARLY_PART)
    for begin, names in ((behind.begin, "abcd"), (behind.begin_early, "ef")):
        for name in names:
            behind.submit(call(name))
        begin()
    asked.go.set()
    ended(behind)
    assert sorted(asked.jobs) == ["a", "b", "c", "d", "e early", "f early"]
    assert asked.jobs[-1] == "d"  # the threads may have taken the three before it already


def test_cancelled_early_kernels_hold_up_no_other() -> None:
    asked = Asked()
    behind = Behind(asked, EARLY_PART)
    for name in "ab":
        behind.submit(call(name))
    behind.begin_early()
    assert asked.has_one.wait(60)
    behind.cancel()
    behind.submit(call("c"))
    behind.begin()
    asked.go.set()
    ended(behind)
    assert asked.jobs == ["a early", "c"]


def test_the_slowest_kernels_are_kernels() -> None:
    kernels = {name for each in (distribution, draw, sampled_commit) for name in vars(each)}
    assert set(SLOWEST) <= kernels


def test_with_two_processes_no_kernel_is_early() -> None:
    asked = Asked()
    asked.go.set()
    behind = Behind(asked, 2)
    behind.submit(call("a"))
    behind.begin_early()
    assert behind._running == 0
    behind.begin()
    ended(behind)
    assert asked.jobs == ["a early"]


def test_a_kernel_behind_waits_until_all_others_have_begun_and_an_early_one_does_not() -> None:
    with Compilers(0, kernels=KERNELS) as executor:
        waited, notified = list[bool](), executor._all_begun

        class Condition:
            """Tells if a thread would wait."""

            def __enter__(self) -> None:
                notified.acquire()

            def __exit__(self, *error: object) -> None:
                notified.release()

            def wait_for(self, ready: Callable[[], bool]) -> None:
                waited.append(not ready())

            def notify_all(self) -> None:
                notified.notify_all()

        executor._all_begun = Condition()  # type: ignore[assignment]
        executor._count_waiting(1)
        for early in (True, False):
            executor._compile_behind(b"", early)  # there is no process, so it is left to its launch
        assert waited == [False, True]
        assert executor.submit(call("other")).result(60) == "OTHER"
        executor._count_waiting(-1)
        executor._compile_behind(b"", False)
        assert waited == [False, True, False]


def test_an_error_names_the_kernel_whenever_it_is_asked_for() -> None:
    asked = Asked()
    asked.go.set()
    behind = Behind(asked, 1)
    kernel = behind.submit(call("_end_kernel", lambda name: 1 // 0))
    other = behind.submit(call("_draw_kernel"))
    behind.begin()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the kernel _end_kernel could not be compiled: .*division") as raised:
            kernel.result()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert other.result() == "_DRAW_KERNEL"


def test_cancelled_kernels_are_compiled_by_their_launch() -> None:
    asked = Asked()
    behind = Behind(asked, 1)
    begun, dropped = (behind.submit(call(name)) for name in "ab")
    behind.begin()
    assert asked.has_one.wait(60)
    behind.cancel()
    assert dropped.result() == "B"
    asked.go.set()
    assert begun.result() == "A"
    ended(behind)
    assert asked.jobs == ["a"]


def test_a_process_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 0.0)
    asked = Asked()
    behind = Behind(asked, 1)
    kernel = behind.submit(call("a"))
    behind.begin()
    assert kernel.result() == "A"
    asked.go.set()
    ended(behind)


def test_nothing_is_compiled_behind_without_processes() -> None:
    with Compilers(0, kernels=KERNELS) as executor:
        assert executor.behind is None


def test_processes_compile_on_after_the_others_are_done_and_a_launch_finds_their_kernels() -> None:
    first, later, gone, failed = module_output("tests.helpers.compile_jobs", "behind")
    assert first["hits"] == [True], "one kernel is waited for"
    assert first["running"], "the processes go on"
    assert later["hits"] == [True] * 3
    assert later["begun"] is False, "no other process was needed"
    assert gone["status"] is not None
    assert "the kernel " in failed["error"]
    assert failed["works"], "the other kernels are there"
