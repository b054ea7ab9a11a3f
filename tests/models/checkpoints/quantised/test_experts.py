"""Quantised experts under the names of their publishers: kept in their codes where ops read them, else their values."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastspec import CheckpointError, FastSpecGenerator, UnsupportedModel
from fastspec.kernels.common.experts import can_stack_codes
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.decoder_weights import load_weights, planned_bytes
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.layer_table import DecoderWeights
from tests.helpers.families import make_family
from tests.helpers.hybrid import VOCAB, decoder, logits_of
from tests.helpers.mxfp4 import FILE, rewritten
from tests.helpers.quantised import modelopt_fp4
from tests.helpers.quantised_experts import FORMS, config_of, save

OPTIONS = {"dtype": torch.float32, "device": torch.device("cpu")}
KEEPING = TORCH_OPS.replaced(
    keeps_experts=lambda shape, kind, dtype, device: can_stack_codes(shape, kind),
    joins_shared=lambda dtype, hidden, device: (
        True
    ),  # a shared expert in plain values must not bring the codes to an end
)
# bits of a value: its code, then its scales, of which some are stored wider than in the checkpoint; of rows of 64
# padded to 128, and a factor of each row
BITS = {"fp8": 2 * 8 + 32 / 64, "gptq": 2 * (4 + 16 / 32) + 32 / 64, "awq": 2 * (4 + 32 / 32) + 32 / 64}
CODES = {torch.float8_e4m3fn: torch.uint8}  # of which torch has no stacks
BITS |= {"nvfp4": 2 * (4 + 16 / 16) + 32 / 64, "mixed": 2 * (4 + 16 / 16) + 32 / 64}


def weights_of(path: Path, ops: object = TORCH_OPS) -> DecoderWeights:
    return load_weights(resolve(path, role="target"), progress=False, ops=ops, **OPTIONS)


@pytest.mark.filterwarnings("ignore::UserWarning")  # tensors of a drafter and of a tower, no tokenizer
@pytest.mark.parametrize("form", FORMS)
def test_experts_stay_in_their_codes_and_mean_their_values(form: str, tmp_path: Path) -> None:
    quantised, meant = save(form, tmp_path)
    checkpoint = resolve(quantised, role="target")
    kept, dequantised, plain = weights_of(quantised, KEEPING), weights_of(quantised), weights_of(meant)
    layers = [layer for layer, weights in enumerate(plain.layers) if weights.experts is not None]
    assert len(layers) >= 2
    for layer in layers:
        stacks = [each.layers[layer].experts for each in (kept, dequantised, plain)]
        assert stacks[0] is not None
        assert stacks[0].gate_up.codes is not None
        for name in ("gate_up", "down"):
            codes, one, other = (getattr(each, name) for each in stacks)
            assert torch.equal(one.data, other.data)
            experts = torch.arange(len(one.data))
            # scales of fp4 are a number of four bits times a factor of the row, to 2^-22
            torch.testing.assert_close(codes.values(experts), one.data, rtol=2**-21, atol=0)
            blocks = 64 / (16 * 64) if form == "fp8" and name == "down" else 0  # of blocks 16 rows have one scale
            assert codes.nbytes * 8 == one.data.numel() * (BITS[form] + blocks), name
    assert (
        abs(kept.nbytes() - planned_bytes(checkpoint, ops=KEEPING, **OPTIONS)) <= (form == "awq") * kept.nbytes() / 10
    )
    ids = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    first, second = (logits_of(decoder(checkpoint.native, each), ids) for each in (kept, plain))
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_text_is_that_of_the_values_with_and_without_drafts(tmp_path: Path) -> None:
    quantised, meant = save("mixed", tmp_path)
    prompts, texts = [[5, 9, 2, 5, 9], list(range(20, 32))], []
    for path, k in ((quantised, 0), (quantised, 3), (meant, 0)):
        with FastSpecGenerator(
            path, quantised, num_speculative_tokens=3, dtype="float32", device="cpu", max_length=128, progress=False
        ) as gen:
            texts.append(gen.generate(prompts, max_new_tokens=12, eos_token_id=None, num_speculative_tokens=k))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all experts as transformers has them in memory: scales of gate and up one above the other."""
    found, matrices = {}, {}
    for name, tensor in tensors.items():
        if (
            match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|weight_scale_inv)", name)
        ) is None:
            found[name] = tensor
            continue
        stack, expert, part, leaf = match.groups()
        kind = "down" if part == "down" else "gate_up"
        name = f"{stack}.{kind}_proj{leaf.removeprefix('weight')}"
        matrices.setdefault(name, {}).setdefault(int(expert), {})[part] = tensor.view(
            CODES.get(tensor.dtype, tensor.dtype)
        )
    for name, experts in matrices.items():
        halves = ("down",) if "down" in name else ("gate", "up")
        whole = torch.stack([torch.cat([experts[at][each] for each in halves]) for at in range(len(experts))])
        found[name] = whole.view(torch.float8_e4m3fn) if whole.dtype is torch.uint8 else whole
    return found


