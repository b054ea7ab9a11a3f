"""Starts one process for each rank of `--tensor-parallel`, with torch's launcher. All ranks run the same command."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from fastspec.generator import FastSpecGenerator


def this_rank() -> int:
    """Returns the local rank of this process: its number among the ranks of this host. 0 without ranks."""
    import torch.distributed as dist

    return int(dist.get_node_local_rank(0))


def follow(generator: FastSpecGenerator) -> None:
    """Runs this rank's part of every decode step that rank 0 starts, until rank 0 ends.

    Ignores SIGTERM and SIGINT, because rank 0 handles them and first completes its answers.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    generator.follow()


def start_ranks(
    count: int | None,
    device: str | None = None,
    arguments: Sequence[str] | None = None,
    *,
    ends_by_signal: bool = False,
    context: typer.Context | None = None,
) -> None:
    """Starts the ranks, waits until they end, and exits. Returns at once in a rank, or if one process is enough.

    Only the output of rank 0 is shown. If another rank fails, rank 0 prints that rank's error.

    Args:
        count: number of ranks. None: one process without ranks.
        device: value of the command's `--device`.
        arguments: arguments of the command line of each rank. Default: those of this process.
        ends_by_signal: True if a signal is the usual end of the command. The exit code is then 0. The launcher passes
            the signal to the ranks, which have 30 seconds to end.
        context: context of the command. If given, ranks may be forks of this process, which start faster.

    Raises:
        typer.BadParameter: the number of ranks is not supported, or larger than the number of GPUs.
        typer.Exit: all ranks have ended. The code is 0, or 1 if a rank failed or was killed by a signal.
    """
    if count is None or count == 1:
        return
    import torch.distributed as dist

    if dist.is_torchelastic_launched():
        return
    _check(count, device)
    # this function prints the same information in one line
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    class LaunchWithoutNuma(LaunchConfig):
        """LaunchConfig without NUMA binding, for which torch would initialise the GPU driver in this process."""

        def __post_init__(self) -> None:
            self.numa_options: Any = False
            super().__post_init__()  # type: ignore[no-untyped-call]
            self.numa_options = None

    config = LaunchWithoutNuma(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(local_ranks_filter={0}),
        start_method="fork",
    )
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if context is not None and _may_copy_this_process():
            elastic_launch(config, rank_of(context))(*given)
        else:
            elastic_launch(config, sys.executable)("-m", "fastspec.cli", *given)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        typer.echo(f"fastspec: rank {rank} ended with exit code {failure.exitcode}, and so did the others", err=True)
        raise typer.Exit(1) from None
    except SignalException:
        raise typer.Exit(0 if ends_by_signal else 1) from None
    raise typer.Exit(0)


def rank_of(context: typer.Context) -> Callable[..., None]:
    """Returns the function that each rank runs if it is a fork of the launcher.

    The function takes the arguments of the command line, and runs the command of `context` with them.
    """
    import torch

    command = context.find_root().command

    def run_rank(*arguments: str) -> None:
        # this version of torch has initialised the CUDA driver before the fork, in spite of LaunchWithoutNuma
        if torch.cuda._is_in_bad_fork():
            with subprocess.Popen([sys.executable, "-m", "fastspec.cli", *arguments]) as anew:
                for each in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(each, lambda number, frame: anew.send_signal(number))
                if anew.wait():
                    sys.exit(anew.returncode)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # removes the launcher's signal handlers
        signal.signal(signal.SIGINT, signal.default_int_handler)
        command.main(list(arguments), prog_name="fastspec")

    return run_rank


def _may_copy_this_process() -> bool:
    """True if a fork of this process can use GPUs: torch has not yet initialised the CUDA driver.

    Forking saves the time to import torch and this package in each rank.
    """
    import torch

    if sys.platform != "linux" or torch.cuda.is_initialized():
        return False
    counted: Callable[[], int] | None = getattr(torch.cuda, "_device_count_nvml", None)
    return not torch.cuda._is_compiled() or (counted is not None and counted() >= 0)


def _check(count: int, device: str | None) -> None:
    """Raises typer.BadParameter if every rank would refuse this number of ranks or this device after its start."""
    import torch

    from fastspec.distributed.slices import SIZES

    refused = None
    there = torch.cuda.device_count()
    on = device or ("cuda" if there else "cpu")
    if count not in SIZES:
        refused = f"{count} ranks are not supported; use one of {', '.join(map(str, SIZES))}"
    elif on.startswith("cuda:"):
        refused = (
            f"{count} ranks need a GPU each, and --device {device} names only one: use --device cuda, or leave it out"
        )
    elif on == "cuda" and there < count:
        refused = f"{count} ranks need a GPU each, and torch sees {there}: use fewer, or --device cpu"
    if refused is not None:
        raise typer.BadParameter(refused, param_hint="--tensor-parallel")
