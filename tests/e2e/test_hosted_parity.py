"""Every type that docs/models.md calls hosted: greedy text is that of transformers, whatever k and batch."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from fastspec.errors import UnsupportedModel
from fastspec.generator import FastSpecGenerator
from fastspec.models.hosted.info import hosted_info
from fastspec.output import GenerateOutput
from tests.helpers.hosted import fill
from tests.helpers.model_table import PAGE, tiny_config
from tests.helpers.versions import OLDER

HOSTED = re.findall(r"^\| `(\S+)` \| hosted \| text", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
WHOLE = re.findall(r"^\| `(\S+)` \| hosted \| its text model: text", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
NEW = 200
LENGTHS = (1, 2, 5, 9, 17, 26, 40)
SEEDS = {"minimax_m3_vl_text": 1}  # of weights whose text no rounding moves; 0 where none is named

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the fixtures have none
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),  # nor do they pay
]


def test_the_page_names_at_least_eighty() -> None:
    assert len(HOSTED) + len(WHOLE) >= 80


@pytest.mark.slow
@pytest.mark.parametrize("model_type", HOSTED)
def test_greedy_text_is_that_of_transformers(model_type: str) -> None:
    try:
        info = hosted_info(tiny_config(model_type))
    except (KeyError, UnsupportedModel):
        if OLDER:
            pytest.skip("an older transformers does not have it, or so that it can be hosted")
        raise
    model: Any = fill(info.kind(info.config).eval(), SEEDS.get(model_type, 0))
    rng = random.Random(model_type)
    prompts = [[rng.randrange(3, info.vocab_size) for _ in range(length)] for length in LENGTHS]
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        texts.append(out[0, len(prompt) :].tolist())
    options = {"max_batch_size": 7, "max_length": 256, "page_size": 16, "dtype": "float32", "device": "cpu"}
    with FastSpecGenerator(model, model, progress=False, **options) as gen:
        assert "hosted: transformers' " in gen.explain()
        for rows in (range(7), (4,)):
            for k in (0, 1, 4):
                out = gen.generate(
                    [prompts[row] for row in rows],
                    max_new_tokens=NEW,
                    num_speculative_tokens=k,
                    eos_token_id=None,
                    return_dict_in_generate=True,
                )
                assert isinstance(out, GenerateOutput)
                assert out.new_tokens == [texts[row] for row in rows]
                assert not k or out.stats.acceptance_rate == 1.0
