"""Launch entries of the kernels of a step that samples, for compile_kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastspec.kernels.sampling import (
    accept,
    bounds,
    distribution,
    draw,
    logits,
    logprobs,
    sampled_commit,
    threshold,
)
from fastspec.kernels.sampling import (
    groups as sampled_groups,
)
from tests.helpers.compile_kernels import PDL_FROM, Entry
from tests.helpers.compile_step_kernels import NO_RING, RINGS, STATE

STOPS = 64
FP32 = ("logits", "bias", "repetition", "presence", "frequency", "temperature", "top_p", "min_p")
TABLES = {**dict.fromkeys(FP32, "*fp32"), "in_prompt": "*i1", "output_counts": "*i32", "unbiased": "*i1"}
WORK = {
    "records_ptr": "*i32",
    "groups_ptr": "*fp32",
    "found_ptr": "*i32",
    "listed_ptr": "*i32",
    "q_ptr": "*fp32",
    "laws_ptr": "*fp32",
    **{"record_groups_ptr": "*fp32", "levels_ptr": "*fp32", "top_logprobs_ptr": "*fp32", "logprobs_ptr": "*fp32"},
    "details_ptr": "*i32",
}
LINES = ("record_arrivals_ptr", "record_groups_ptr", "levels_ptr", "top_ids_ptr", "top_logprobs_ptr")
SILENT_LINES = {**dict.fromkeys(LINES), "GROUPS": 0, "TOP": 0}
SILENT_BLOCKS = {**dict.fromkeys([*LINES[2:], "logprobs_ptr", "details_ptr"]), "TOP": 0}


def entries(arch: int) -> Iterator[Entry]:
    """(kernel, signature, constants, options, element size) of every launch entry."""
    pdl = arch >= PDL_FROM
    for kernel, constants, options in (*_laws(), *_ends(), *_draws()):
        signature = _signature(kernel, constants)
        options = {**options, "launch_pdl": pdl, **logits.OPTIONS}
        yield kernel, signature, {"PDL": pdl, "CHUNK": logits.CHUNK, **constants}, options, 4


def _signature(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Types by the names of arguments: int64 columns, tables as above, sizes."""
    names = [name for name in kernel.arg_names if name not in constants and not name.isupper()]
    ring = RINGS["ring.entries" not in constants]
    known = {**WORK, "source": _source(constants), "state": STATE, "ring": ring}
    return {name: known.get(name, "*i64" if name.endswith("_ptr") else "i32") for name in names}


def _source(constants: dict[str, Any]) -> logits.Source:
    """Types of a `Source`; what is a constant is none of its arguments."""
    sizes = logits.Source._fields[logits.Source._fields.index("vocab") :]
    kinds = {name: TABLES.get(name, "i32" if name in sizes else "*i64") for name in logits.Source._fields}
    return logits.Source(**{name: "constexpr" if f"source.{name}" in constants else kinds[name] for name in kinds})


def _laws() -> Iterator[tuple[Any, dict[str, Any], dict[str, int]]]:
    most = logits.CANDIDATES
    for stages, absent in ((sampled_groups.STAGES, {}), (1, {"source.counts": None})):
        chunk = sampled_groups.CHUNK
        constants = {"CHUNK": chunk, "PIECE": sampled_groups.piece_of(chunk), "STAGES": stages}
        constants |= {"STOPS": STOPS, **absent}
        yield sampled_groups._groups_kernel, {**constants, **SILENT_LINES}, sampled_groups.LAUNCH
        for groups in () if absent else (512, 2048, 4096):  # of 32000, 128256 and 256000 ids
            recording = {**constants, "GROUPS": groups, "TOP": 20}
            yield sampled_groups._groups_kernel, recording, {"num_warps": logprobs.NUM_WARPS}
    # the groups of 32000, 128256 and 256000 ids; the last where every place is judged: a draft's
    for groups, absent in ((1024, {}), (4096, {}), (8192, {"source.counts": None, "q_ptr": None})):
        each = max(1, groups // bounds.MOST_GROUPS)
        sizes = {"GROUPS": groups, "EACH": each, "MOST": most, "LISTED": logits.LISTED}
        sizes |= {"RANKED": threshold.RANKED, "PIECE": threshold.PIECE}
        constants = {**sizes, "STOPS": STOPS, **absent}
        for lines in (1, distribution.PROGRAMS + 1):
            yield distribution._laws_kernel, constants, distribution.launch_of(lines)


def _ends() -> Iterator[tuple[Any, dict[str, Any], dict[str, int]]]:
    silent = {**dict.fromkeys(NO_RING), **SILENT_BLOCKS}
    for rule, absent in (
        ("rejection", SILENT_BLOCKS),
        ("rejection", {"TOP": 20}),
        ("block", silent),
        ("block", {"q_ptr": None, "TOP": 20}),
        ("coupled", {"q_ptr": None, **SILENT_BLOCKS}),
        ("coupled", {"q_ptr": None, **dict.fromkeys(NO_RING), "details_ptr": None, "TOP": 20}),
    ):
        constants = {
            "RULE": accept.RULES[rule],
            "PLACES": 32,
            "STOPS": STOPS,
            "NUM_STOPS": STOPS,
            "CHUNK": sampled_commit.end_chunk(),
            "MOST": logits.CANDIDATES,
            "RACED": sampled_commit.RACED,
            "LISTED": sampled_commit.LISTED,
            **absent,
        }
        yield sampled_commit._end_kernel, constants, sampled_commit.LAUNCH


def _draws() -> Iterator[tuple[Any, dict[str, Any], dict[str, int]]]:
    for purpose, absent in ((0, {}), (2, {"laws_ptr": None})):
        yield draw._draw_kernel, {"PURPOSE": purpose, "STOPS": STOPS, **absent}, draw.LAUNCH
