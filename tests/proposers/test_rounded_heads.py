"""Heads that are rounded to fewer bits while they are loaded: what is rounded, and that the text stays the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec import FastSpecGenerator, GenerateOutput, UnsupportedOption
from fastspec.kernels.common.rounding import FORMATS, kind_for, rounded
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.pair import AS_STORED, resolve_pair
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.weights import HeadWeights, allocate_head
from tests.helpers import dflash
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.devices import devices
from tests.helpers.heads import HIDDEN, LAYERS, VOCAB, eagle3_tensors, write_eagle3, write_speculators
from tests.helpers.mtp import write_target
from tests.scheduling.test_scheduler import prompts

GIVEN = [*prompts(3, seed=5), [5, 6, 7, 8, 9] * 4]
COMMON: dict[str, Any] = {"max_batch_size": 3, "max_length": 120, "progress": False, "dtype": "float32"}
CPU = torch.device("cpu")
KINDS = ("eagle", "speculators", "dflash", "mtp")


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path | str]:
    path, kind = tmp_path_factory.mktemp("pair"), request.param
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    if kind == "mtp":
        return write_target(path, "nextn", **sizes)[0], "mtp"
    target = make_checkpoint(path / "target", "llama3", num_hidden_layers=LAYERS, **sizes)
    if kind == "dflash":
        head = dflash.Head(hidden=128, vocab=VOCAB, target_layers=LAYERS, inner=128, ids=(0, 2, 4), block_size=8)
        return target, dflash.write_z_lab(path / "head", head)
    made: dict[str, Any] = {"target_hidden": 128, "hidden": HIDDEN, "inner": 64, "std": 0.5}
    if kind == "eagle":
        config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
        return target, write_eagle3(path / "head", eagle3_tensors(layers=2, **made), **config)
    return target, write_speculators(path / "head", eagle3_tensors(drafted=VOCAB, **made), boundaries=[2, 4, 5])


def texts(target: Path, device: str, **options: Any) -> tuple[list[Tensor], str]:
    """Greedy and sampled texts under the rule that promises one text a seed; and what `explain` says."""
    options = {"verification": "coupled", "device": device, **COMMON, **options}
    found = []
    with FastSpecGenerator(target, **options) as generator:
        for law in ({}, {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "seed": 4}):
            out = generator.generate(GIVEN, max_new_tokens=12, eos_token_id=[], return_dict_in_generate=True, **law)
            assert isinstance(out, GenerateOutput)
            found.append(out.sequences)
        return found, generator.explain()


@cache
def plain(target: Path, device: str) -> list[Tensor]:
    return texts(target, device, num_speculative_tokens=0)[0]


@pytest.mark.filterwarnings("ignore:the head's config")
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", FORMATS)
def test_the_text_stays_the_same(form: str, device: str, pair: tuple[Path, Path | str]) -> None:
    target, head = pair
    found, said = texts(target, device, draft=head, draft_quantization=form, num_speculative_tokens=4)
    for got, wanted in zip(found, plain(target, device), strict=True):
        assert torch.equal(got, wanted)
    assert f"matrices rounded to {form} while loading, which never changes the text" in said


def loaded(target: Path, head: Path | str, form: str | None) -> tuple[HeadWeights, HeadCheckpoint]:
    scored, found = resolve_pair(target, head, (None, None), (None, form))
    assert isinstance(found, HeadCheckpoint)
    shared = load_weights(scored, dtype=torch.float32, device=CPU, progress=False)
    pending = allocate_head(found, shared, dtype=torch.float32, device=CPU, ops=TORCH_OPS, progress=False)
    pending.fill()
    return pending.weights, found


def matrices(weights: HeadWeights) -> dict[str, Weight]:
    """All but embeddings."""
    layers = weights.decoder.layers
    found = {f"{at}.{name}": getattr(layer, name) for at, layer in enumerate(layers) for name in ("qkv", "o", "down")}
    found |= {f"{at}.gate_up": layer.mlp[0] for at, layer in enumerate(layers)}
    return found | {name: each for name, each in weights.others.items() if isinstance(each, Weight)}


@pytest.mark.parametrize("form", FORMATS)
def test_matrices_are_rounded_and_what_is_shared_is_not(form: str, pair: tuple[Path, Path | str]) -> None:
    weights, checkpoint = loaded(*pair, form)
    exact, _ = loaded(*pair, None)
    for name, matrix in matrices(exact).items():
        values = matrix.unpack()
        meant = rounded(values, kind_for(form, tuple(values.shape))).dequantise(torch.float32)  # type: ignore[arg-type]
        assert torch.equal(matrices(weights)[name].unpack(), meant), name
    assert torch.equal(weights.decoder.embed.unpack(), exact.decoder.embed.unpack())
    values = exact.decoder.head.unpack()
    if checkpoint.spec.own_head:
        kind = kind_for("int8" if form == "int4" else form, tuple(values.shape))  # type: ignore[arg-type]
        values = rounded(values, kind).dequantise(torch.float32)  # type: ignore[arg-type]
    assert torch.equal(weights.decoder.head.unpack(), values)


@pytest.mark.parametrize("form", [None, *FORMATS])
def test_the_plan_has_the_bytes_that_are_taken(form: str | None, pair: tuple[Path, Path | str]) -> None:
    weights, checkpoint = loaded(*pair, form)
    decoder, spec = weights.decoder, checkpoint.spec
    shared = [each for each, own in ((decoder.embed, spec.own_embed), (decoder.head, spec.own_head)) if not own]
    taken = decoder.nbytes() - sum({id(each): each.nbytes for each in shared}.values())
    taken += sum(each.nbytes for each in weights.others.values())
    tables = 0 if checkpoint.vocab_map is None else 8 * (len(checkpoint.vocab_map) + spec.target.vocab_size)
    assert checkpoint.bytes_loaded(torch.float32, CPU, TORCH_OPS) == taken + tables


@pytest.mark.filterwarnings("ignore:the head's config")
def test_auto_and_what_is_no_format(pair: tuple[Path, Path | str]) -> None:
    target, head = pair
    options = {"device": "cpu", **COMMON}
    with FastSpecGenerator(target, head, draft_quantization="auto", **options) as made:
        assert f"format     {AS_STORED}" in made.explain()
        assert "no format is read with fewer bytes here" in made.explain()
    with pytest.raises(UnsupportedOption, match="draft_quantization='int3' is not supported, wanted one of fp8, int8"):
        FastSpecGenerator(target, head, draft_quantization="int3", **options)
