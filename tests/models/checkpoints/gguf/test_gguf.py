"""GGUF files: the text of every architecture and format is that of transformers; damage is refused in words."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from fastspec import CheckpointError, FastSpecGenerator, NGram, UnsupportedModel, UnsupportedOption
from fastspec.kernels.common.code_packing import can_pack_codes
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.decoder_weights import load_weights, source_of
from fastspec.models.checkpoints.gguf.header import read_gguf_header
from fastspec.models.checkpoints.pair import fingerprint, resolve_pair
from fastspec.models.checkpoints.quantised.write import write_quantised
from fastspec.models.checkpoints.resolve import load_tokenizer, resolve
from tests.helpers.gguf_files import ARCHS, PLANTED, VOCAB, make_gguf_model, write_gguf
from tests.helpers.tokenizers import byte_tokenizer

PROMPTS = [[104, 101, 10, 20, 104, 101, 10, 20], [5, 6, 7, 8, 9]]
TOKENS = 20
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning")


def ours(file: Path, **options: Any) -> list[list[int]]:
    """Greedy text of a file, one prompt after the other."""
    with FastSpecGenerator(file, dtype="float32", device="cpu", max_length=96, progress=False, **options) as generator:
        return [generator.generate([prompt], max_new_tokens=TOKENS)[0].tolist() for prompt in PROMPTS]


def theirs(model: Any) -> list[list[int]]:
    """Greedy text of transformers."""
    made = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            made.append(
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
                )[0].tolist()
            )
    return made


@pytest.mark.parametrize("name", ARCHS)
def test_every_architecture_gives_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    held = write_gguf(file, make_gguf_model(name), name)
    wanted = theirs(held)
    assert len({tuple(row[-TOKENS:]) for row in wanted}) == len(PROMPTS), "texts that do not depend on the prompt"
    assert ours(file) == wanted
    assert ours(file, proposer=NGram(), num_speculative_tokens=3) == wanted


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, *PLANTED], ids=lambda kind: kind.name
)
def test_every_format_gives_the_text_of_the_dequantised_model(kind: Kind, tmp_path: Path) -> None:
    file, big = tmp_path / "model.gguf", kind in PLANTED
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1} if big else {}
    held = write_gguf(file, make_gguf_model("llama", std=0.1, **sizes), "llama", kind)
    checkpoint = resolve(file, role="target")
    assert (kind.name in checkpoint.stored) == (kind not in (Kind.F16, Kind.BF16))
    source, state = source_of(checkpoint), held.state_dict()
    for name in source.infos():
        assert torch.equal(source.read(name).float(), state[name]), name
        assert torch.equal(source.read_part(name, slice(3, 9), slice(2, 40)).float(), _part(state[name])), name
    assert ours(file) == theirs(held)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("rounded", [None, "int8"])
def test_matrices_stay_in_codes_that_hold_them_exactly(kind: Kind, rounded: str | None, tmp_path: Path) -> None:
    """The values are gguf's, bit for bit, whatever the layout: codes in words as a GPU reads them, or plain rows."""
    file = tmp_path / "model.gguf"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    held = write_gguf(file, make_gguf_model("llama", std=0.1, tie_word_embeddings=False, **sizes), "llama", kind)
    ops = TORCH_OPS.replaced(keeps_codes=lambda shape, kind, *_: can_pack_codes(shape, kind))
    checkpoint = resolve_pair(file, None, (None, None), (rounded, None))[0]
    weights = load_weights(checkpoint, dtype=torch.bfloat16, device=CPU, progress=False, ops=ops)
    assert checkpoint.bytes_loaded(torch.bfloat16, CPU, ops) == weights.nbytes()
    formats = {each.format for layer in weights.layers for each in (layer.qkv, layer.o, layer.gate_up, layer.down)}
    assert formats == {"codes" if kind == Kind.Q4_0 or rounded else "rows"}, "int8 has no groups of 32, int4 no minimum"
    if rounded:
        return
    state = {name: tensor.to(torch.bfloat16) for name, tensor in held.state_dict().items()}
    for index, layer in enumerate(weights.layers):
        of = f"model.layers.{index}."
        parts = [state[f"{of}self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(layer.qkv.unpack(), torch.cat(parts))
        assert torch.equal(layer.down.unpack(), state[of + "mlp.down_proj.weight"])
    assert torch.equal(weights.embed.unpack(), state["model.embed_tokens.weight"])


def test_a_part_of_a_matrix_in_codes_is_that_part_of_its_values(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    held = write_gguf(file, make_gguf_model("llama", std=0.1), "llama", Kind.Q4_0)
    source, name = source_of(resolve(file, role="target")), "model.layers.0.self_attn.q_proj.weight"
    for columns in (slice(32, 64), slice(16, 32), slice(None)):
        codes = source.codes_part(name, slice(8, 24), columns, CPU)
        assert codes is not None
        assert torch.equal(codes.dequantise(torch.float32), held.state_dict()[name][8:24, columns])


def test_a_scale_that_is_no_number_is_told(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, make_gguf_model("llama"), "llama", Kind.Q8_0)
    raw, tensor = bytearray(file.read_bytes()), read_gguf_header(file).tensors["blk.0.ffn_up.weight"]
    raw[tensor.start : tensor.start + 2] = np.float16("inf").tobytes()
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_up.weight has a scale that is not finite"):
        load_weights(resolve(file, role="target"), dtype=torch.float32, device=CPU, progress=False)


def test_memory_is_said_before_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, make_gguf_model("llama"), "llama", Kind.Q4_0)
    with FastSpecGenerator(file, dtype="float32", device="cpu", max_length=96) as generator:
        size = generator.memory_plan.target_weights / 2**20
    said = capsys.readouterr().err
    assert f"MiB of GGUF's Q4_0; at most {size:.1f} MiB in memory" in said
    assert said.index("in memory") < said.index("loading target")


def test_a_file_may_have_any_suffix(tmp_path: Path) -> None:
    file = tmp_path / "sha256-0123"
    held = write_gguf(file, make_gguf_model("llama"), "llama")
    assert ours(file) == theirs(held)
    assert ours(str(file)) == theirs(held)


def test_a_live_model_from_a_file_is_sent_to_the_file() -> None:
    model = make_gguf_model("llama")
    model.config.quantization_config = SimpleNamespace(quant_method="gguf", gguf_file="model.gguf")
    with pytest.raises(UnsupportedModel, match="wanted the path of its GGUF file in place of the live model"):
        resolve(model, role="target")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedModel, match="wanted its directory in place of the live model"):
        resolve(model, role="target")


def test_explain_says_what_is_dequantised(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, make_gguf_model("llama"), "llama", Kind.Q4_0)
    with FastSpecGenerator(file, dtype="float32", device="cpu", max_length=96, progress=False) as generator:
        told, plan = generator.explain(), generator.plan(file, dtype="float32", device="cpu", max_length=96)
    assert "MiB of GGUF's Q4_0; read as they are dequantised" in told
    assert f"matrices, all dequantised: {plan.target_weights / 2**20:.1f} MiB" in told


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[3:9] if tensor.dim() == 1 else tensor[3:9, 2:40]


def test_quantised_experts_are_read_one_by_one(tmp_path: Path) -> None:
    held = write_gguf(tmp_path / "model.gguf", make_gguf_model("qwen2moe"), "qwen2moe", Kind.Q8_0)
    assert ours(tmp_path / "model.gguf") == theirs(held)


def test_tied_head_and_llama3_rope(tmp_path: Path) -> None:
    rope = {
        **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    }
    model = make_gguf_model("llama", tie_word_embeddings=True, rope_parameters=rope, max_position_embeddings=65536)
    file = tmp_path / "model.gguf"
    held = write_gguf(file, model, "llama")
    spec = resolve(file, role="target").native
    assert spec.tied
    assert spec.rope.kind == "llama3"
    assert ours(file) == theirs(held)


def test_the_tokenizer_and_the_template_come_from_the_metadata(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, make_gguf_model("llama"), "llama")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "other/tokenizer.json").read_bytes()[:50])  # is not read
    checkpoint = resolve(file, role="target")
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    text = "the héllo\n  there"
    assert tokenizer(text)["input_ids"] == byte_tokenizer()(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "user: x\n"
    assert tokenizer.eos_token_id == 258
    assert checkpoint.generation_config is not None
    assert checkpoint.generation_config.eos_token_id == 258


def test_the_ways_to_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    file = tmp_path / "one" / "model.gguf"
    file.parent.mkdir()
    write_gguf(file, make_gguf_model("llama"), "llama")
    assert resolve(str(file), role="target").gguf == file
    assert resolve(file.parent, role="target").gguf == file
    asked: list[Any] = []

    def get(repo: str, name: str, revision: str | None) -> str:
        asked.append((repo, name, revision))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", get)
    assert resolve("owner/name:sub/model.gguf", role="target", revision="main").gguf == file
    assert asked == [("owner/name", "sub/model.gguf", "main")]
    with pytest.raises(UnsupportedOption, match="goes with a Hub id only"):
        resolve(file, role="target", revision="main")
    with pytest.raises(CheckpointError, match=r"there is no file 'none.gguf'.*owner/name:model.gguf"):
        resolve("none.gguf", role="target")
    (file.parent / "second.gguf").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files \(model.gguf, second.gguf\); pass one of them"):
        resolve(file.parent, role="target")


def test_a_draft_may_be_a_file(tmp_path: Path) -> None:
    file, small = tmp_path / "model.gguf", tmp_path / "small.gguf"
    held = write_gguf(file, make_gguf_model("llama"), "llama")
    write_gguf(small, make_gguf_model("qwen3", seed=1), "qwen3", Kind.Q8_0)
    assert ours(file, draft=str(small), num_speculative_tokens=2) == theirs(held)
    assert fingerprint(resolve(file, role="target")) != fingerprint(resolve(small, role="target"))


def test_memory_is_planned_before_loading(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    model = make_gguf_model("llama")
    write_gguf(file, model, "llama", Kind.Q4_0)
    plan = FastSpecGenerator.plan(file, dtype="bfloat16", device="cpu", max_length=96)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    plain = FastSpecGenerator.plan(tmp_path / "plain", dtype="bfloat16", device="cpu", max_length=96)
    assert plan.target_weights == plain.target_weights


def test_what_does_not_go_with_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, make_gguf_model("llama"), "llama")
    with pytest.raises(UnsupportedOption, match="is a GGUF file; take the original weights"):
        write_quantised(str(file), tmp_path / "out", "int8")
    with pytest.raises(UnsupportedOption, match="is a GGUF file, which does not have its checkpoint's MTP layers"):
        FastSpecGenerator(file, draft="mtp")


def test_without_the_package_its_name_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, make_gguf_model("llama"), "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match="pip install gguf"):
        resolve(file, role="target")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"llama__rope__scaling__type": "ntk"}, "rope.scaling.type='ntk' is not supported"),
        ({"llama__attention__causal": False}, "llama.attention.causal=False is not supported"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count=8 is not supported"),
        ({"llama__expert_count": 8}, "llama.expert_count=8 is not supported"),
        ({"split__count": 3}, "is one of 3 parts"),
    ],
)
def test_settings_that_would_give_another_text_are_refused(more: Any, said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_gguf_model("llama"), "llama", **more)
    with pytest.raises(UnsupportedModel, match=said):
        resolve(tmp_path / "model.gguf", role="target")


