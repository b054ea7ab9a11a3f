"""What transformers reads of quantised checkpoints with dequantize=True has the bits of what is read here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from fastspec import FastSpecGenerator
from fastspec.kernels.common.rounding import FORMATS
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.quantised.write import write_quantised
from fastspec.models.checkpoints.resolve import resolve
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.versions import OLDER
from tests.models.checkpoints.quantised.test_checkpoints import SMALL, made

pytest.importorskip("compressed_tensors", reason="transformers reads its layouts by it")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # that a config is overwritten, as it is to be


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("read") / "model", "llama3", tie_word_embeddings=False, **SMALL)


def read_alike(path: Path, config: object, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    how = {"quantization_config": config, "dtype": dtype, "output_loading_info": True}
    theirs, found = AutoModelForCausalLM.from_pretrained(path, **how)
    if found["missing_keys"] and OLDER:
        pytest.skip("an older transformers looks for 8 bits by the names of 4")
    checkpoint = resolve(path, role="target")
    ours = load_weights(checkpoint, dtype=dtype, device=torch.device("cpu"), progress=False)
    assert checkpoint.quantisation is not None
    for one, layer in zip(ours.layers, theirs.model.layers, strict=True):
        mlp = layer.mlp
        assert torch.equal(one.down.unpack(), mlp.down_proj.weight)  # type: ignore[union-attr]
        assert torch.equal(one.gate_up.unpack(), torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))  # type: ignore[union-attr]
        attention = layer.self_attn
        qkv = [each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
        assert torch.equal(one.qkv.unpack(), torch.cat(qkv))
        assert torch.equal(one.o.unpack(), attention.o_proj.weight)
    return theirs


@pytest.mark.parametrize("form", FORMATS)
def test_transformers_reads_what_we_write(plain: Path, tmp_path: Path, form: str) -> None:
    from transformers.utils.quantization_config import CompressedTensorsConfig

    write_quantised(str(plain), tmp_path / "q", form)
    theirs = read_alike(tmp_path / "q", CompressedTensorsConfig(run_compressed=False))
    ids = torch.arange(5, 25)[None] % 97
    wanted = theirs.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    generator = FastSpecGenerator(tmp_path / "q", dtype=torch.float32, device="cpu", max_length=64, progress=False)
    assert torch.equal(generator.generate(ids, max_new_tokens=40, eos_token_id=None), wanted)


@pytest.mark.parametrize("kind", ["fp8 channel", "fp8 tensor", "fp8 block", "int8", "int4", "int4 with zeros"])
def test_what_compressed_tensors_writes(plain: Path, tmp_path: Path, kind: str) -> None:
    from transformers.utils.quantization_config import CompressedTensorsConfig

    made(plain, tmp_path / "q", kind)
    read_alike(tmp_path / "q", CompressedTensorsConfig(run_compressed=False))


def test_fp8_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, to which transformers rounds them, and in whole blocks: partial ones at edges it takes for smaller ones.

    It asks for accelerate first, which reading needs not.
    """
    from transformers import FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    sizes = {**SMALL, "hidden_size": 256, "intermediate_size": 384}
    whole = make_checkpoint(tmp_path / "whole", "llama3", tie_word_embeddings=False, **sizes)
    made(whole, tmp_path / "q", "fp8 of DeepSeek")
    read_alike(tmp_path / "q", FineGrainedFP8Config(dequantize=True), torch.bfloat16)
