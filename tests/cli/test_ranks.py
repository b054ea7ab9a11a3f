"""`--tensor-parallel` starts the same command once a rank, and ends as the ranks do."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from fastspec.cli.ranks import start_ranks


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 1)])
def test_ranks_run_the_same_command_line(
    fails: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    def launch(config: Any, entry: str) -> Any:
        def run(*arguments: str) -> None:
            started.append((config.nproc_per_node, config.max_restarts, entry, arguments))
            if fails:
                raise ChildFailedError("fastspec", {1: ProcessFailure(1, 77, 3, "/nowhere")})

        return run

    monkeypatch.setattr(api, "elastic_launch", launch)
    with pytest.raises(typer.Exit) as ended:
        start_ranks(2, ["demo", "--tensor-parallel", "2"])
    assert ended.value.exit_code == code
    assert started == [(2, 0, sys.executable, ("-m", "fastspec.cli", "demo", "--tensor-parallel", "2"))]
    assert ("rank 1 ended with exit code 3" in capsys.readouterr().err) == fails


def test_a_rank_and_a_process_alone_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    start_ranks(None)
    start_ranks(1)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    start_ranks(2)
