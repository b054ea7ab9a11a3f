"""The cases that are measured, what each is expected to take, and how they are shared out into parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from perf.records import DIRTY, UNKNOWN, Row
from perf.workloads import ACCEPTED, WORKLOADS, Bytes, step_bytes

LONGEST = 32_512  # tokens of the longest prompts: with the new ones they fill a context of 32k
PART_SECONDS = 9 * 60  # what one part may take
# What a GPU of some 4 TB/s takes, for estimates alone; generous, since a part that is cut off costs more
READ, COMPUTE = 3.0e12, 3.5e14  # bytes and operations per second that steps and prompts come to
PLANT, PLANT_BYTE = 4.0, 4e-10  # seconds of a planted pair, and of each of its bytes
FIRST, AGAIN, GRAPH = 15.0, 3.0, 0.5  # seconds of a pair's first generator, a later one, a captured step
TRACE = 4.0
STEP_LEAST = 4e-4  # seconds of the shortest step


@dataclass(frozen=True, slots=True)
class Case:
    """One setting to measure: `batch` prompts of `prompt` tokens at once, `new` more each, with each k of `ks`.

    Attributes:
        sampled: at temperature 1 from the whole vocabulary, else greedy.
        calls: batches of prompts, each measured in every way in turn.
        traced: values of k whose steps are also traced.
        restart: also time making the generator a second time.
        peers: other engines are measured on it too, when they are asked for.
        acceptance: of a planted pair.
        max_length: of the generator; None: just what the prompts and what is new take.
    """

    workload: str
    batch: int
    prompt: int
    new: int
    ks: tuple[int, ...]
    sampled: bool = False
    calls: int = 3
    traced: tuple[int, ...] = ()
    restart: bool = False
    peers: bool = False
    acceptance: float = ACCEPTED
    max_length: int | None = None

    @property
    def name(self) -> str:
        """Workload, batch, prompt, law and length: no two cases share them."""
        law = "sampled" if self.sampled else "greedy"
        planted = "" if self.acceptance == ACCEPTED else f", acceptance {self.acceptance:g}"
        length = f", max_length {self.max_length}" if self.max_length else ""
        return f"{self.workload}, batch {self.batch}, prompt {self.prompt}, {law}{planted}{length}"

    @property
    def pair(self) -> tuple[str, float]:
        """What it needs: the workload, and what is planted in it."""
        return self.workload, self.acceptance


CORE = (
    Case("8b+1b", 1, 128, 256, (0, 1, 2, 3, 4, 5, 6, 8), traced=(0, 4), restart=True, peers=True),
    Case("8b+1b", 1, 128, 256, (0, 4), calls=2, traced=(0, 4), max_length=131072),  # as where memory allows it
    Case("8b+1b", 1, 128, 256, (0, 4), sampled=True, calls=2, traced=(4,)),
    Case("8b+1b", 8, 128, 128, (0, 2, 4), calls=2, traced=(0, 4)),
    Case("8b+1b", 32, 128, 128, (0, 2, 4), calls=2, traced=(0, 4)),
    Case("8b+1b", 1, 1024, 128, (0, 4), calls=2, traced=(4,), max_length=4096),  # a chat: room for more than there is
    Case("8b+1b", 8, 1024, 128, (0, 4), calls=2, max_length=4096),
    Case("8b+1b", 1, 8192, 128, (0, 4), calls=2, traced=(4,)),
    Case("qwen3-8b+0.6b", 1, 128, 256, (0, 4), calls=2, traced=(4,)),
    Case("qwen2.5-7b+0.5b", 1, 128, 256, (0, 4), calls=2, traced=(4,)),
    Case("70b-slice+8b-slice", 1, 128, 256, (0, 4), calls=2, traced=(4,)),
    Case("shipped", 1, 128, 128, (0, 4), traced=(0, 4), restart=True),
    Case("shipped", 8, 128, 128, (0, 4), sampled=True, calls=2),
)
"""What a change to the decode path is measured on; the rest of the table is for releases."""

SMOKE = (
    Case("tiny", 1, 16, 8, (0, 2), calls=2, traced=(2,), restart=True, peers=True),
    Case("tiny", 2, 16, 8, (0, 2), calls=1, sampled=True),
    Case("shipped", 1, 16, 8, (0, 2), calls=1, max_length=512),
)
"""Seconds on a CPU: shows that the measuring works, and measures nothing."""


def _rest() -> tuple[Case, ...]:
    """Every large pair over batch, context, k and law."""
    ks = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    found = [Case("shipped", batch, 128, 128, ks) for batch in (1, 4, 16, 64)]
    for workload in ("8b+1b", "8b+1b-tied", "qwen3-8b+0.6b", "qwen2.5-7b+0.5b", "70b-slice+8b-slice"):
        found += [Case(workload, batch, 128, 128, ks, traced=(4,)) for batch in (1, 2, 4, 8, 16, 32, 64)]
        found += [Case(workload, batch, 128, 128, (0, 2, 4), sampled=True) for batch in (1, 8, 64)]
        found += [Case(workload, 1, prompt, 128, (0, 2, 4, 6), calls=2) for prompt in (1024, 8192, LONGEST)]
        found += [Case(workload, 8, prompt, 128, (0, 2, 4), calls=2) for prompt in (1024, 8192)]
    found += [Case("8b+1b", 1, 128, 256, ks, acceptance=level) for level in (0.5, 0.65, 0.9)]
    core = {case.name for case in CORE}
    return tuple(case for case in found if case.name not in core)


SETS: Mapping[str, tuple[Case, ...]] = MappingProxyType({"core": CORE, "all": (*CORE, *_rest()), "smoke": SMOKE})


@cache
def _bytes(workload: str) -> tuple[Bytes, Bytes]:
    named = WORKLOADS[workload]
    if not named.target:
        return Bytes(2**24, 2**10), Bytes(2**21, 2**8)  # the shipped pair: all that it takes is launches
    target, draft = (Bytes.of(named.config(role), named.dtype) for role in ("target", "draft"))
    return target, draft


def tokens_per_step(acceptance: float, k: int) -> float:
    """What steps of k drafts emit in the mean when each draft is accepted so often."""
    return float(k + 1) if acceptance >= 1 else (1 - acceptance ** (k + 1)) / (1 - acceptance)


def pair_seconds(workload: str) -> float:
    """What making a pair takes, and its first generator."""
    named = WORKLOADS[workload]
    planted = PLANT + PLANT_BYTE * sum(each.weights for each in _bytes(workload)) if named.target else 0.0
    return planted + FIRST


def case_seconds(case: Case) -> float:
    """What a case takes once its pair is there."""
    target, draft = _bytes(case.workload)
    context = case.prompt + case.new / 2
    steps = 0.0
    for k in (0, *case.ks):  # 0 once more: plain decoding with exact=False
        read = step_bytes(target, draft if k else None, k=k, batch=case.batch, context=context)
        steps += case.new / tokens_per_step(case.acceptance, k) * max(STEP_LEAST, read / READ)
    prompts = len((0, *case.ks)) * 2 * case.batch * case.prompt * (target.weights + draft.weights) / COMPUTE
    graphs = GRAPH * len((0, *case.ks)) * case.batch.bit_length()
    again = AGAIN * (2 if case.restart else 1)
    return again + graphs + (case.calls + 1) * prompts + case.calls * steps + TRACE * len(case.traced)


def seconds(cases: Sequence[Case]) -> float:
    """What cases take together, each pair made once."""
    pairs = dict.fromkeys(case.pair for case in cases)
    return sum(pair_seconds(workload) for workload, _ in pairs) + sum(map(case_seconds, cases))


def by_pair(cases: Sequence[Case]) -> list[Case]:
    """Cases of one pair next to each other, otherwise in their order."""
    pairs = list(dict.fromkeys(case.pair for case in cases))
    return sorted(cases, key=lambda case: pairs.index(case.pair))


def part_of(cases: Sequence[Case], part: tuple[int, int]) -> list[Case]:
    """The i-th of n parts: neighbours stay together, so that few pairs are made twice, and no part is long.

    Raises:
        ValueError: there are fewer cases than parts.
    """
    index, count = part
    if count > len(cases):
        raise ValueError(f"{len(cases)} cases do not make {count} parts")
    return _shared(by_pair(cases), count)[index - 1]


def _shared(cases: list[Case], count: int) -> list[list[Case]]:
    """Runs of cases, the longest as short as can be: found by halving how long a part may be."""
    low, high = 0.0, seconds(cases) + 1
    best = _filled(cases, high)
    while high - low > 1:
        middle = (low + high) / 2
        found = _filled(cases, middle)
        if len(found) <= count:
            best, high = found, middle
        else:
            low = middle
    while len(best) < count:  # a part more than needed is the longest one cut in two
        place = max((i for i, each in enumerate(best) if len(each) > 1), key=lambda i: seconds(best[i]))
        best[place : place + 1] = [best[place][:-1], best[place][-1:]]
    return best


def _filled(cases: list[Case], most: float) -> list[list[Case]]:
    parts: list[list[Case]] = []
    for case in cases:
        if parts and seconds([*parts[-1], case]) <= most:
            parts[-1].append(case)
        else:
            parts.append([case])
    return parts


def pending(cases: Iterable[Case], rows: Iterable[Row], here: Row) -> list[Case]:
    """The cases that have no row yet of this commit on such a machine.

    Rows of a commit that is unknown, or whose files were changed, count for nothing: they may be of other code.

    Args:
        rows: recorded so far. here: `records.environment`.
    """
    commit = str(here["commit"])
    if commit == UNKNOWN or commit.endswith(DIRTY):
        return list(cases)
    same = ("commit", "device", "gpu")
    good = [row for row in rows if row.get("status") == "ok" and row.get("bench") != "trace"]
    done = {row.get("case") for row in good if all(row.get(key) == here[key] for key in same)}
    return [case for case in cases if case.name not in done]


def listed(cases: Sequence[Case]) -> list[Row]:
    """Rows that say what there is, and what it is expected to take on a large GPU."""
    rows: list[Row] = []
    for case in cases:
        row: Row = {"case": case.name, "new": case.new, "ks": ",".join(map(str, case.ks)), "calls": case.calls}
        rows.append({**row, "expected_s": round(case_seconds(case))})
    return [*rows, {"case": "all of these, each pair made once", "expected_s": round(seconds(cases))}]