def changed(file: Path, old: bytes, new: bytes) -> Path:
    raw = file.read_bytes()
    assert len(old) == len(new)
    assert raw.count(old) >= 1
    made = file.with_name("changed.gguf")
    made.write_bytes(raw.replace(old, new, 1))
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(file, make_gguf_model("llama", num_hidden_layers=1), "llama")
    return file


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"GGUF\3", b"GGML\3", "starts with b'GGML', wanted b'GGUF'"),
        (b"GGUF\3", b"GGUF\1", "has version 1, wanted version 2 or 3"),
        (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "is in big-endian byte order"),
        (b"blk.0.attn_q.weight", b"blk.0.attn_r.weight", r"unexpected|missing"),
        (b"blk.0.attn_q.weight", b"blk.0.attn_k.weight", "blk.0.attn_k.weight occurs twice"),
        (b"llama.block_count", b"llama.block_cound", "llama.block_cound=1 is not supported"),
        (b"\5\0\0\0\0\0\0\0llama\x11", b"\5\0\0\0\0\0\0\0mamba\x11", "the GGUF architecture 'mamba' is not supported"),
    ],
)
def test_damage_is_told(whole: Path, old: bytes, new: bytes, said: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        resolve(changed(whole, old, new), role="target")


def test_missing_and_further_tensors_and_other_shapes_are_told(tmp_path: Path) -> None:
    model = make_gguf_model("llama", num_hidden_layers=2)
    file = tmp_path / "model.gguf"
    for layers, said in ((1, "unexpected"), (3, "missing")):
        model.config.num_hidden_layers = 2
        write_gguf(file, model, "llama")
        raw = file.read_bytes()
        key = b"llama.block_count" + (4).to_bytes(4, "little")
        file.write_bytes(raw.replace(key + (2).to_bytes(4, "little"), key + layers.to_bytes(4, "little")))
        with pytest.raises(CheckpointError, match=said):
            resolve(file, role="target")
    write_gguf(file, model, "llama")
    key = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
    inner = model.config.intermediate_size
    file.write_bytes(
        file.read_bytes().replace(key + inner.to_bytes(4, "little"), key + (inner + 1).to_bytes(4, "little"))
    )
    with pytest.raises(CheckpointError, match="has shape"):
        resolve(file, role="target")


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # of damaged scales
@pytest.mark.parametrize("name", ["llama", "phi3-long", "gemma3", "qwen2moe"])
def test_a_damaged_header_gives_a_model_or_an_error_in_words(name: str, tmp_path: Path) -> None:
    whole = tmp_path / "model.gguf"
    write_gguf(whole, make_gguf_model(name), name)
    raw = whole.read_bytes()
    end = min(tensor.start for tensor in read_gguf_header(whole).tensors.values())
    generator = np.random.default_rng(1)
    file = whole.with_name("damaged.gguf")
    messages: list[str] = []
    loaded = 0
    cuts = [0, 3, 4, 8, 20, *(int(at) for at in generator.integers(24, len(raw), 20))]
    flips = [int(at) for at in generator.integers(0, end, 120)]
    edits = [raw[:at] for at in cuts] + [
        raw[:at] + bytes([raw[at] ^ (1 << int(generator.integers(0, 8)))]) + raw[at + 1 :] for at in flips
    ]
    for edited in edits:
        file.write_bytes(edited)
        try:
            checkpoint = resolve(file, role="target")
            load_tokenizer(checkpoint)
        except (CheckpointError, UnsupportedModel) as error:
            messages.append(str(error))
            continue
        source = source_of(checkpoint)
        assert all(source.read(name).shape == info.shape for name, info in source.infos().items())
        loaded += 1
    assert [message for message in messages if str(file) not in message or len(message) < 40] == []
    assert len(messages) > len(cuts)
    assert loaded > 10, "many flips fall on tokens"


def test_the_header_is_that_of_the_package(whole: Path) -> None:
    header, reader = read_gguf_header(whole), gguf.GGUFReader(whole)
    assert {tensor.name: (tuple(tensor.shape.tolist()[::-1]), tensor.data_offset) for tensor in reader.tensors} == {
        name: (tensor.shape, tensor.start) for name, tensor in header.tensors.items()
    }
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields
    assert len(header.metadata["tokenizer.ggml.tokens"]) == VOCAB  # type: ignore[arg-type]
