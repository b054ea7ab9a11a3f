"""What each rank owns, what it reads of the files, and which numbers of ranks are refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator
from fastspec.distributed import rank_settings
from fastspec.distributed.exchange import tree_sum
from fastspec.distributed.rank_settings import splitting_pays
from fastspec.distributed.ranks import Ranks
from fastspec.distributed.slices import RankShare, check_divides, divides, share_of
from fastspec.errors import UnsupportedOption
from fastspec.kernels.reference import keys_of, largest_of
from fastspec.models.checkpoints.decoder_weights import load_weights, source_of
from fastspec.models.checkpoints.rank_slices import SlicedTensors, sliced
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.checkpoints.safetensors_files import ShardTensors
from fastspec.models.layer_table import slices_of
from tests.helpers import quantised
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import make_family
from tests.helpers.tiny import tiny_spec

SPEC = tiny_spec(heads=8, kv_heads=2)  # of 96 in the MLP


def test_ranks_own_everything_once_and_key_heads_as_often_as_they_must() -> None:
    for ranks in (1, 2, 4, 8):
        shares = [share_of(SPEC, rank, ranks, one_tree=True) for rank in range(ranks)]
        heads = [head for share in shares for head in range(*share.cut(8))]
        assert heads == list(range(8))
        for share in shares:  # a query head finds its key head on its own rank
            first, last = share.cut(8)
            assert {head // 4 for head in range(first, last)} == set(range(*share.kv_cut(2)))
            assert share.parts == 8
            assert share.own_parts == 8 // ranks


@pytest.mark.parametrize(
    ("changes", "ranks", "fine"),
    [
        ({"num_heads": 12, "num_kv_heads": 6}, 8, "1, 2"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "1"),
        ({"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 100}, 8, "1, 2, 4"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(changes: dict[str, int], ranks: int, fine: str) -> None:
    spec = replace(SPEC, **changes)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOption, match=f"tensor_parallel={ranks} does not divide m: .* use one of {fine}$"):
        check_divides(spec, ranks, "m")
    assert not divides(spec, ranks)


def test_a_rank_reads_nothing_but_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
    made = make_checkpoint(tmp_path, "llama2", vocab_size=128, intermediate_size=96, tie_word_embeddings=False, **sizes)
    read = counted(monkeypatch)
    checkpoint = resolve(made, role="target")
    own = sliced(checkpoint, RankShare(1, 2, 2))
    load_weights(own, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    infos = ShardTensors(made).infos()
    for name, info in infos.items():
        whole = torch.Size(info.shape).numel()
        cut = "embed" not in name and "norm" not in name
        assert read[name] == (whole // 2 if cut else whole), name


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {}}
STORED: dict[str, tuple[dict[str, Any], Any]] = {
    "words along N": (AWQ, quantised.awq(64)),
    "words along K": (GPTQ, quantised.gptq(4, 64, symmetric=False, v2=False)),
    "blocks that fit a slice, and that do not": ({**FP8, "weight_block_size": [128, 128]}, quantised.fp8_blocks),
    "one scale for all": (FP8, quantised.fp8_tensor),
    "two in a byte": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, quantised.modelopt_fp4),
}


@pytest.mark.parametrize("way", STORED)
def test_slices_of_quantised_matrices_are_slices_of_their_values(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more is read for them than whole words and scales need."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    made = make_checkpoint(tmp_path / "plain", "llama2", vocab_size=128, intermediate_size=384, **sizes)
    quantised.write(made, tmp_path / "stored", *STORED[way])
    checkpoint = resolve(tmp_path / "stored", role="target")
    whole, cpu = source_of(checkpoint), torch.device("cpu")
    read = counted(monkeypatch)
    for rank, ranks in ((1, 2), (0, 4)):
        slices = slices_of(checkpoint.native, RankShare(rank, ranks, ranks))
        own = SlicedTensors(whole, slices)
        with whole.open():
            for each, place in slices.items():
                read.clear()
                if (codes := own.codes(each, cpu)) is None:
                    continue
                part_read = without_indices(read)
                read.clear()
                values = whole.read(each)
                rows = torch.cat([values[slice(*cut)] for cut in place.rows])
                cut = rows if place.columns is None else rows[:, slice(*place.columns)]
                assert own.kind(each) == codes.kind, each
                assert torch.equal(codes.dequantise(torch.float32), cut), (ranks, each)
                unit = 128 if way.startswith("blocks") else 64  # of groups
                aligned = cut.shape[0] % unit == cut.shape[1] % unit == 0
                share = 1.02 * cut.numel() / values.numel() if aligned else 1.0  # beside it scales of all
                assert part_read <= share * without_indices(read), (ranks, each)


def without_indices(read: dict[str, int]) -> int:
    """Elements that were read, but for those that say in which group a column is."""
    return sum(count for name, count in read.items() if not name.endswith("g_idx"))


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Elements that are read from now on, by stored tensor."""
    read: dict[str, int] = {}
    for name in ("read", "read_part"):
        real = getattr(ShardTensors, name)

        def reads(self: ShardTensors, tensor: str, *place: slice, real=real) -> torch.Tensor:  # type: ignore[no-untyped-def]
            found: torch.Tensor = real(self, tensor, *place)
            read[tensor] = read.get(tensor, 0) + found.numel()
            return found

        monkeypatch.setattr(ShardTensors, name, reads)
    return read


