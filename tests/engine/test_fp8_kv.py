"""`kv_dtype="fp8"`: text with drafts is that of plain decoding, half the bytes, the checkpoint's scales, refusals."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec import FastSpecGenerator, NGram, demo_pair
from fastspec.config import Config
from fastspec.engine import settings
from fastspec.kernels.common.kv_scales import FP8, KVScales
from fastspec.models.checkpoints.quantised.tensors import CacheScales, scales_of_layers
from fastspec.models.checkpoints.quantised.write import write_quantised
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import make_family
from tests.helpers.hybrid import make_hybrid

OPTIONS: dict[str, Any] = {"device": "cpu", "max_length": 128, "progress": False, "kv_dtype": "fp8"}
PROMPTS = ["import os\n", "class Stack:\n    def push(self, item):\n", "def main(argv=None):\n    for"]


@pytest.fixture(scope="module")
def plain() -> Any:
    with FastSpecGenerator(demo_pair()[0], **OPTIONS) as made:
        yield made


def ids_of(generator: FastSpecGenerator) -> list[list[int]]:
    assert generator.tokenizer is not None
    return [generator.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


@pytest.mark.parametrize("how", ["draft", "lookup"])
def test_text_with_drafts_is_that_of_plain_decoding(plain: FastSpecGenerator, how: str) -> None:
    """Greedy and coupled, alone and together, and again from pages that were kept."""
    draft, proposer = (demo_pair()[1], None) if how == "draft" else (None, NGram())
    ids, sampled = ids_of(plain), {"do_sample": True, "temperature": 0.9, "seed": 5}
    with FastSpecGenerator(
        demo_pair()[0], draft, proposer=proposer, verification="coupled", num_speculative_tokens=3, **OPTIONS
    ) as made:

        def text(generator: FastSpecGenerator, prompts: list[list[int]], **asked: Any) -> Any:
            return generator.generate(prompts, max_new_tokens=16, return_dict_in_generate=True, **asked)

        drafted = text(made, ids)
        assert drafted.stats.accepted > 0
        assert drafted.new_tokens == text(made, ids).new_tokens
        assert drafted.new_tokens == [text(plain, [prompt]).new_tokens[0] for prompt in ids]
        drawn = text(made, ids, **sampled).new_tokens
        assert drawn == text(made, ids, num_speculative_tokens=0, **sampled).new_tokens
        assert drawn != drafted.new_tokens


def test_it_is_another_model_than_with_wider_keys(plain: FastSpecGenerator) -> None:
    """By log-probabilities: the text of so small a model may well be the same."""
    ids, found = ids_of(plain)[:1], []
    options = {name: value for name, value in OPTIONS.items() if name != "kv_dtype"}
    with FastSpecGenerator(demo_pair()[0], **options) as wide:
        for each in (plain, wide):
            out: Any = each.generate(ids, max_new_tokens=8, logprobs=0, return_dict_in_generate=True)
            found.append(torch.tensor(out.logprobs[0]))
    difference = (found[0] - found[1]).abs().max()
    assert 1e-4 < difference < 1.0


def test_the_plan_has_half_the_bytes_and_the_caches_have_them(plain: FastSpecGenerator) -> None:
    sizes = {"device": "cpu", "dtype": "bfloat16", "max_length": 128}
    half = FastSpecGenerator.plan(*demo_pair(), kv_dtype="fp8", **sizes)
    whole = FastSpecGenerator.plan(*demo_pair(), **sizes)
    assert 2 * half.target_cache == whole.target_cache
    assert 2 * half.draft_cache == whole.draft_cache
    cache = plain._loop.engine.modules.target.cache  # type: ignore[attr-defined]
    assert cache.keys.dtype == FP8
    assert cache.keys.nbytes + cache.values.nbytes == plain.memory_plan.target_cache
    assert "K and V of the target in 8 bits" in plain.explain()


def test_the_drafts_keys_alone_leave_the_text_as_it_is(plain: FastSpecGenerator) -> None:
    options = {**OPTIONS, "kv_dtype": None}
    asked: dict[str, Any] = {"max_new_tokens": 16, "logprobs": 0, "return_dict_in_generate": True}
    with FastSpecGenerator(demo_pair()[0], **options) as wide:
        alone: Any = wide.generate(ids_of(plain)[:1], **asked)
    with FastSpecGenerator(*demo_pair(), **{**options, "kv_dtype": (None, "fp8")}) as made:
        assert made._loop.engine.modules.target.cache.keys.dtype == torch.float32  # type: ignore[attr-defined]
        assert made._loop.engine.modules.proposer.model.cache.keys.dtype == FP8  # type: ignore[union-attr]
        assert "K and V of the draft in 8 bits" in made.explain()
        assert "the text does not change" in made.explain()
        drafted: Any = made.generate(ids_of(plain)[:1], **asked)
    assert drafted.stats.accepted > 0
    assert drafted.new_tokens == alone.new_tokens
    assert drafted.logprobs == alone.logprobs
    of_target = FastSpecGenerator.plan(*demo_pair(), device="cpu", max_length=128, kv_dtype=("fp8", None))
    of_both = FastSpecGenerator.plan(*demo_pair(), device="cpu", max_length=128, kv_dtype="fp8")
    assert of_target.target_cache == of_both.target_cache
    assert of_target.draft_cache == 4 * of_both.draft_cache


def test_scales_of_a_checkpoint_are_used(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "llama3", hidden_size=128, intermediate_size=256, head_dim=32)
    write_quantised(str(tmp_path / "plain"), tmp_path / "q", "int8")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    (file,) = (tmp_path / "q").glob("*.safetensors")
    stored = load_file(file)
    for name, value in {"k_scale": 0.03125, "v_scale": 0.5}.items():
        stored[f"model.layers.0.self_attn.{name}"] = torch.tensor(value)
    save_file(stored, file, {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        made = FastSpecGenerator(tmp_path / "q", **OPTIONS)
        without = FastSpecGenerator(tmp_path / "q", **{**OPTIONS, "kv_dtype": None})
    ids = torch.arange(5, 25)[None] % 97
    made.generate(ids, max_new_tokens=2)
    without.generate(ids, max_new_tokens=2)
    kept, wide = (each._loop.engine.modules.target.cache for each in (made, without))  # type: ignore[attr-defined]
    assert kept.scales[:2] == (KVScales(0.03125, 0.5), KVScales())
    assert wide.scales == ()
    # what is stored of the first layer, which no rounding of earlier keys has touched
    for name, scale in (("keys", 0.03125), ("values", 0.5)):
        ours, theirs = getattr(kept, name)[0].float() * scale, getattr(wide, name)[0]
        assert (theirs != 0).any()
        assert (ours[1:] - theirs[1:]).abs().max() <= theirs[1:].abs().max() / 16


def test_of_several_heads_the_largest_scale_holds_all() -> None:
    found = scales_of_layers({1: CacheScales((0.5, 0.75), (2.0,))}, (0, 1))
    assert found == (KVScales(), KVScales(0.75, 2.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "int8"}, "kv_dtype must be 'fp8' or None, or a pair of these for target and draft, got 'int8'"),
        ({"kv_dtype": ("fp8",)}, "got ('fp8',)"),
        ({"compile": True, "exact": False}, "kv_dtype='fp8' does not go with compile=True"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FastSpecGenerator(demo_pair()[0], **{**OPTIONS, **options})


def test_older_gpus_and_hosted_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout: Any = SimpleNamespace(ops=SimpleNamespace(name="triton"), draft_dtype=torch.bfloat16)
    model: Any = SimpleNamespace(name="m", spec=SimpleNamespace(hosting=""))
    hosted: Any = SimpleNamespace(name="m", spec=SimpleNamespace(hosting="hosted"))
    on = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ValueError, match=r"compute capability 8\.9 or later, and cuda:0 has 8\.6"):
        settings._kv_dtypes(Config(kv_dtype="fp8"), layout, model, None, on)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert settings._kv_dtypes(Config(kv_dtype="fp8"), layout, model, model, on) == (FP8, FP8)
    with pytest.raises(ValueError, match="for native families alone, and m is hosted"):
        settings._kv_dtypes(Config(kv_dtype="fp8"), layout, model, hosted, on)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_moe", "recurrent"])
def test_families_with_rules_of_their_own_have_the_text_of_plain_decoding(family: str) -> None:
    """Softcaps and windows, sinks, norms of heads, recurrent layers between; with a draft that is often wrong."""
    make = partial(make_hybrid, "next") if family == "recurrent" else partial(make_family, family)
    target, draft = make(), make(seed=1)
    rows = [list(range(3, 40)), list(range(50, 61))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        made = FastSpecGenerator(target, draft, num_speculative_tokens=3, verification="coupled", **OPTIONS)
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": [], "return_dict_in_generate": True}
    with made:
        together: Any = made.generate(rows, **options)
        assert together.stats.drafted > 0
        for row, tokens in zip(rows, together.new_tokens, strict=True):
            alone: Any = made.generate([row], num_speculative_tokens=0, **options)
            assert alone.new_tokens == [tokens]
