"""Launch entries of the kernels that build a pass's rows and end a step, for compile_kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastspec.kernels import embed, feed_rows
from fastspec.kernels.sampling import commit, greedy_commit, logits, logprobs, publish
from tests.helpers.compile_kernels import PDL_FROM, Entry

STATE = commit.StateRows(*["*i64"] * (len(commit.StateRows._fields) - 1), "i32")
STATE_SIZES = [
    *("tokens_width", "stop_stride", "block_stride", "slots", "entry_width"),
    *("batch", "places", "num_drafts"),
]
FEED = ["tokens_ptr", "lengths_ptr", "finish_ptr", "drafts_ptr"]
FEED_SIZES = ["tokens_stride", "tokens_width", "drafts_stride", "queries", "first", "limit", "vocab", "num_drafts"]
RING = ["entries_ptr", "counter_ptr"]
RINGS = {True: commit.Ring("*i64", "*i64"), False: commit.Ring("constexpr", "constexpr")}
NO_RING = ("ring.entries", "ring.counter")
RECORDED = {
    **{"arrivals_ptr": "*i64", "groups_ptr": "*fp32", "levels_ptr": "*fp32", "top_ids_ptr": "*i64"},
    **{"top_logprobs_ptr": "*fp32", "logprobs_ptr": "*fp32", "details_ptr": "*i32"},
}


def entries(arch: int) -> Iterator[Entry]:
    """(kernel, signature, constants, options, element size) of every launch entry."""
    pdl = {"PDL": arch >= PDL_FROM}
    for entry in (*_feeds(), *_commits(), *_publishes()):
        kernel, signature, constants, options, size = entry
        yield kernel, signature, {**constants, **pdl}, {**options, "launch_pdl": pdl["PDL"]}, size


def _signature(wide: list[str], narrow: list[str], **others: Any) -> dict[str, Any]:
    return {**dict.fromkeys(wide, "*i64"), **dict.fromkeys(narrow, "i32"), **others}


def _feeds() -> Iterator[Entry]:
    for counts in (["counts_ptr"], []):
        absent = {} if counts else {"counts_ptr": None}
        wide = [*FEED, *counts, "positions_ptr"]
        for queries in (1, 2, 32):
            signature = _signature([*wide, "ids_ptr"], FEED_SIZES, writes_ptr="*i1")
            yield feed_rows._feed_kernel, signature, {"QUERIES": queries, **absent}, {"num_warps": 1}, 8
        for element, size in (("*bf16", 2), ("*fp32", 4)):
            for packed in (False, True):
                constants = {"PACKED": packed, "BLOCK": embed.BLOCK}
                table = {"weight_ptr": element, "out_ptr": element}
                options = {"num_warps": embed.NUM_WARPS}
                signature = _signature(["ids_ptr"], ["rows", "width"], **table)
                yield embed._embed_kernel, signature, constants, options, size


def _commits() -> Iterator[Entry]:
    constants = {"PLACES": 32, "STOPS": 64, "NUM_STOPS": 64}
    for published in (True, False):
        absent = {} if published else dict.fromkeys(NO_RING)
        ring = RINGS[published]
        given = ["given_accepted_ptr", "given_block_ptr"]
        signature = _signature([*given, "scratch_ptr"], ["given_stride", *STATE_SIZES], state=STATE, ring=ring)
        yield commit._commit_kernel, signature, {**constants, **absent}, {"num_warps": commit.NUM_WARPS}, 8
        sizes = ["vocab", "logits_stride", "drafts_stride", *STATE_SIZES, "top", "details_width"]
        signature = _signature(["drafts_ptr", "scratch_ptr"], sizes, logits_ptr="*fp32", state=STATE, ring=ring)
        for _, chunk, warps in greedy_commit.LAUNCH:
            silent = dict.fromkeys(RECORDED) | {"GROUPS": 0, "TOP": 0}
            blocks = {**constants, "CHUNK": chunk, **absent, **silent}
            yield greedy_commit._verify_kernel, signature, blocks, {"num_warps": warps}, 4
        details = dict.fromkeys([] if published else ["details_ptr"])
        signature |= {name: kind for name, kind in RECORDED.items() if name not in details}
        for groups in (512, 2048, 4096):  # of 32000, 128256 and 256000 ids
            chunk = greedy_commit.LAUNCH[-1][1]
            blocks = {**constants, "CHUNK": chunk, **absent, **details, "GROUPS": groups, "TOP": 20}
            options = {"num_warps": logprobs.NUM_WARPS, **logits.OPTIONS}
            yield greedy_commit._verify_kernel, signature, blocks, options, 4


def _publishes() -> Iterator[Entry]:
    wide = [*RING, "emitted_ptr", "accepted_ptr", "counts_ptr", "finish_ptr", "block_ptr"]
    narrow = ["block_stride", "slots", "entry_width", "details_width", "batch", "places", "drafting"]
    recorded = {"details_ptr": "*i32", "logprobs_ptr": "*fp32", "top_ids_ptr": "*i64", "top_logprobs_ptr": "*fp32"}
    for details, top in (({}, 0), (recorded, 20)):
        absent = {} if details else dict.fromkeys(recorded)
        signature, constants = (
            _signature(wide, narrow, **details),
            {"TOP": top, "BLOCK": publish.DETAILS_BLOCK, **absent},
        )
        yield publish._publish_kernel, signature, constants, {"num_warps": publish.NUM_WARPS}, 8
