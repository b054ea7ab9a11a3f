"""Mixtures of experts in captured steps on the device: text with drafts, and beside others, is the plain one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastspec import FastSpecGenerator
from fastspec.models.decoder import Decoder
from fastspec.output import GenerateOutput
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import MIXTURES, VOCAB, make_family
from tests.helpers.hybrid import KINDS, make_hybrid
from tests.helpers.mxfp4 import MXFP4, in_mxfp4, rewritten
from tests.helpers.quantised_experts import FORMS, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]
NEW, BATCH = 100, 20  # rows of 5 tokens: more than 64, which are sorted by expert
SIZES = {"hidden_size": 256, "intermediate_size": 192}


def directory(family: str, path: Path) -> Path:
    """A tiny checkpoint; "mxfp4": gpt-oss with experts in four bits; of a hybrid all experts are of one width.

    One of `FORMS`: a hybrid with experts in codes.
    """
    if family in FORMS:
        return save(family, path, std=0.1, hidden_size=256)[0]
    if family in KINDS:
        make_hybrid(family, std=0.1, shared_expert_intermediate_size=32, **SIZES).save_pretrained(path)
        return path
    make_family("gpt_oss" if family == "mxfp4" else family, **SIZES).save_pretrained(path)
    if family == "mxfp4":
        stored, _ = in_mxfp4(load_file(path / "model.safetensors"))
        rewritten(path, stored, **MXFP4)
    return path


CASES = [(family, dtype) for family in (*MIXTURES, "mxfp4", "qwen3_5_moe") for dtype in (torch.bfloat16, torch.float32)]


def decoder_of(gen: FastSpecGenerator) -> Decoder:
    """The target of an open generator."""
    target = gen._open().engine.modules.target
    assert isinstance(target, Decoder)
    return target


@pytest.mark.parametrize(("family", "dtype"), [*CASES, *((form, torch.bfloat16) for form in FORMS)])
def test_text_does_not_depend_on_drafts_or_neighbours(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    target = directory(family, tmp_path / "target")
    draft = make_checkpoint(tmp_path / "draft", "llama2", seed=77, vocab_size=VOCAB, num_hidden_layers=1)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 120))] for _ in range(BATCH)]
    options = {"dtype": dtype, "max_batch_size": BATCH, "max_length": 256, "page_size": 16, "progress": False}
    calls = {"max_new_tokens": NEW, "eos_token_id": None}
    with FastSpecGenerator(target, draft, num_speculative_tokens=4, **options) as gen:  # type: ignore[arg-type]

        def texts(rows: list[list[int]], k: int) -> list[list[int]]:
            out = gen.generate(rows, num_speculative_tokens=k, return_dict_in_generate=True, **calls)  # type: ignore[arg-type]
            assert isinstance(out, GenerateOutput)
            return out.new_tokens

        if family in FORMS:
            weights = decoder_of(gen).weights.layers[1].experts
            assert weights is not None
            assert weights.gate_up.codes is not None
        joined = family in ("glm4_moe", "qwen3_5_moe") and dtype == torch.bfloat16
        assert ("in the same launches as the routed experts" in gen.explain()) == joined
        plain = texts(prompts, 0)
        assert texts(prompts, 4) == plain
        for at in (0, 7, BATCH - 1):
            assert texts(prompts[at : at + 1], 0) == [plain[at]]
            assert texts(prompts[at : at + 1], 1) == [plain[at]]
    with FastSpecGenerator(target, target, num_speculative_tokens=4, **options) as gen:  # type: ignore[arg-type]
        out = gen.generate(prompts, return_dict_in_generate=True, **calls)  # type: ignore[arg-type]
        assert isinstance(out, GenerateOutput)
        assert out.new_tokens == plain
        # a prompt's last token but one is read by a step of the draft and by a prompt pass of the target, which round
        # apart in 16 bits; a prompt of one token has none
        single = gen.generate([prompt[:1] for prompt in prompts], return_dict_in_generate=True, **calls)  # type: ignore[arg-type]
        assert isinstance(single, GenerateOutput)
        assert single.stats.acceptance_rate == 1.0
        assert dtype == torch.bfloat16 or out.stats.acceptance_rate == 1.0
