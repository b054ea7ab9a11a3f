"""One pair on one GPU and on several: `python -m perf ranks`. Steps, speed-up, text and start.

Every number of ranks decodes the same prompts in processes of its own. Steps are compared with those of a generator
without `tensor_parallel`, the fastest on one GPU. Texts are compared with those of the first number of ranks:
`tensor_parallel=1` adds in the order of several ranks, a generator without it in another (guides/several-gpus.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perf.experiment import say
from perf.models import add_pair_options
from perf.records import Row
from perf.startup import Pair, pair_of, said_by
from perf.workloads import OWN

COLUMNS = (
    "workload",
    "ranks",
    "tensor_parallel",
    "batch",
    "k",
    "draft",
    "ms_step",
    "tok_s",
    "over_one",
    "same_text",
    "gpu",
    "commit",
)
# (draft_quantization, draft_tensor_parallel) by name
DRAFTS = MappingProxyType({
    "automatic": (None, None),
    "whole": (None, "replicated"),
    "cut": (None, "split"),
    "int4": ("int4", None),
})  # fmt: skip


def rows_with(pair: Pair, ranks: int | None, draft: str, given: argparse.Namespace) -> list[Row]:
    """The rows of one number of ranks and one kind of draft.

    Args:
        pair: directories of target and draft.
        ranks: None is a generator without `tensor_parallel`.
        draft: see DRAFTS.
        given: options of the command line.

    Raises:
        RuntimeError: a rank failed.
    """
    form, split = DRAFTS[draft]
    options: dict[str, Any] = {"num_speculative_tokens": max(given.ks), "draft_quantization": form}
    options |= {"device": given.device, "prefix_cache": False, "progress": False}
    options |= {"max_batch_size": max(given.batches), "max_length": given.prompt + given.new}
    command = [sys.executable]
    if ranks is not None:
        options["tensor_parallel"] = ranks
        if ranks > 1:
            options["draft_tensor_parallel"] = split
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    fixed: Row = {"bench": "ranks", "workload": OWN if given.target else given.workload, "draft": draft}
    fixed |= {"ranks": ranks or 1, "tensor_parallel": ranks}
    asked = {name: getattr(given, name) for name in ("batches", "ks", "prompt", "new", "ids")} | {"options": options}
    asked |= {"target": str(pair[0]), "draft": str(pair[1])}
    asked["row"] = fixed | {"prompt": given.prompt, "new": given.new}
    start = time.perf_counter()
    said = said_by([*command, "-m", "perf.ranks_worker", json.dumps(asked)], dict(os.environ))
    say(f"tensor_parallel={ranks}, draft {draft}: {time.perf_counter() - start:.1f} s")
    return [row for line in said.splitlines() if line.startswith("[{") for row in json.loads(line)]


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf ranks`."""
    made.set_defaults(columns=COLUMNS)
    add_pair_options(made, "8b+1b")
    made.add_argument("--pair", type=Path, help="directory with target/ and draft/; written first if it has none")
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="GPUs")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    made.add_argument("--ks", type=int, nargs="+", default=[0, 4], help="drafts a step")
    made.add_argument("--drafts", nargs="+", choices=list(DRAFTS), default=["automatic"], help="how ranks hold it")
    made.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    made.add_argument("--new", type=int, default=128, help="new tokens a prompt")
    made.add_argument("--ids", type=int, default=256, help="prompts have token ids below it")


def command_ranks(given: argparse.Namespace) -> Iterator[list[Row]]:
    """One pair on one GPU and on several: steps, speed-up, text and start."""
    fastest: dict[tuple[int, int], float] = {}
    texts: dict[tuple[int, bool], str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        pair = pair_of(given, Path(scratch))
        for ranks in (None, *given.ranks):
            for draft in given.drafts:
                rows = rows_with(pair, ranks, draft, given)
                for row in rows:
                    one = fastest.setdefault((row["batch"], row["k"]), row["ms_step"])
                    row["over_one"] = round(one / row["ms_step"], 3) if row["ms_step"] else None
                    row["same_text"] = row["text"] == texts.setdefault((row["batch"], ranks is None), row["text"])
                yield rows
