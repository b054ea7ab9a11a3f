"""llama.cpp by the package cyllama, on a CPU, over a GGUF file: its logits of a text, and its greedy decoding."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastspec.models.checkpoints.gguf.header import read_gguf_header


class LlamaCpp:
    """A model of llama.cpp with as many threads as torch has.

    Args:
        file: a GGUF file.
        length: positions of its K/V cache.
    """

    def __init__(self, file: Path, length: int) -> None:
        self._package: Any = import_module("cyllama.llama.llama_cpp")
        # cyllama 0.2.18 asks its models for n_vocab, which they do not have
        model = type("Model", (self._package.LlamaModel,), {"n_vocab": _vocabulary(file)})
        of_model, of_context = self._package.LlamaModelParams(), self._package.LlamaContextParams()
        of_model.n_gpu_layers = 0
        of_context.n_ctx = of_context.n_batch = length
        of_context.n_threads = of_context.n_threads_batch = torch.get_num_threads()
        self._model = model(path_model=str(file), params=of_model, verbose=False)
        self._context = self._package.LlamaContext(model=self._model, params=of_context, verbose=False)
        chain = self._package.LlamaSamplerChainParams()
        self._greedy = self._package.LlamaSampler(params=chain)
        self._greedy.add_greedy()

    def logits(self, ids: list[int]) -> Tensor:
        """Logits fp32 [tokens, vocab] behind each token of a text."""
        self._context.kv_cache_clear()
        self._read(ids, 0, every=True)
        return torch.stack([torch.tensor(self._context.get_logits_ith(place)) for place in range(len(ids))])

    def generate(self, prompt: list[int], new: int, end: int | None) -> list[int]:
        """Continues a prompt by `new` tokens at most, up to the token `end`."""
        self._context.kv_cache_clear()
        self._read(prompt, 0)
        text = [self._greedy.sample(self._context, -1)]
        while len(text) < new and text[-1] != end:
            self._read(text[-1:], len(prompt) + len(text) - 1)
            text.append(self._greedy.sample(self._context, -1))
        return text

    def _read(self, ids: list[int], first: int, *, every: bool = False) -> None:
        """Takes tokens in, the first at a position; with logits of the last one, or of every one."""
        batch = self._package.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1, verbose=False)
        for place, token in enumerate(ids):
            batch.add(token, first + place, [0], every or place == len(ids) - 1)
        self._context.decode(batch)


def _vocabulary(file: Path) -> int:
    tokens = read_gguf_header(file).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list), "a list in every file of a model"
    return len(tokens)
