"""Checkpoints that `fastspec quantize` writes: read again, here or elsewhere, they are the rounded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fastspec import CheckpointError, FastSpecGenerator, UnsupportedOption
from fastspec.cli.app import app
from fastspec.kernels.common.rounding import FORMATS, kind_for, rounded
from fastspec.models.checkpoints.decoder_weights import load_weights, source_of
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.checkpoints.quantised.schemes import unpacked
from fastspec.models.checkpoints.quantised.write import packed, write_quantised
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.layer_table import EMBED, HEAD
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.hybrid import make_states
from tests.models.checkpoints.quantised.test_checkpoints import SMALL

CPU = torch.device("cpu")
# two sizes of groups in one file: 128 divides the columns of all but `down`, 64 those of `down`
TWO_GROUPS = {**SMALL, "hidden_size": 128, "intermediate_size": 192}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", "qwen2", **TWO_GROUPS)


@pytest.mark.parametrize("form", FORMATS)
def test_a_written_checkpoint_is_the_rounded_one(plain: Path, tmp_path: Path, form: str) -> None:
    write_quantised(str(plain), tmp_path / "q", form)
    written = resolve_pair(tmp_path / "q", None, (None, None), (None, None))[0]
    loaded = resolve_pair(plain, None, (None, None), (form, None))[0]
    one, other = (load_weights(each, dtype=torch.float32, device=CPU, progress=False) for each in (written, loaded))
    for mine, meant in zip(one.layers, other.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            assert torch.equal(getattr(mine, name).unpack(), getattr(meant, name).unpack()), name
    assert torch.equal(one.embed.unpack(), other.embed.unpack())
    assert torch.equal(one.norm, other.norm)
    size = sum(path.stat().st_size for path in (tmp_path / "q").glob("*.safetensors"))
    assert size < sum(path.stat().st_size for path in plain.glob("*.safetensors"))


@pytest.mark.parametrize("form", FORMATS)
def test_the_package_of_the_format_reads_the_same_values(plain: Path, tmp_path: Path, form: str) -> None:
    pytest.importorskip("compressed_tensors", reason="its own decompressors read these")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    write_quantised(str(plain), tmp_path / "q", form)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    settings = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    checkpoint = resolve_pair(plain, None, (None, None), (form, None))[0]
    layer = load_weights(checkpoint, dtype=torch.float32, device=CPU, progress=False).layers[1]
    module = "model.layers.1.mlp.down_proj"
    groups = settings["config_groups"].values()
    group = next(each for each in groups if module in each["targets"] or each["targets"] == ["Linear"])
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
    parts = {name.removeprefix(f"{module}."): each for name, each in stored.items() if name.startswith(module)}
    parts |= {"weight_scale": parts["weight_scale"].float()}  # it multiplies in the dtype of the scales
    assert torch.equal(compressor.decompress(parts, scheme)["weight"].float(), layer.down.unpack())


# their files have names of their own, some of them one weight of several layers; in Jamba's, decays are no matrix
@pytest.mark.parametrize("kind", ["nemotron_h", "zamba2", "jamba", "kimi_linear", "ling", "lfm3"])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_every_matrix_is_rounded_under_the_names_of_every_family(kind: str, form: str, tmp_path: Path) -> None:
    make_states(kind).save_pretrained(tmp_path / "plain")
    write_quantised(str(tmp_path / "plain"), tmp_path / "q", form)
    plain, written = (source_of(resolve(tmp_path / each, role="target")) for each in ("plain", "q"))
    with plain.open(), written.open():
        for name, info in plain.infos().items():
            wanted = plain.read(name)
            if len(info.shape) == 2 and name.endswith(".weight") and name not in (EMBED, HEAD):
                codes = kind_for(form, info.shape)  # type: ignore[arg-type]
                wanted = wanted if codes is None else rounded(wanted, codes).dequantise(torch.float32)
            assert torch.equal(written.read(name), wanted), name


def test_a_sharded_checkpoint_keeps_its_files(plain: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(plain).save_pretrained(tmp_path / "s", max_shard_size="100KB")
    write_quantised(str(tmp_path / "s"), tmp_path / "q", "int4")
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    names = {name for path in (tmp_path / "q").glob("*.safetensors") for name in load_file(path)}
    assert len(set(index["weight_map"].values())) > 2
    assert names == set(index["weight_map"])
    options = {"device": "cpu", "max_length": 64, "progress": False}
    ids = [[5, 6, 7, 8]]
    text = FastSpecGenerator(tmp_path / "s", target_quantization="int4", **options).generate(ids, max_new_tokens=24)
    assert torch.equal(FastSpecGenerator(tmp_path / "q", **options).generate(ids, max_new_tokens=24), text)


@pytest.mark.parametrize(("bits", "width"), [(4, 32), (8, 32), (8, 35)])
def test_words_are_unpacked_as_they_were_packed(bits: int, width: int) -> None:
    codes = torch.randint(2**bits, (3, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(unpacked(packed(codes, bits), bits)[:, :width], codes)


@pytest.mark.parametrize(("form", "bits"), [("int8", 8), ("int4", 4)])
def test_whole_numbers_are_packed_as_engines_want_them_without_rounded_activations(
    plain: Path, tmp_path: Path, form: str, bits: int
) -> None:
    write_quantised(str(plain), tmp_path / "q", form)
    settings = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "pack-quantized"
    for group in settings["config_groups"].values():
        assert group["input_activations"] is None
        assert (group["weights"]["num_bits"], group["weights"]["symmetric"]) == (bits, True)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    words, shape = (stored[f"model.layers.0.mlp.up_proj.weight_{part}"] for part in ("packed", "shape"))
    assert words.dtype == torch.int32
    assert [words.shape[0], words.shape[1] * 32 // bits] == shape.tolist()


def test_what_cannot_be_quantised_is_refused_and_leaves_nothing(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="format 'int3' is not supported, wanted one of fp8, int8, int4"):
        write_quantised(str(plain), tmp_path / "q", "int3")
    write_quantised(str(plain), tmp_path / "q", "int8")
    with pytest.raises(CheckpointError, match="exists already"):
        write_quantised(str(plain), tmp_path / "q", "int8")
    with pytest.raises(UnsupportedOption, match="is stored quantised"):
        write_quantised(str(tmp_path / "q"), tmp_path / "other", "int4")
    odd = make_checkpoint(tmp_path / "odd", "llama3", **{**SMALL, "hidden_size": 40, "intermediate_size": 50})
    with pytest.raises(UnsupportedOption, match=r"no matrix of .* has rows that divide into groups of int4"):
        write_quantised(str(odd), tmp_path / "other", "int4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "q"]


def test_the_command_writes_and_says_what(plain: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", str(plain), str(tmp_path / "q"), "--format", "int4"])
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'q'}: " in result.output
    assert (tmp_path / "q" / "config.json").is_file()
    assert "million parameters loses much of its quality in int4 rounded to nearest" in result.stderr
    again = CliRunner().invoke(app, ["quantize", str(plain), str(tmp_path / "q")])
    assert again.exit_code == 2
    assert "exists already" in again.output
