"""Where ranks compute: each on a GPU of its own, all on the same kind of device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastspec.errors import UnsupportedOption
from fastspec.parallel.ranks import check_places, place_of


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
