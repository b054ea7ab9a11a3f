"""Small targets for heads: random Llama and Qwen3 of transformers, and one whose law is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCAB = 48


def tiny_model(family: str, layers: int = 7, **more: Any) -> PreTrainedModel:
    """A random float32 model; its laws are sharp enough to be worth learning."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[family]
    return model(config(**sizes | more)).eval()


class PairModel(nn.Module):
    """Its next token is a function of the last two; its hidden states below the last tell the last one alone.

    A head that reads the state of position i beside token i + 1 knows both. Reading it beside token i, it does not
    know token i + 1, on which all depends.

    Attributes:
        follows: int64 [vocabulary, vocabulary], the token after a pair.
    """

    def __init__(self, vocab: int = 12, hidden: int = 32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.config = SimpleNamespace(
            num_hidden_layers=6,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_theta": 10000.0},
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.embedding = nn.Embedding(vocab, hidden)
        self.embedding.weight.data = torch.randn(vocab, hidden, generator=generator)
        self.output = nn.Linear(hidden, vocab, bias=False)
        self.output.weight.data = torch.eye(vocab, hidden)
        self.follows = torch.randint(vocab, (vocab, vocab), generator=generator)
        self.model = _Inner(self)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        last = self.model(input_ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
        return SimpleNamespace(logits=self.output(last))

    def text(self, first: int, second: int, length: int) -> list[int]:
        """The greedy text that begins with two tokens."""
        written = [first, second]
        while len(written) < length:
            written.append(int(self.follows[written[-2], written[-1]]))
        return written


class _Inner(nn.Module):
    def __init__(self, outer: PairModel) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(outer.config.hidden_size)
        self._outer = [outer]  # in a list, so that it is no submodule of its own part

    def forward(self, input_ids: Tensor, output_hidden_states: bool, use_cache: bool) -> SimpleNamespace:
        (outer,) = self._outer
        states = outer.embedding(input_ids)
        before = torch.cat((torch.zeros_like(input_ids[:, :1]), input_ids[:, :-1]), 1)
        last = 10 * torch.eye(states.shape[-1])[outer.follows[before, input_ids]]
        return SimpleNamespace(hidden_states=(*[states] * outer.config.num_hidden_layers, last))
