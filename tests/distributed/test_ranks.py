"""Where ranks compute: each on a GPU of its own, all on the same kind of device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fastspec.distributed.ranks import Ranks, check_places, place_of
from fastspec.distributed.slices import SIZES, RankShare
from fastspec.distributed.world import World
from fastspec.errors import UnsupportedOption
from fastspec.models.checkpoints.checkpoint import Sliced
from fastspec.models.checkpoints.rank_slices import same_text_on
from fastspec.models.checkpoints.resolve import resolve


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch tells of each GPU that a process sees."""
    seen = ["GPU-a", "GPU-b"]

    def told(device: torch.device) -> SimpleNamespace:
        name = seen[device.index]
        return SimpleNamespace(uuid=name) if name else SimpleNamespace()

    monkeypatch.setattr(torch.cuda, "get_device_properties", told)
    return seen


def test_each_rank_has_a_gpu_of_its_own(gpus: list[str]) -> None:
    first, second = (place_of(torch.device("cuda", index)) for index in range(2))
    check_places([first, second])
    check_places([place_of(torch.device("cpu"))] * 2)
    with pytest.raises(UnsupportedOption, match="ranks 1 and 2 both compute on cuda:1, and each needs"):
        check_places([first, second, second])
    gpus[:] = ["GPU-b"]  # a process that sees one alone, as some launchers have it
    check_places([first, place_of(torch.device("cuda", 0))])
    gpus[:] = [""]  # a torch that does not tell
    check_places([place_of(torch.device("cuda", 0))] * 2)


def test_kinds_of_devices_do_not_differ(gpus: list[str]) -> None:
    places = [place_of(torch.device("cuda", 0)), place_of(torch.device("cpu"))]
    with pytest.raises(UnsupportedOption, match="rank 1 computes on cpu and rank 0 on cuda:0 GPU-a; give all ranks"):
        check_places(places)


@pytest.mark.parametrize(
    ("sizes", "same"),
    [
        ((4096, 32, 8, 14336), (1, 2, 4)),  # of an 8B; of eight ranks each would have half of one of o's four sums
        ((8192, 64, 8, 28672), (1, 2, 4)),  # of a 70B
        ((2048, 32, 8, 8192), (1, 2, 4)),
    ],
)
def test_which_numbers_of_gpus_give_one_text(
    sizes: tuple[int, int, int, int], same: tuple[int, ...], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what `explain()` says on each of them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    hidden, heads, kv_heads, inner = sizes
    whole = resolve(pair[0], role="target")
    changed = {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads, "intermediate_size": inner}
    spec = replace(whole.native, head_dim=hidden // heads, **changed)
    for size in SIZES:
        part = replace(whole, sliced=Sliced(RankShare(0, size, size), spec))
        found = same_text_on(part, torch.bfloat16, torch.device("cuda", 0))
        assert found == (same if size in same else (size,))
        said = Ranks(World.alone(), True, False, found).describe(RankShare(0, size, size), whole_head="")
        assert ("the same text on 1, 2 and 4 ranks" in said) == (size in same)
        assert ("text may differ from that of another number of ranks" in said) == (size not in same)
        assert same_text_on(part, torch.float32, torch.device("cuda", 0)) == (size,), "fp32 is not packed"
