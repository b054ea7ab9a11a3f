"""A decoder cut among ranks: the same bits on every rank, and on every number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastspec.distributed.exchange import Alone
from fastspec.distributed.slices import share_of
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.rank_slices import sliced
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.parallel import ParallelDecoder
from fastspec.shapes import Tiling
from tests.helpers import hybrid
from tests.helpers.families import FAMILIES, decoder, logits_of, make_family
from tests.helpers.ranks import BetweenThreads, on_each

TILING = Tiling(rows=8, queries=8)
IDS = torch.tensor([[5, 9, 3, 77, 41]])
# with other norms and scales, fused tensors, biases, parallel parts, no gate: the first of each; one norm over all
# heads, experts with a shared one and its gate, beside dense layers, with biases and sinks
QUICK = ("gemma3", "phi3", "granite", "cohere", "starcoder2", "glm4", "olmo2", "qwen2_moe", "glm4_moe", "gpt_oss")
CUT = [
    family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES
    if family != "phi3-long"
]


def part_of(checkpoint: Checkpoint, rank: int, ranks: int, between: BetweenThreads | Alone) -> ParallelDecoder:
    """One rank's decoder."""
    own = sliced(checkpoint, share_of(checkpoint.native, rank, ranks, one_tree=True))
    weights = load_weights(own, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    options = {"sliced": own.sliced, "exchange": between}
    return decoder(own.native, weights, ParallelDecoder, **options)  # type: ignore[return-value]


def logits_on(checkpoint: Checkpoint, ranks: int) -> list[Tensor]:
    """The logits that each of so many ranks has."""
    if ranks == 1:
        return [logits_of(part_of(checkpoint, 0, 1, Alone()), IDS, tiling=TILING)]
    return on_each(
        ranks, lambda rank, between: logits_of(part_of(checkpoint, rank, ranks, between), IDS, tiling=TILING)
    )


def checkpoint_of(family: str, path: Path, **changes: object) -> Checkpoint:
    make_family(family, **changes).save_pretrained(path)
    return resolve(path, role="target")


@pytest.mark.parametrize("family", CUT)
def test_every_family_has_the_same_bits_on_one_two_and_four_ranks(family: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(family, tmp_path)
    whole = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    plain = logits_of(decoder(checkpoint.native, whole), IDS, tiling=TILING)
    (one,) = logits_on(checkpoint, 1)
    torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-4)  # K in parts: another order of the same sums
    for ranks in (2, 4):
        for found in logits_on(checkpoint, ranks):
            assert torch.equal(found, one), (ranks, (found - one).abs().max())


@pytest.mark.parametrize(
    "kind",
    [
        *("next", "lfm2_moe", "lfm3", "granite4", "kimi_linear", "ling"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5", "qwen3_5_moe", "lfm2", "bamba")),
    ],
)
def test_hybrid_models_have_the_same_bits_on_one_and_two_ranks(kind: str, tmp_path: Path) -> None:
    made = hybrid.make_states(kind) if kind in hybrid.STATES else hybrid.make_hybrid(kind)
    plain_names = kind == "next" or kind in hybrid.STATES
    made.save_pretrained(tmp_path) if plain_names else hybrid.save_published(made, tmp_path)
    checkpoint = resolve(tmp_path, role="target")
    whole = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)

    def logits(rank: int, ranks: int, between: BetweenThreads | Alone) -> Tensor:
        own = sliced(checkpoint, share_of(checkpoint.native, rank, ranks, one_tree=True))
        weights = load_weights(own, dtype=torch.float32, device=torch.device("cpu"), progress=False)
        options = {"sliced": own.sliced, "exchange": between}
        return hybrid.logits_of(hybrid.decoder(own.native, weights, ParallelDecoder, **options), IDS, tiling=TILING)

    one = logits(0, 1, Alone())
    plain = hybrid.logits_of(hybrid.decoder(checkpoint.native, whole), IDS, tiling=TILING)
    torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-4)  # K in parts: another order of the same sums
    for found in on_each(2, lambda rank, between: logits(rank, 2, between)):
        assert torch.equal(found, one), (found - one).abs().max()


def test_eight_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    """A head each, with key heads for pairs of ranks and one for each."""
    for kv_heads in (4, 8):
        sizes = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "intermediate_size": 96}
        checkpoint = checkpoint_of("granite", tmp_path / str(kv_heads), **sizes)
        (one,) = logits_on(checkpoint, 1)
        found = logits_on(checkpoint, 8)
        assert len(found) == 8
        assert all(torch.equal(each, one) for each in found)


def test_products_have_the_same_shapes_on_any_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # libraries choose the order of a sum by shape, so what one machine rounds alike another may not
    checkpoint = checkpoint_of("granite", tmp_path)
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for ranks in (1, 2, 4):
        found = shapes.setdefault(ranks, set())
        real = torch.nn.functional.linear

        def seen(x: Tensor, weight: Tensor, bias: Tensor | None = None, into=found, real=real) -> Tensor:  # type: ignore[no-untyped-def]
            into.add((*x.shape, *weight.shape))
            product: Tensor = real(x, weight, bias)
            return product

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", seen)
            logits_on(checkpoint, ranks)
    assert shapes[1] == shapes[2] == shapes[4]