def test_experts_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    make_family("qwen3_moe", moe_intermediate_size=50).save_pretrained(tmp_path)
    spec = resolve(tmp_path, role="target").native
    with pytest.raises(UnsupportedOption, match=r"intermediate_size 96, width of experts 50; use one of 1, 2$"):
        check_divides(spec, 4, "m")


def test_experts_in_mxfp4_are_cut_where_kernels_can_read_them() -> None:
    shares = [RankShare(rank, 4, 4) for rank in range(4)]
    cuts = [share.cut(2880, 64) for share in shares]
    assert [cut.stop - cut.start for cut in cuts] == [768, 704, 704, 704]
    assert [place for cut in cuts for place in range(*cut)] == list(range(2880))


def test_arguments_that_cannot_be_are_refused_before_anything_is_read() -> None:
    for options, named in (
        ({"tensor_parallel": 3}, "wanted 'auto' or one of 1, 2, 4, 8"),
        ({"tensor_parallel": 2}, "needs 2 processes, and this is one alone: .*torchrun --nproc-per-node 2"),
        ({"tensor_parallel": 1, "draft_tensor_parallel": "half"}, "wanted 'replicated' or 'split'"),
        ({"draft_tensor_parallel": "split"}, "goes with tensor_parallel"),
    ):
        with pytest.raises(UnsupportedOption, match=named):
            FastSpecGenerator("/nowhere", **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Drafting:
    """A draft of so many bytes a pass."""

    bytes: float
    num_layers: int = 16
    family: str = "llama"
    vocab_size: int = 128256
    num_heads: int = 32
    num_kv_heads: int = 8

    @property
    def divided(self) -> dict[str, int]:
        return {"intermediate_size": 8192}

    def weight_bytes(self, dtype: torch.dtype) -> int:
        return int(self.bytes)


def test_a_draft_is_cut_where_its_bytes_weigh_more_than_its_sums() -> None:
    def pays(draft: Drafting) -> list[int]:
        return [ranks for ranks in (1, 2, 4, 8) if splitting_pays(draft, torch.bfloat16, ranks, 3.35e12)]

    assert pays(Drafting(3e9)) == [2, 4]
    assert pays(Drafting(2e10)) == [2, 4, 8]
    assert pays(Drafting(5e8)) == []
    assert pays(replace(Drafting(2e10), num_heads=31)) == [], "it does not divide"


@pytest.mark.parametrize(("family", "cut"), [("olmo2", False), ("olmoe", False), ("llama", True)])
def test_a_draft_of_more_sums_stays_whole(
    family: str, cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody has asked for it to be cut."""
    make_checkpoint(tmp_path, "llama3") if family == "llama" else make_family(family).save_pretrained(tmp_path)
    draft, two = resolve(tmp_path, role="draft"), Ranks(SimpleNamespace(size=2), True, None)  # type: ignore[arg-type]
    monkeypatch.setattr(rank_settings, "memory_rate", lambda device: 1.0)  # so slow that cutting pays
    assert rank_settings._splits_draft(draft, two, torch.device("cuda"), None) is cut
    assert not rank_settings._splits_draft(draft, two, torch.device("cpu"), None)


def test_sums_of_parts_are_one_tree_whoever_has_them() -> None:
    parts = [torch.tensor([float(10**power)]) for power in (8, 0, 0, -8, 8, 1, 2, 3)]
    whole = tree_sum(parts)
    for ranks in (2, 4):
        each = len(parts) // ranks
        assert torch.equal(tree_sum([tree_sum(parts[i * each : (i + 1) * each]) for i in range(ranks)]), whole)


def test_keys_find_the_largest_logit_as_argmax_does() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (64, 32), generator=generator).float()  # many are equal
    logits[1, 7], logits[2, 30], logits[3, :] = torch.nan, torch.nan, -torch.inf
    logits[4], logits[5, 20] = -0.0, torch.inf
    logits[4, 9] = 0.0
    for limit in (32, 20, 5):
        keys = [keys_of(part, limit - 8 * index) for index, part in enumerate(logits.split(8, dim=-1))]
        assert torch.equal(largest_of(keys, 8), logits[:, :limit].argmax(dim=-1)), limit
