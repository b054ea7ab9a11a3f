"""Experts by every name that they are stored under, in mxfp4 as well, and what is refused of them."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastspec import FastSpecGenerator
from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.decoder_weights import load_weights, planned_bytes
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.layer_table import DecoderWeights
from tests.helpers.families import MIXTURES, VOCAB, as_configured, decoder, logits_of, make_family
from tests.helpers.mxfp4 import MXFP4, in_mxfp4, rewritten

CPU = torch.device("cpu")
IDS = torch.randint(VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))
FILE = "model.safetensors"


def weights_of(checkpoint: Checkpoint) -> DecoderWeights:
    return load_weights(checkpoint, dtype=torch.float32, device=CPU, progress=False)


@pytest.mark.parametrize("family", MIXTURES)
def test_names_of_publishers_and_of_transformers_mean_the_same(family: str, tmp_path: Path) -> None:
    model = make_family(family)
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "fused")
    names = load_file(tmp_path / "published" / FILE).keys()
    assert family == "gpt_oss" or any("experts.0." in name for name in names)
    fused = {name: value for name, value in model.state_dict().items() if "rotary" not in name}
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    rewritten(tmp_path / "fused", fused)
    with torch.inference_mode():
        expected = as_configured(deepcopy(model))(IDS).logits
    for source in (tmp_path / "published", tmp_path / "fused", model):
        checkpoint = resolve(source, role="target")
        weights = weights_of(checkpoint)
        found = logits_of(decoder(checkpoint.native, weights), IDS)
        # fp32 sums in another order
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
        assert weights.nbytes() == checkpoint.native.weight_bytes(torch.float32)


def test_a_released_live_model_gives_its_experts_away(tmp_path: Path) -> None:
    model = make_family("qwen3_moe")
    checkpoint = resolve(model, role="target")
    before = weights_of(checkpoint)
    load_weights(checkpoint, dtype=torch.float32, device=CPU, progress=False, release_source=True)
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if "experts" in name)
    assert before.layers[0].experts is not None


@pytest.fixture
def oss(tmp_path: Path) -> tuple[Path, Path]:
    """gpt-oss with experts in mxfp4, and with the same experts as values."""
    model = make_family("gpt_oss", hidden_size=128, intermediate_size=64)
    for name in ("quantised", "plain"):
        model.save_pretrained(tmp_path / name)
    stored, plain = in_mxfp4(load_file(tmp_path / "plain" / FILE))
    rewritten(tmp_path / "quantised", stored, **MXFP4)
    rewritten(tmp_path / "plain", plain)
    return tmp_path / "quantised", tmp_path / "plain"


def test_experts_in_mxfp4_are_those_of_their_values(oss: tuple[Path, Path]) -> None:
    (quantised, plain), options = oss, {"dtype": "float32", "device": "cpu", "progress": False, "max_length": 64}
    first, second = (weights_of(resolve(path, role="target")).layers[1].experts for path in oss)
    assert first is not None
    assert second is not None
    assert torch.equal(first.gate_up.data, second.gate_up.data)
    assert torch.equal(first.down.data, second.down.data)
    texts = []
    for path in (quantised, plain):
        with FastSpecGenerator(path, **options) as gen:  # type: ignore[arg-type]
            texts.append(torch.as_tensor(gen.generate([[3, 5, 7]], max_new_tokens=20, eos_token_id=None)))
    assert torch.equal(*texts)


def test_experts_in_fp8_become_values(tmp_path: Path) -> None:
    make_family("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    stored = dict(tensors)
    for name in [each for each in tensors if "experts" in each]:
        stored[name] = (tensors[name] / 0.25).to(torch.float8_e4m3fn)
        blocks = [-(-size // 32) for size in tensors[name].shape]
        stored[f"{name}_scale_inv"] = torch.full(blocks, 0.25)
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    rewritten(tmp_path, stored, quantization_config=method)
    checkpoint = resolve(tmp_path, role="target")
    assert checkpoint.stored == "48 matrices in fp8 in blocks of 32 x 32"
    experts = weights_of(checkpoint).layers[0].experts
    assert experts is not None
    at = "model.layers.0.block_sparse_moe.experts.3."
    for part, found in ((f"{at}w3", experts.gate_up.data[3, 96:]), (f"{at}w2", experts.down.data[3])):
        assert torch.equal(found, stored[f"{part}.weight"].float() * 0.25)


def test_experts_in_mxfp4_stay_in_four_bits_where_ops_read_them(oss: tuple[Path, Path]) -> None:

    ops = TORCH_OPS.replaced(keeps_experts=lambda shape, kind, dtype, device: True)
    spec = resolve(oss[0], role="target")
    options = {"dtype": torch.float32, "device": CPU, "ops": ops}
    assert spec.stored == "experts in mxfp4"
    kept = load_weights(spec, progress=False, **options)
    assert kept.nbytes() == planned_bytes(spec, **options)  # type: ignore[arg-type]
    experts, values = kept.layers[0].experts, weights_of(spec).layers[0].experts
    assert experts is not None
    assert values is not None
    assert experts.gate_up.nbytes * 32 == values.gate_up.nbytes * (4 + 8 / 32)  # bits of a value
    for mine, theirs in ((experts.gate_up, values.gate_up), (experts.down, values.down)):
        assert torch.equal(mine.values(torch.arange(8)), theirs.data)
    first, second = (logits_of(decoder(spec.native, each), IDS) for each in (kept, weights_of(spec)))
    assert torch.equal(first, second)


def test_experts_that_are_not_what_the_config_says(oss: tuple[Path, Path], tmp_path: Path) -> None:
    quantised, plain = oss
    rewritten(plain, load_file(plain / FILE), **MXFP4)
    with pytest.raises(CheckpointError, match="stored as plain values, and quantization_config says mxfp4"):
        resolve(plain, role="target")
    stored = load_file(quantised / FILE)
    rewritten(quantised, stored, quantization_config=None)
    with pytest.raises(CheckpointError, match="stored in mxfp4, and quantization_config does not say mxfp4"):
        resolve(quantised, role="target")
    scales = "model.layers.0.mlp.experts.down_proj_scales"
    rewritten(quantised, {name: value for name, value in stored.items() if name != scales}, **MXFP4)
    with pytest.raises(CheckpointError, match="down_proj_scales is missing"):
        resolve(quantised, role="target")
    rewritten(quantised, stored | {scales: stored[scales][:, :-1]})
    with pytest.raises(CheckpointError, match=r"down_proj_scales in .* has shape \[8, 127, 2\], wanted \[8, 128, 2\]"):
        resolve(quantised, role="target")


@pytest.mark.parametrize("family", MIXTURES)
def test_a_config_of_other_experts_is_refused(family: str, tmp_path: Path) -> None:
    make_family(family).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    field = next(name for name in ("moe_intermediate_size", "intermediate_size") if name in raw)
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: 2 * raw[field]}))
    with pytest.raises(CheckpointError, match=r"has shape .*wanted"):
        resolve(tmp_path, role="target")
    field = next(name for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in raw)
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: 2 * raw[field]}))
    with pytest.raises(CheckpointError, match=r"missing|has shape"):
        resolve(tmp_path, role="target")


def test_an_expert_stored_twice_is_refused(tmp_path: Path) -> None:
    make_family("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    other = tensors["model.layers.0.block_sparse_moe.experts.0.w1.weight"].clone()
    rewritten(tmp_path, tensors | {"model.layers.0.mlp.experts.0.gate_proj.weight": other})
    with pytest.raises(CheckpointError, match="are both the parameter"):
        resolve(tmp_path, role="target")


def test_what_does_not_go_with_experts_is_refused(tmp_path: Path) -> None:
    make_family("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedOption, match="experts are not rounded while loading"):
        FastSpecGenerator(tmp_path, target_quantization="int8", device="cpu")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | MXFP4))
    with pytest.raises(UnsupportedModel, match="it is supported for the experts of gpt_oss only"):
        resolve(tmp_path, role="target")
