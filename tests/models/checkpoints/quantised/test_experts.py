"""Quantised experts under the names of their publishers: kept in their codes where ops read them, else their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastspec import FastSpecGenerator, UnsupportedModel
from fastspec.kernels.common.experts import can_stack_codes
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.decoder_weights import load_weights, planned_bytes
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.layer_table import DecoderWeights
from tests.helpers.hybrid import VOCAB, decoder, logits_of
from tests.helpers.mxfp4 import rewritten
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


def test_an_algorithm_of_one_layer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    quantised, _ = save("mixed", tmp_path)
    settings = config_of(quantised)["quantization_config"]
    settings["quantized_layers"]["backbone.layers.0.mixer.in_proj"]["quant_algo"] = "W4A8_AWQ"
    rewritten(quantised, {"x": torch.ones(1)}, quantization_config=settings)
    with pytest.raises(UnsupportedModel, match=r"backbone.layers.0.mixer.in_proj.quant_algo='W4A8_AWQ'"):
        resolve(quantised, role="target")
