"""With `--integrations` everything has been fetched: what still skips its test is a failure, and not silent."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)
ALLOWED = ("needs a browser",)  # of the operating system; pip brings none


def _failed_if_skipped(report: Report, config: pytest.Config) -> Report:
    if report.skipped and config.getoption("integrations") and not any(why in str(report.longrepr) for why in ALLOWED):
        report.outcome = "failed"
        report.longrepr = f"skipped, although `make test-integrations` fetches what it needs: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _failed_if_skipped((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _failed_if_skipped((yield), collector.config)