def with_scales(tensors: dict[str, Tensor], form: str) -> dict[str, Tensor]:
    """Scales of experts as the powers of two next to them, or the gate's for up."""
    found = dict(tensors)
    for name in [each for each in tensors if ".experts." in each and each.endswith("scale_inv")]:
        if form == "powers":
            found[name] = torch.exp2(torch.log2(tensors[name]).round())
        elif form == "one":
            found[name] = tensors[name.replace("up_proj", "gate_proj")].clone()
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["blocks", "powers", "one"])
def test_stacks_of_all_experts_in_fp8_mean_what_each_of_them_means(form: str, tmp_path: Path) -> None:
    apart, _ = save("fp8", tmp_path)
    shutil.copytree(apart, tmp_path / "stacked")
    tensors = with_scales(load_file(apart / FILE), form)
    rewritten(apart, tensors)
    together = stacked(tensors)
    for name in [each for each in together if each.endswith("experts.gate_up_proj_scale_inv")]:
        assert together[name].shape == (4, 2, 1)
        if form == "powers":
            together[name] = together[name].to(torch.float8_e8m0fnu)
        elif form == "one":
            together[name] = together[name][:, :1]
        together[name.replace("scale_inv", "activation_scale")] = torch.full((4,), 7.0)  # changes no value of a matrix
    rewritten(tmp_path / "stacked", together)
    checkpoint = resolve(tmp_path / "stacked", role="target")
    assert checkpoint.stored == resolve(apart, role="target").stored
    for ops in (KEEPING, TORCH_OPS):
        one, other = weights_of(tmp_path / "stacked", ops), weights_of(apart, ops)
        for first, second in zip(one.layers, other.layers, strict=True):
            assert first.experts is not None
            assert second.experts is not None
            assert (first.experts.gate_up.codes is not None) == (ops is KEEPING)
            experts = torch.arange(4)
            for stack in ("gate_up", "down"):
                mine, theirs = (getattr(each, stack) for each in (first.experts, second.experts))
                assert torch.equal(mine.values(experts), theirs.values(experts))


