"""Greedy text of every family equals transformers', token for token, in fp32, whatever k and batch.

transformers reads each of our texts in one pass: its largest logit at every place must be our next token. Our text is
then its own greedy text, as far as no rounding can move the choice: the smallest gap between its two largest logits
must exceed 20 times the difference between its logits and ours. What is in a layer: tests/models/families.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastspec.generator import FastSpecGenerator
from fastspec.models.decoder import Decoder
from fastspec.output import GenerateOutput
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import VOCAB, as_configured, make_family

NEW = 100
GAP_FACTOR = 20
# weights and prompts whose paths keep the gap; changed when a family's fixture changes, never the factor
SEEDS = {
    **{"gemma3": 1, "gemma2": 1, "phi3": 0, "phi3-long": 2, "olmo2": 1, "olmo3": 0},
    **{"glm4": 4, "glm": 12, "granite": 1, "smollm3": 4, "exaone4": 1, "ministral": 1},
    **{"ministral3": 28, "seed_oss": 5, "hunyuan": 1, "starcoder2": 1, "cohere": 1, "cohere2": 0},
    **{"granite4": 1, "ernie4_5": 0, "helium": 17},
    **{"qwen3_moe": 0, "qwen2_moe": 6, "olmoe": 0, "mixtral": 1, "glm4_moe": 0, "gpt_oss": 3},
}
LENGTHS = (1, 2, 5, 9, 17, 26, 40)
ROOM = 256  # tokens in a row: below it "phi3-long" has its short factors, in transformers too

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the fixtures have none
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),  # nor do they pay
]


@dataclass(frozen=True)
class Checkpoints:
    """A family's tiny checkpoint, a draft of another family, and prompts."""

    directory: Path
    draft: Path
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=SEEDS)  # Gemma 4 has a test of its own, test_gemma4.py
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    seed = SEEDS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    make_family(request.param, seed).save_pretrained(root / "target")
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1}
    draft = make_checkpoint(root / "draft", "llama2", seed=77, **sizes)
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    return Checkpoints(root / "target", draft, prompts)


def generator(checkpoints: Checkpoints, draft: Path | None, k: int) -> FastSpecGenerator:
    options = {"max_batch_size": 7, "max_length": ROOM, "page_size": 16, "dtype": torch.float32, "device": "cpu"}
    return FastSpecGenerator(
        checkpoints.directory,
        draft,
        num_speculative_tokens=k,
        progress=False,
        **options,  # type: ignore[arg-type]
    )


def output(gen: FastSpecGenerator, prompts: list[list[int]], new: int = NEW, k: int | None = None) -> GenerateOutput:
    options = {} if k is None else {"num_speculative_tokens": k}
    out = gen.generate(prompts, max_new_tokens=new, eos_token_id=None, return_dict_in_generate=True, **options)
    assert isinstance(out, GenerateOutput)
    return out


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The logits of every pass of a step, as they were computed."""
    seen: list[Tensor] = []
    original = Decoder.logits

    def record(self: Decoder, hidden: Tensor, tiling: object) -> Tensor:
        logits = original(self, hidden, tiling)  # type: ignore[arg-type]
        seen.append(logits[:, 0].clone())
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", record)
        yield seen


@torch.inference_mode()
def test_greedy_text_is_that_of_transformers(checkpoints: Checkpoints, recorded: list[Tensor]) -> None:
    prompts = checkpoints.prompts
    with generator(checkpoints, None, 0) as gen:
        texts = output(gen, prompts).new_tokens
        ours = torch.stack(recorded, dim=1)  # [7, NEW, V]
    theirs = as_configured(
        AutoModelForCausalLM.from_pretrained(checkpoints.directory, dtype=torch.float32, attn_implementation="eager")
    ).eval()
    differences, gaps = [], []
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        logits = theirs(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == text
        top = logits.topk(2, dim=-1).values
        gaps.append(float((top[:, 0] - top[:, 1]).min()))
        differences.append(float((ours[row] - logits).abs().max()))
    assert ours.shape == (7, NEW, VOCAB)
    assert min(gaps) > GAP_FACTOR * max(differences), (min(gaps), max(differences))
    assert len({token for text in texts for token in text}) > VOCAB // 4, "a text that repeats itself tests little"

    with generator(checkpoints, checkpoints.directory, 4) as gen:
        drafted = output(gen, prompts)
        assert drafted.new_tokens == texts
        assert drafted.stats.acceptance_rate == 1.0
    with generator(checkpoints, checkpoints.draft, 4) as gen:
        assert output(gen, prompts, NEW // 4, k=1).new_tokens == [text[: NEW // 4] for text in texts]
        assert output(gen, prompts[4:5], NEW // 2).new_tokens == [texts[4][: NEW // 2]]


@pytest.mark.slow
@torch.inference_mode()
def test_no_draft_length_and_no_batch_changes_the_text(checkpoints: Checkpoints) -> None:
    """Seven rows at once, turned round, and one alone; with the model as its own draft, and with a stranger."""
    prompts = checkpoints.prompts
    with generator(checkpoints, None, 0) as gen:
        texts = output(gen, prompts).new_tokens
    for draft in (checkpoints.directory, checkpoints.draft):
        with generator(checkpoints, draft, 4) as gen:
            for k in (0, 1, 4):
                for rows in (prompts, prompts[::-1], prompts[:1], prompts[3:4], prompts[6:]):
                    out = output(gen, rows, k=k)
                    assert out.new_tokens == [texts[prompts.index(prompt)] for prompt in rows]
                    if k and draft == checkpoints.directory:
                        assert out.stats.acceptance_rate == 1.0


@torch.inference_mode()
def test_a_generator_with_more_room_has_the_long_factors(tmp_path: Path) -> None:
    """Behind the config's original length transformers has them, too, for every position of a text."""
    make_family("phi3-long", SEEDS["phi3-long"]).save_pretrained(tmp_path)
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(ROOM + 14)]
    options = {"max_length": ROOM + 64, "dtype": torch.float32, "device": "cpu", "progress": False}
    with FastSpecGenerator(tmp_path, **options) as gen:
        out = gen.generate([prompt], max_new_tokens=20, eos_token_id=None, return_dict_in_generate=True)
        assert "phi3" in gen.explain()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    text = out.new_tokens[0]
    assert theirs(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist() == text
