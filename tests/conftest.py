"""Fixtures for every test, and which marked tests run: `gpu` where there is one, `slow` when asked for."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from tests.helpers.devices import devices
from tests.helpers.interpreted import (
    let_addresses_be_checked,
    let_bf16_be_widened_exactly,
    let_conditions_be_booleans,
    let_dots_be_row_invariant,
    look_up_once,
)

if not torch.cuda.is_available():
    # before anything imports triton: its own library functions are bound to interpreter or compiler at import
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        let_addresses_be_checked()
        let_bf16_be_widened_exactly()
        let_conditions_be_booleans()
        let_dots_be_row_invariant()
        look_up_once()


QUICK_SECONDS = 90  # after that --quick begins no further test
LEFT_OUT = "left out by --quick"
_begun = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run the tests marked slow")
    parser.addoption("--integrations", action="store_true", help="also fetch clients of others, and run them")
    parser.addoption("--quick", action="store_true", help=f"begin no test after {QUICK_SECONDS} seconds")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("quick") and time.monotonic() - _begun > QUICK_SECONDS:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    files = Counter(report.nodeid.partition("::")[0] for report in skipped if LEFT_OUT in str(report.longrepr))
    for file, count in sorted(files.items()):
        terminalreporter.write_line(f"{LEFT_OUT}: {count} tests of {file}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("slow") and not config.getoption("nightly"):
            item.add_marker(pytest.mark.skip(reason="long; runs with --nightly"))
        if item.get_closest_marker("integration") and not config.getoption("integrations"):
            item.add_marker(pytest.mark.skip(reason="fetches packages; runs with `make test-integrations`"))
        if " at 0x" in item.nodeid:  # which differs between the processes that share the tests
            raise pytest.UsageError(f"{item.nodeid} names an address; give the parameter an id")
    # of several processes none is then left alone with them at the end
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and CUDA where there is one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True, scope="module")
def modules_are_not_doubled() -> Iterator[None]:
    """A file's tests leave one module of each name: a second one would make tests depend on their order."""
    yield
    for name, module in list(sys.modules.items()):
        package, _, leaf = name.rpartition(".")
        if package.startswith("fastspec"):
            found = getattr(sys.modules[package], leaf, None)
            assert found is module or not isinstance(found, ModuleType), f"{name} was imported twice"
