"""One folder, two readers: the text of a call without options is what transformers makes of the same files."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastspec import FastSpecGenerator
from tests.helpers.checkpoints import edit, make_checkpoint, write_tokenizer

PROMPT = [1, 5, 9, 11, 3, 7, 20, 30]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def theirs(source: Path, **options: Any) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return list(out[0, len(PROMPT) :].tolist())


def ours(source: Path, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    fixed: dict[str, Any] = {"max_length": 64, "max_batch_size": 2, "device": "cpu", "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # their words are tested beside the reader
        gen = FastSpecGenerator(source, **fixed)
    out = gen.generate([prompt], **options)
    gen.close()
    assert isinstance(out, Tensor)
    return list(out[0, len(prompt) :].tolist())


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


SETTINGS: dict[str, dict[str, Any]] = {
    "length": {"max_length": 13},
    "new tokens": {"max_new_tokens": 5},
    "repetition": {"repetition_penalty": 5.0},
    "suppressed": {"suppress_tokens": list(range(0, 90))},
    "bad words": {"bad_words_ids": [[each] for each in range(3, 90)]},
    "bias": {"sequence_bias": [[[4], 1000.0]]},
    "greedy by name": {"do_sample": False, "repetition_penalty": 2.0, "max_length": 20},
    "one token": {"do_sample": True, "top_k": 1},
    "stop": {"eos_token_id": list(range(0, 60)), "min_length": 11},
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_either_file_are_obeyed(tmp_path: Path, settings: dict[str, Any], file: str) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama2", seed=3, eos_token_id=None)
    plain = theirs(directory)
    assert len(plain) == 20
    if file == "config.json":
        (directory / "generation_config.json").unlink()
    edit(directory / file, **settings)
    text = ours(directory)
    assert text == theirs(directory)
    if settings != SETTINGS["one token"]:
        assert text != plain


def no_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


TENSORS: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any]]] = {
    "only the head": ("llama3", lambda t: t.update({HEAD: t.pop(EMBED)})),
    "another head": ("qwen2", lambda t: t.update({HEAD: t[EMBED].flip(0).clone()})),
    "no prefix": ("qwen3", no_prefix),
    "a bias without a place": ("llama2", lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)})),
}


@pytest.mark.parametrize(("family", "change"), TENSORS.values(), ids=TENSORS)
def test_tensors_under_other_names(tmp_path: Path, family: str, change: Callable[[dict[str, Tensor]], Any]) -> None:
    directory = make_checkpoint(tmp_path / "model", family, seed=3)
    rewrite(directory, change)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert ours(directory, **options) == theirs(directory, pad_token_id=0, **options)


@pytest.mark.parametrize("settings", [{"pad_token_id": 97}, {"eos_token_id": [2, 97]}, {"eos_token_id": 97}], ids=str)
def test_ids_that_the_model_cannot_emit_stop_no_call(tmp_path: Path, settings: dict[str, Any]) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama2", seed=3)
    edit(directory / "generation_config.json", **settings)
    assert ours(directory, max_new_tokens=9) == theirs(directory, max_new_tokens=9)


def test_ids_beyond_the_tokenizer_are_ids_of_the_model(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama2", seed=3)
    write_tokenizer(directory, [f"w{i}" for i in range(90)])
    options = {"max_new_tokens": 4, "do_sample": False, "sequence_bias": [[[95], 1000.0]]}
    assert ours(directory, **options) == theirs(directory, **options) == [95] * 4
    assert ours(directory, prompt=[1, 95, 92], **options) == [95] * 4


@pytest.mark.parametrize("stop", [None, 2])
def test_padding_of_a_batch_without_a_mask_is_what_transformers_infers(tmp_path: Path, stop: int | None) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama2", seed=3)
    ids = torch.tensor([[0, 0, 0, 5, 9], [1, 4, 1, 5, 9], [0, 8, 3, 2, 7]])
    options: dict[str, Any] = {"max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": stop, "do_sample": False}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    fixed: dict[str, Any] = {"max_length": 64, "max_batch_size": 3, "device": "cpu", "progress": False}
    with FastSpecGenerator(directory, **fixed) as gen:
        out = gen.generate(ids, **options)
        assert isinstance(out, Tensor)
        assert torch.equal(out, model.generate(ids, **options))
        assert not torch.equal(out, gen.generate(ids, torch.ones_like(ids), **options)), "padding is no text"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mistral", {"sliding_window": 1}),
        ("qwen2", {"sliding_window": 1, "use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3", {"sliding_window": 1, "use_sliding_window": True, "max_window_layers": 0}),
        ("llama2", {"sliding_window": 8}),
    ],
)
def test_where_transformers_contradicts_itself_we_equal_its_forward_pass(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    """docs/numerics.md says so. Should transformers' `generate` agree with its forward pass one day, that can go."""
    directory = make_checkpoint(tmp_path / "model", family, **config)
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([PROMPT + PROMPT])
    for _ in range(12):
        logits = model(ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    fixed: dict[str, Any] = {"max_length": 64, "max_batch_size": 1, "device": "cpu", "progress": False}
    with FastSpecGenerator(directory, **fixed) as gen:
        out = gen.generate([PROMPT + PROMPT], max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(torch.as_tensor(out), ids)