def stacked_fp4(tensors: dict[str, Tensor], transposed: bool, own: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors with ModelOpt's stacks of all experts in NVFP4, and with the values that they mean.

    Args:
        tensors: in values, every expert's matrices under their own names.
        transposed: True for stacks [E, K / 2, N].
        own: True if every expert has a global scale of its own.
    """
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    packed, meant = dict(kept), dict(kept)
    for stack in {name.partition(".experts.")[0] + ".experts." for name in tensors.keys() - kept.keys()}:
        for kind, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            whole = [torch.cat([tensors[f"{stack}{at}.{each}_proj.weight"] for each in parts]) for at in range(4)]
            groups = [modelopt_fp4(each) for each in whole] if own else [modelopt_fp4(torch.cat(whole))]
            for at, values in enumerate(torch.cat([values for _, values in groups]).chunk(4)):
                for each, mine in zip(parts, values.chunk(len(parts)), strict=True):
                    meant[f"{stack}{at}.{each}_proj.weight"] = mine.contiguous()
            for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                name = stack + kind + ("" if leaf == "weight" else f"_{leaf}")
                found = [each[leaf] for each, _ in groups]
                if found[0].dim() == 0:
                    packed[name] = torch.stack(found) if own else found[0]
                    continue
                made = torch.cat([each.view(torch.uint8) for each in found]).unflatten(0, (4, -1))
                made = made.transpose(1, 2).contiguous() if transposed else made
                packed[name] = made.view(found[0].dtype)
    return packed, meant


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("transposed", "own"), [(False, True), (True, False)])
def test_stacks_of_all_experts_in_nvfp4_stay_in_their_codes(transposed: bool, own: bool, tmp_path: Path) -> None:
    quantised, meant = save("nvfp4", tmp_path)
    packed, values = stacked_fp4(load_file(meant / FILE), transposed, own)
    rewritten(quantised, packed)
    rewritten(meant, values)
    kept, dequantised, plain = weights_of(quantised, KEEPING), weights_of(quantised), weights_of(meant)
    for stacks in zip(*(each.layers for each in (kept, dequantised, plain)), strict=True):
        for name in ("gate_up", "down"):
            codes, one, other = (getattr(each.experts, name) for each in stacks)
            assert codes.codes is not None
            assert torch.equal(one.data, other.data)
            # scales of fp4 are a number of four bits times a factor of the row, to 2^-22
            torch.testing.assert_close(codes.values(torch.arange(4)), one.data, rtol=2**-21, atol=0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_scales_of_a_stack_that_do_not_fit_its_halves_are_refused(tmp_path: Path) -> None:
    path, _ = save("fp8", tmp_path)
    tensors = stacked(load_file(path / FILE))
    name = next(each for each in tensors if each.endswith("experts.gate_up_proj_scale_inv"))
    for scales, words in (
        (tensors[name].repeat(1, 2, 1)[:, :3], r"has shape \[4, 3, 1\], wanted \[4\], one number, or one matrix"),
        (tensors[name][:3], r"has shape \[3, 2, 1\], wanted \[4\]"),
        (tensors[name].repeat(1, 2, 1), r"weight_scale_inv is F32 \[2, 1\], wanted .* \[1, 1\]"),
    ):
        rewritten(path, {**tensors, name: scales})
        with pytest.raises(CheckpointError, match=words):
            resolve(path, role="target")
    del tensors[name]
    rewritten(path, tensors)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight_scale_inv is missing"):
        resolve(path, role="target")


def test_stacks_of_codes_whose_gate_and_up_alternate_are_refused(tmp_path: Path) -> None:
    make_family("gpt_oss").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    name = next(each for each in tensors if each.endswith("experts.gate_up_proj"))
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {}}
    rewritten(tmp_path, {**tensors, name: tensors[name].to(torch.uint8)}, quantization_config=settings)
    with pytest.raises(CheckpointError, match=r"gate_up_proj in .* gate and up rows alternate; wanted mxfp4"):
        resolve(tmp_path, role="target")


def test_an_algorithm_of_one_layer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    quantised, _ = save("mixed", tmp_path)
    settings = config_of(quantised)["quantization_config"]
    settings["quantized_layers"]["backbone.layers.0.mixer.in_proj"]["quant_algo"] = "W4A8_AWQ"
    rewritten(quantised, {"x": torch.ones(1)}, quantization_config=settings)
    with pytest.raises(UnsupportedModel, match=r"backbone.layers.0.mixer.in_proj.quant_algo='W4A8_AWQ'"):
        resolve(quantised, role="target")
