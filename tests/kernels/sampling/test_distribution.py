"""The laws that the first two launches of a sampled step find, against `sampling.law` of `processors.process`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.sampling import distribution, processors
from fastspec.state import DecodeState
from tests.helpers.devices import devices
from tests.helpers.sampled import INF, logits_for, mixed_state, plain_state

triton: Any = pytest.importorskip("triton", reason="Triton ships for Linux only")
import triton.language as tl  # noqa: E402

from fastspec.kernels.sampling import bounds  # noqa: E402
from fastspec.kernels.sampling import (  # noqa: E402
    distribution as sampled_laws,
)
from fastspec.kernels.sampling import (  # noqa: E402
    logits as sampled_parts,
)
from fastspec.kernels.sampling import (  # noqa: E402
    threshold as sampled_search,
)
from fastspec.kernels.sampling.distribution import find_distributions  # noqa: E402
from fastspec.kernels.sampling.logits import GROUP, sampled_work  # noqa: E402

INTERPRETED = not torch.cuda.is_available()
GREEDY, INVALID = 2, 3
# exp of a difference of up to 40 in fp32, on CUDA by its fast instruction; sums over up to 151936 ids
LAW = {"rtol": 8e-6, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(64 if INTERPRETED else 256, monkeypatch)


def chunks_of(ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (sampled_parts, sampled_laws):
        monkeypatch.setattr(part, "CHUNK", ids)


def found(rows: DecodeState, logits: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """(laws [B, R, V], records [B, R, 16]) by the kernels; a law is zero where there is none."""
    batch, places, vocab = logits.shape
    work = sampled_work(batch, places - 1, vocab, logits.device)
    work.records.fill_(-1)
    work.groups.fill_(float("nan"))
    work.found.fill_(-1)
    find_distributions(logits, rows, work, first=first)
    assert not work.counters.any()
    records = work.records.view(batch, places, -1)
    return load_distribution(records, rows, logits, first), records


def load_distribution(records: Tensor, rows: DecodeState, logits: Tensor, first: int = 0) -> Tensor:
    """What a record says, written out."""
    places, vocab = logits.shape[1:]
    drafts = rows.draft_tokens[:, : first + places - 1]
    greedy = (rows.temperature <= 0)[:, None, None]
    temperature = torch.where(greedy, 1.0, rows.temperature[:, None, None])
    x = processors.process(logits, rows.processors, rows.lengths, drafts) / temperature + 0.0
    bits = x.view(torch.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    words, values = records[..., None, :], records.view(torch.float32)[..., None, :]
    ids = torch.arange(vocab, device=logits.device)
    e = (x - values[..., 0]).exp()
    keeps = (key > words[..., 2]) | ((key == words[..., 2]) & (ids <= words[..., 3]))
    p = torch.where(keeps & (e >= rows.min_p[:, None, None]) & (x > -INF), e / values[..., 1], 0.0)
    p = torch.where(words[..., 5] == GREEDY, (ids == words[..., 8]).float(), p)
    return torch.where(words[..., 5] == INVALID, 0.0, p)


def expected(rows: DecodeState, logits: Tensor, first: int = 0) -> Tensor:
    drafts = rows.draft_tokens[:, : first + logits.shape[1] - 1]
    judged = processors.process(logits, rows.processors, rows.lengths, drafts)
    return distribution.compute_probs(judged, rows.sampler).masked_fill(processors.invalid(judged)[..., None], 0.0)


def compare(rows: DecodeState, logits: Tensor, edges: int = 0) -> Tensor:
    """Laws agree; up to `edges` lines may keep more or fewer ids whose tails round to the other side of top-p."""
    ours, records = found(rows, logits)
    theirs = expected(rows, logits)
    running = rows.running
    ours, theirs = ours[running], theirs[running]
    same = ((ours > 0) == (theirs > 0)).all(-1)
    assert (~same).sum() <= edges
    beyond = torch.where((ours > 0) != (theirs > 0), torch.maximum(ours, theirs), 0.0).sum(-1)
    assert (beyond <= LAW["rtol"]).all()  # each weight is only as exact, and with it every sum of them
    torch.testing.assert_close(ours[same], theirs[same], **LAW)
    return records


def with_options(vocab: int, batch: int, k: int, device: str, **options: float) -> DecodeState:
    rows = plain_state(batch, k, vocab, device)
    for name, value in options.items():
        getattr(rows, name).fill_(value)
    return rows


OPTIONS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 12, "min_p": 0.1},
    {"top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("device", devices())
def test_biases_known_to_be_none_are_not_read(device: str) -> None:
    rows = plain_state(2, 2, 111, device, 0, 0)
    rows.temperature.fill_(1.0)
    logits = logits_for(3, 2, 2, 111, device)[0]
    tops = []
    for bias in (0.0, 1.0):
        rows.bias.fill_(bias)
        rows.unbiased.copy_(torch.tensor([True, False]))
        work = sampled_work(2, 2, 111, torch.device(device))
        find_distributions(logits, rows, work)
        tops.append(work.groups[:, 0].clone().view(2, 3, -1))
    assert torch.equal(tops[0][0], tops[1][0])
    assert (tops[0][1] < tops[1][1]).all()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_option_equals_the_definition(options: dict[str, float], device: str) -> None:
    for vocab in (8, 111) if INTERPRETED else (8, 111, 989, 32000):
        rows = with_options(vocab, 2, 1, device, **options)
        # where ids at the edge weigh as little as an fp32 sum of so many terms is uncertain by, either set is right
        edges = 4 if vocab > 111 and options.get("top_p") == 0.9999 else 0
        for spread in (1.0, 4.0):
            compare(rows, logits_for(vocab, 2, 1, vocab, device, spread)[0], edges)


@pytest.mark.parametrize("device", devices())
def test_random_mixes_of_options_equal_the_definition(device: str) -> None:
    """Penalties, bans, drafts that count at later places, stop ids that may not come yet, and all filters."""
    for seed in range(3 if INTERPRETED else 60):
        _, rows = mixed_state(seed, batch=6, k=2, vocab=60, device=device, before=1)
        compare(rows, logits_for(seed, 6, 2, 60, device)[0])


@pytest.mark.parametrize("device", devices())
def test_ties_are_kept_as_torch_keeps_them(device: str) -> None:
    """All that tie with the k-th; of those at the edge of top-p the lowest ids; signed zeros are equal."""
    line = torch.tensor([0.0, 2.0, -0.0, 1.0, 1.0, 0.0, 1.0, 1.0, -1.0, 0.0, -0.0, -INF, 1.0, 2.0, -INF, -0.0])
    options = {"top_k": 3}, {"top_k": 9}, {"top_p": 0.6}, {"top_p": 0.9}, {"top_k": 4, "top_p": 0.7}, {"top_k": 15}
    for each in options:
        rows = with_options(16, 1, 0, device, **each)
        compare(rows, line.to(device)[None, None])
    flat = torch.zeros(1, 1, 64, device=device)  # sums of 1/64 are exact
    for top_p in (0.25, 0.5, 0.75):
        records = compare(with_options(64, 1, 0, device, top_p=top_p), flat)
        assert records[0, 0, 3] == 64 * top_p - 1


@pytest.mark.parametrize("device", devices())
def test_small_k_among_many_groups(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound by sets of groups: likely ids all over the line, all in one set, and far apart."""
    chunks_of(1024, monkeypatch)
    vocab = 4000
    spread = logits_for(4, 1, 0, vocab, device, 4.0)[0]
    for logits in (spread, spread.sort(descending=True).values, spread * 50.0):
        for top_k in (1, 5, 8, 9):
            compare(with_options(vocab, 1, 0, device, top_k=top_k, top_p=0.95), logits, edges=1)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("listed", [1024, 0])
