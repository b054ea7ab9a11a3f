"""The target as a teacher: its features, its laws and its own text, through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

MOST_DIFFERENCE = 1e-3
FEWEST_LAYERS = 5
LAST = (-1,)
"""Boundaries of a head that reads the last hidden state alone, after the final norm."""


def default_boundaries(layers: int) -> tuple[int, int, int]:
    """The hidden states that published heads read, each by the number of layers below it.

    Raises:
        ValueError: The target has so few layers that these are not three different ones in ascending order.
    """
    low, middle, high = 2, layers // 2, layers - 3
    if not low < middle < high:
        raise ValueError(
            f"A target of {layers} layers has no hidden states 2, {layers // 2} and {layers - 3} in this order: "
            "name three, for example --boundaries 1 2 3."
        )
    return low, middle, high


@dataclass(frozen=True, slots=True)
class Reading:
    """What the target leaves on some rows.

    Attributes:
        features: [rows, tokens, boundaries * hidden], in ascending order of the boundaries.
        last: [rows, tokens, hidden], what the target's own head reads: logits are `Target.logits(last)`.
    """

    features: Tensor
    last: Tensor


class Target:
    """A causal language model that teaches.

    Args:
        model: A transformers model in evaluation mode. Only `output_hidden_states`, the embedding and the output head
            are used, so any decoder whose head is a plain product will do.
        boundaries: Hidden states that the head shall read; boundary b is what enters layer b, so 0 is the embedding.
            LAST: the last one.

    Raises:
        ValueError: A boundary is not below the number of layers, or they do not ascend; or the model's logits are not
            its head times its last hidden state.
    """

    def __init__(self, model: PreTrainedModel, boundaries: Sequence[int]) -> None:
        layers = model.config.num_hidden_layers
        ascending = list(boundaries) == sorted(set(boundaries))
        known = bool(boundaries) and ascending and boundaries[0] >= 1 and boundaries[-1] < layers
        if not known and tuple(boundaries) != LAST:
            raise ValueError(
                f"Boundaries {list(boundaries)} of a target of {layers} layers: wanted one or more in ascending order, "
                f"each from 1 to {layers - 1}."
            )
        self.model, self.boundaries = model.eval().requires_grad_(False), tuple(boundaries)
        self.embedding = cast("Tensor", model.get_input_embeddings().weight)
        self.head = cast("Tensor", model.get_output_embeddings().weight)
        self._check_head()

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.embedding.device

    @torch.no_grad()
    def read(self, ids: Tensor) -> Reading:
        """Reads rows int64 [rows, tokens], all of them from position 0."""
        states = self.model.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        return Reading(torch.cat([states[boundary] for boundary in self.boundaries], -1), states[-1])

    def logits(self, last: Tensor, ids: Tensor | None = None) -> Tensor:
        """The target's logits [..., vocabulary], float32; with `ids` int64 [n] of these tokens only, [..., n]."""
        weight = self.head if ids is None else self.head[ids]
        return F.linear(last.to(weight.dtype), weight).float()

    @torch.no_grad()
    def write(self, prompts: Tensor, new_tokens: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Continues prompts int64 [rows, length], greedily at temperature 0.

        Returns:
            Texts int64 [rows, length + new_tokens], prompts included, and the tokens [rows] each has before and with
            its end of text. What lies behind that is padding.
        """
        ends = _ids_that_end(self.model)
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        written = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            pad_token_id=ends[0] if ends else 0,
            **(sampled if temperature > 0 else {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}),
        )
        length = prompts.shape[1]
        texts = F.pad(written, (0, length + new_tokens - written.shape[1]))
        ended = torch.isin(texts[:, length:], torch.tensor(ends, device=texts.device))
        before = (ended.long().cumsum(1) - ended.long() == 0).sum(1)
        return texts, length + before

    def _check_head(self) -> None:
        probe = torch.arange(8, device=self.device)[None] % len(self.embedding)
        with torch.no_grad():
            own = self.model(input_ids=probe).logits.float()
        apart = (own - self.logits(self.read(probe).last)).abs().max().item()
        if apart > MOST_DIFFERENCE * max(1.0, own.abs().max().item()):
            raise ValueError(
                f"{type(self.model).__name__}: its logits are {apart:.2g} away from its output head times its last "
                "hidden state. A head trained here would learn another law; only targets without a bias or a cap on "
                "their logits can be used, as Llama and Qwen3."
            )


def _ids_that_end(model: PreTrainedModel) -> list[int]:
    ends = model.generation_config.eos_token_id
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]


def load_target(folder: str | Path, boundaries: Sequence[int] | None, device: str, dtype: torch.dtype) -> Target:
    """Loads a local folder or a name on the Hub."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device)
    return Target(model, boundaries or default_boundaries(model.config.num_hidden_layers))


def encode_all(folder: str | Path, texts: Sequence[str]) -> list[Tensor]:
    """Encodes each text as int64 ids [tokens] with the target's tokenizer, as `generate` would be given it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [torch.tensor(ids, dtype=torch.int64) for ids in tokenizer(list(texts))["input_ids"]]


def encode_prompts(folder: str | Path, prompts: Sequence[str]) -> list[Tensor]:
    """Encodes each message of a user in the target's chat template, or alone if there is no template: [tokens]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        return encode_all(folder, prompts)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        for prompt in prompts
    ]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [torch.tensor(ids, dtype=torch.int64) for ids in encoded]
