"""Models rounded to fewer bits while they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastspec import FastSpecGenerator, UnsupportedOption
from fastspec.kernels.common.code_packing import can_pack_codes
from fastspec.kernels.common.packing import can_pack
from fastspec.kernels.common.rounding import FORMATS, kind_for, rounded
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints import weight_loader
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.checkpoints.weight_loader import Loader
from tests.helpers import quantised
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.live_bytes import LiveBytes
from tests.models.checkpoints.quantised.test_checkpoints import KINDS, SMALL, made

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "llama3", tie_word_embeddings=False, **SMALL)


@pytest.mark.parametrize("form", FORMATS)
def test_matrices_are_rounded_and_a_drafts_head_too(plain: Path, form: str) -> None:
    pair = resolve_pair(plain, plain, (None, None), (form, form))
    exact = load_weights(resolve_pair(plain, None, (None, None), (None, None))[0], dtype=torch.float32, device=CPU)
    for checkpoint in pair:
        weights = load_weights(checkpoint, dtype=torch.float32, device=CPU, progress=False)
        for one, other in zip(weights.layers, exact.layers, strict=True):
            for name in ("qkv", "o", "gate_up", "down"):
                values = getattr(other, name).unpack()
                meant = rounded(values, kind_for(form, tuple(values.shape))).dequantise(torch.float32)
                assert torch.equal(getattr(one, name).unpack(), meant), name
        assert torch.equal(weights.embed.unpack(), exact.embed.unpack())
        assert torch.equal(weights.head.unpack(), exact.head.unpack()) == (checkpoint.role == "target")
        assert checkpoint.bytes_loaded(torch.float32, CPU, TORCH_OPS) == weights.nbytes()


@pytest.mark.parametrize(("form", "kept"), [*((form, True) for form in FORMATS), ("int4", False), (None, False)])
def test_packed_weights_are_made_run_by_run(
    form: str | None, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: two tiles at a time give the bits of whole matrices, also of gate and up, whose rows alternate.

    kept: as codes, or as the values that they stand for.
    """
    ops = TORCH_OPS.replaced(
        keeps_codes=lambda shape, kind, *_: kept and can_pack_codes(shape, kind),
        weight_format=lambda shape, dtype, _: "packed" if can_pack(shape, dtype) else "rows",
    )
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "tie_word_embeddings": False}
    plain = make_checkpoint(tmp_path / "model", "llama3", **sizes)
    checkpoint = resolve_pair(plain, plain, (None, None), (None, form))[1]
    assert isinstance(checkpoint, Checkpoint)
    options = {"dtype": torch.bfloat16, "device": CPU, "progress": False}
    rows = load_weights(checkpoint, **options, ops=TORCH_OPS)
    monkeypatch.setattr(weight_loader, "VALUES", 2 * 16 * 128)
    runs: list[int] = []
    fill = Loader._fill_rows
    monkeypatch.setattr(Loader, "_fill_rows", lambda *given: (runs.append(len(given[4])), fill(*given)))
    packed = load_weights(checkpoint, **options, ops=ops)
    formats = set()
    for one, other in zip(packed.layers, rows.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            weight = getattr(one, name)
            formats.add(weight.format)
            assert torch.equal(weight.unpack(), getattr(other, name).unpack()), name
    assert torch.equal(packed.head.unpack(), rows.head.unpack())
    assert formats == {"codes" if kept else "packed"}
    assert {16, 32} <= set(runs), "gate and up by turns, others in runs of two tiles"


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_beside_the_quantised_model_lies_less_than_a_layer(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reader of a GPU has a run of its own, which is to a layer of an 8B as here to a layer of this model."""
    round_codes = pytest.importorskip("fastspec.kernels.round_codes", reason="Triton ships for Linux only")
    ops = TORCH_OPS.replaced(
        keeps_codes=lambda shape, kind, *_: can_pack_codes(shape, kind),
        pack_rounded=round_codes.pack_rounded,
    )
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    plain = make_checkpoint(tmp_path / "model", "llama3", **{**sizes, "tie_word_embeddings": False})
    checkpoint = resolve_pair(plain, None, (None, None), (form, None))[0]
    assert isinstance(checkpoint, Checkpoint)
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256
    monkeypatch.setattr(weight_loader, "VALUES", layer // 26)
    monkeypatch.setattr(round_codes, "ROWS", 32)  # the interpreter takes its time for each program
    with LiveBytes() as live:
        weights = load_weights(checkpoint, dtype=torch.bfloat16, device=CPU, progress=False, ops=ops)
    assert {each.down.format for each in weights.layers} == {"codes"}
    assert checkpoint.bytes_loaded(torch.bfloat16, CPU, ops) == weights.nbytes()
    beside = live.peak - weights.nbytes()
    assert 0 < beside * weight_loader.READERS <= 2 * layer


def test_a_packed_weight_of_plain_and_quantised_parts(tmp_path: Path) -> None:
    """A gate that is stored as codes beside an up that is not: both are dequantised, and packed as a whole."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "tie_word_embeddings": False}
    plain = make_checkpoint(tmp_path / "model", "llama3", **sizes)
    settings, pack = KINDS["fp8 channel"]()
    quantised.write(plain, tmp_path / "q", settings, pack, keep=("down_proj", "up_proj"))
    ops = TORCH_OPS.replaced(weight_format=lambda shape, dtype, _: "packed" if can_pack(shape, dtype) else "rows")
    options = {"dtype": torch.bfloat16, "device": CPU, "progress": False}
    one, other = (
        load_weights(resolve(tmp_path / "q", role="target"), **options, ops=each) for each in (ops, TORCH_OPS)
    )
    for packed, rows in zip(one.layers, other.layers, strict=True):
        assert packed.gate_up is not None
        assert rows.gate_up is not None
        assert packed.gate_up.format == "packed"
        assert torch.equal(packed.gate_up.unpack(), rows.gate_up.unpack())


@pytest.mark.parametrize("form", FORMATS)
def test_a_rounded_draft_changes_no_text(plain: Path, form: str) -> None:
    ids = torch.arange(5, 25)[None] % 97
    options = {"dtype": torch.float32, "device": "cpu", "max_length": 128, "progress": False}
    text = FastSpecGenerator(plain, **options).generate(ids, max_new_tokens=80)
    generator = FastSpecGenerator(plain, plain, draft_quantization=form, **options)
    out = generator.generate(ids, max_new_tokens=80, return_dict_in_generate=True)
    assert torch.equal(out.sequences, text)
    # a draft that is the target accepts all; this one is close to it and no more
    assert 0 < out.stats.acceptance_rate < (1 if form == "int4" else 1.01)
    assert f"rounded to {form} while loading, which never changes the text" in generator.explain()


def test_a_rounded_target_is_another_model(plain: Path) -> None:
    ids = torch.arange(5, 25)[None] % 97
    options = {"dtype": torch.float32, "device": "cpu", "max_length": 128, "progress": False}
    generator = FastSpecGenerator(plain, target_quantization="int4", **options)
    assert "another model than the one that is stored" in generator.explain()
    text = FastSpecGenerator(plain, **options).generate(ids, max_new_tokens=80)
    assert not torch.equal(generator.generate(ids, max_new_tokens=80), text)


def test_what_cannot_be_rounded_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="draft_quantization='int3' is not supported, wanted one of fp8, int8"):
        FastSpecGenerator(plain, plain, draft_quantization="int3", device="cpu")
    made(plain, tmp_path / "q", "int4")
    with pytest.raises(UnsupportedOption, match=r"target_quantization='int8' cannot be applied, because .* is stored quantised"):
        FastSpecGenerator.plan(tmp_path / "q", target_quantization="int8", device="cpu")