@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.7}, {"top_k": 60}, {"top_k": 60, "top_p": 0.5, "min_p": 0.2}, {"min_p": 0.01}, {"top_k": 100}],
    ids=str,
)
def test_more_candidates_than_fit(
    options: dict[str, float], listed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the threshold is found by reading the line again and again; ties beyond what fits too."""
    monkeypatch.setattr(sampled_parts, "CANDIDATES", 16)
    monkeypatch.setattr(sampled_parts, "LISTED", listed)
    vocab = 130
    rows = with_options(vocab, 1, 0, device, **options)
    compare(rows, logits_for(1, 1, 0, vocab, device, 1.0)[0])
    tied = logits_for(1, 1, 0, vocab, device, 1.0)[0].round()
    compare(rows, tied, edges=1)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, {"top_k": 40}, {"top_k": 90, "top_p": 0.8}, {"top_p": 0.3, "min_p": 0.3}], ids=str
)
@pytest.mark.parametrize("kind", ["smooth", "tied", "shifted"])
def test_every_way_to_a_threshold_leads_to_the_same(
    kind: str, options: dict[str, float], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few candidates by ranks, more of them by pivots, in one piece or several; from few groups or by all programs: the
    same records to the bit.
    """
    smooth = logits_for(2, 2, 1, 120, device, 1.5)[0]
    logits = {"smooth": smooth, "tied": smooth.round(), "shifted": smooth + 100.0}[kind]
    rows = with_options(120, 2, 1, device, **options)
    ways = []
    for ranked, piece, listed in ((256, 1024, 1024), (16, 1024, 1024), (16, 16, 1024), (256, 1024, 0)):
        monkeypatch.setattr(sampled_laws, "RANKED", ranked)
        monkeypatch.setattr(sampled_laws, "PIECE", piece)
        monkeypatch.setattr(sampled_parts, "LISTED", listed)
        ways.append(compare(rows, logits, edges=1))
    assert all(torch.equal(ways[0][..., :6], way[..., :6]) for way in ways[1:])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_p": 0.5}, {"top_k": 2500}], ids=str)
def test_bounds_from_a_sample(options: dict[str, float], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law too flat for bounds that are certain: the threshold lies within those that a sample gives."""
    chunks_of(4096, monkeypatch)
    vocab = 40_000
    rows = with_options(vocab, 1, 0, device, **options)
    records = compare(rows, logits_for(3, 1, 0, vocab, device, 1.0)[0], edges=1)
    assert records[0, 0, 9] == 1


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("top_p", [0.9, 0.95, 0.98])
def test_bounds_of_a_law_with_a_heavy_head(top_p: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th likeliest id has a share that falls as n^-1.5, as a language model's: never read again and again."""
    chunks_of(4096, monkeypatch)
    monkeypatch.setattr(sampled_parts, "CANDIDATES", 2048)
    if INTERPRETED:
        monkeypatch.setattr(sampled_search, "scaled", None)  # what reads a line
    vocab = 40_000
    ranks = torch.randperm(vocab, generator=torch.Generator().manual_seed(1)).to(device) + 1.0
    compare(with_options(vocab, 1, 0, device, top_p=top_p), (-1.5 * ranks.log())[None, None], edges=1)


@pytest.mark.parametrize("device", devices())
def test_few_ids_are_looked_at_where_few_are_kept(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's largest does not count as what may lie below a bound: else some thousand of 128256 ids are listed."""
    chunks_of(4096, monkeypatch)
    vocab = 40_000
    ranks = torch.randperm(vocab, generator=torch.Generator().manual_seed(1)).to(device) + 1.0
    rows = with_options(vocab, 1, 0, device, top_p=0.9)
    records = compare(rows, (-1.5 * ranks.log())[None, None], edges=1)
    kept_ids = int((expected(rows, (-1.5 * ranks.log())[None, None]) > 0).sum())
    assert kept_ids <= records[0, 0, 10] <= 2 * kept_ids + 8


@pytest.mark.parametrize("device", devices())
def test_a_sample_that_misleads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bounds are checked: where the threshold does not lie within them, the line is read instead."""
    monkeypatch.setattr(sampled_parts, "CANDIDATES", 64)
    vocab = 640
    logits = logits_for(3, 1, 0, vocab, device, 1.0)[0]
    group = torch.arange(vocab // GROUP, device=device)
    for off in (-3.0, 4.0):
        misled = logits.clone()
        misled[0, 0, group * GROUP + group * 29 % GROUP] = torch.linspace(off, off + 1, len(group), device=device)
        for options in ({"top_p": 0.6}, {"top_k": 300}):
            compare(with_options(vocab, 1, 0, device, **options), misled, edges=1)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50257, 128256, 151936])
def test_the_kernel_equals_its_torch_definition_at_real_sizes(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for spread in (1.0, 2.5, 6.0):
        for options in OPTIONS:
            rows = with_options(vocab, 3, 3, "cuda", **options)
            logits = logits_for(vocab, 3, 3, vocab, "cuda", spread)[0]
            # a tail of 1e5 ids is summed to about 1e-6 of it by either; among 1e5 laws' edges some lie within that
            ours, theirs = found(rows, logits)[0], expected(rows, logits)
            differ = ((ours > 0) != (theirs > 0)).sum(-1)
            assert differ.max() <= (40 if "top_p" in options else 0), (options, spread, differ)
            torch.testing.assert_close(ours[differ == 0], theirs[differ == 0], rtol=2e-5, atol=1e-12)
            mass = torch.where((ours > 0) != (theirs > 0), ours + theirs, 0.0).sum(-1)
            assert mass.max() < 1e-5, (options, spread, mass)


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("places", [1, 3])
def test_draws_and_steps_run_the_same_kernels(
    places: int, drawn: bool, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel with other tensors as arguments is another one, which takes seconds to compile."""
    given = list[Any]()
    monkeypatch.setattr(sampled_laws, "launch", lambda kernel, grid, *args, **_: given.append(args))
    rows, work = plain_state(2, 2, 111, "cpu", 0, 0), sampled_work(2, 2, 111, torch.device("cpu"))
    find_distributions(torch.zeros(2, places, 111), rows, work, drafts=places - 1, drawn=drawn, ragged=ragged)
    for args in given:
        assert args[0].counts.data_ptr() == rows.draft_counts.data_ptr()
    assert given[1][2].data_ptr() == rows.draft_probs.data_ptr()


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    vocab, k, batch = 128256, 7, 2100
    rows = with_options(vocab, batch, 1, "cuda", top_k=50, top_p=0.9)
    last = logits_for(5, 1, k, vocab, "cuda", 3.0)[0]
    whole = torch.zeros(batch, k + 1, vocab, device="cuda")
    assert whole.numel() > 2**31
    whole[-1] = last[0]
    work = sampled_work(batch, k, vocab, whole.device)
    find_distributions(whole, rows, work)
    alone = rows.rows(batch - 1, batch)
    ours = load_distribution(work.records.view(batch, k + 1, -1)[-1:], alone, last)
    torch.testing.assert_close(ours, expected(alone, last), **LAW)


@triton.jit
def _no_min_p(key, index, e, threshold, cut, min_p):
    return kept(key, index, e, threshold, cut, 0.0)


@triton.jit
def _larger_only(key, index, e, threshold, cut, min_p):
    return kept(key, index, e, threshold, -1, min_p)


@triton.jit
def _most_of_the_budget(total, top_p):
    return budget_of(total, top_p) * 9 // 10


@triton.jit
def _one_more(mass, above, budget):
    return taken_of_equals(mass, above, budget) + 1


@triton.jit
def _unpenalised(view, index, stops: tl.constexpr):
    return scaled(View(*view[:9], False, *view[10:]), index, stops)


@triton.jit
def _no_drafts(view, index, stops: tl.constexpr):
    return scaled(View(*view[:12], 0, view[13]), index, stops)


@triton.jit
def _stops_at_once(view, index, stops: tl.constexpr):
    return scaled(View(*view[:10], False, *view[11:]), index, stops)


@triton.jit
def _one_rank_more(found_ptr, keys, largest, count, size: tl.constexpr):
    reach, over, above = ranks(found_ptr, keys, largest, count, size)
    return reach + 1, over, above


@triton.jit
def _one_more_counted(
    source,
    found_ptr,
    whole,
    count,
    pivots,
    cuts,
    largest,
    least,
    by_mass,
    most,
    size: tl.constexpr,
    stops: tl.constexpr,
):
    sums = weigh(source, found_ptr, whole, count, pivots, cuts, largest, least, by_mass, most, size, stops)
    return sums + (by_mass == 0).to(tl.int64)


@triton.jit
def _too_much_below(x, weights, rest, groups, largest, most, width):
    return largest_below(x, weights, rest, groups, largest, most * 4, width)


@triton.jit
def _too_few(tops, largest, least):
    return reached_by(tops, largest, least // 4)


View = sampled_parts.View
kept, scaled, largest_below = sampled_parts.kept, sampled_parts.scaled, bounds._largest_below
ranks, weigh = sampled_search._ranks, sampled_search._weigh
budget_of, taken_of_equals = sampled_search.budget_of, sampled_search.taken_of_equals
reached_by = bounds._reached_by
ALL = (bounds, sampled_laws, sampled_search)


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels do not see what is planted")
@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("kept", _no_min_p),
        ("kept", _larger_only),
        ("budget_of", _most_of_the_budget),
        ("taken_of_equals", _one_more),
        ("scaled", _unpenalised),
        ("scaled", _no_drafts),
        ("scaled", _stops_at_once),
        ("_ranks", _one_rank_more),
        ("_weigh", _one_more_counted),
        ("_largest_below", _too_much_below),
        ("_reached_by", _too_few),
    ],
)
def test_planted_bugs_are_seen(name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ALL:
        if hasattr(place, name):
            monkeypatch.setattr(place, name, bug)
    with pytest.raises(AssertionError):
        all_of_it(monkeypatch)


def all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bug should show in."""
    test_ties_are_kept_as_torch_keeps_them("cpu")
    compare(with_options(40, 2, 0, "cpu", top_k=20, top_p=0.95, min_p=0.1), logits_for(1, 2, 0, 40, "cpu")[0])
    compare(with_options(400, 1, 0, "cpu", top_k=4), logits_for(1, 1, 0, 400, "cpu", 200.0)[0])
    test_random_mixes_of_options_equal_the_definition("cpu")
    chunks_of(1024, monkeypatch)
    for options in ({"top_k": 40}, {"top_k": 600}, {"top_p": 0.6}):
        compare(with_options(4000, 1, 0, "cpu", **options), logits_for(1, 1, 0, 4000, "cpu", 4.0)[0])
