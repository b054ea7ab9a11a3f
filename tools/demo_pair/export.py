"""Writes a model as a folder that transformers loads unchanged, and checks that it does."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from .model import RMS_EPS, ROPE_THETA, Llama, frozen_copy
from .tokens import END_OF_TEXT, END_OF_TEXT_ID

PROBE = 'def main(args):\n    """Run it."""\n    return [x ** 2 for x in args]  # caf\u00e9 \u2603\n'

# messages are comments, and answers the code below them
CHAT_TEMPLATE = (
    "{% if tools %}# Tools: {{ tools | tojson }}\n"
    """# A call: <tool_call>{"name": "...", "arguments": {...}}</tool_call>\n{% endif %}"""
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% else %}# {{ message.content | replace('\\n', '\\n# ') }}\n{% endif %}{% endfor %}"
)


def save(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes configuration, bfloat16 weights and tokenizer into a folder."""
    built = LlamaForCausalLM(_config(model))
    built.bfloat16()
    built.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()}, strict=False)
    built.tie_weights()
    built.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID, do_sample=False
    )
    built.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name that transformers 4 and 5 both know
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": model.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def greatest_difference(model: Llama, folder: Path, rows: Tensor) -> float:
    """Loads a saved folder and returns the greatest difference of its float32 logits from the model's own."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loaded.to(rows.device)
    with torch.no_grad():
        return float((loaded(rows).logits - frozen_copy(model, torch.float32)(rows)).abs().max())


def tokenizer_agrees(tokenizer: Tokenizer, folder: Path) -> bool:
    """Loads a saved tokenizer; tells whether it encodes like the original and decodes to the same text."""
    loaded = AutoTokenizer.from_pretrained(folder)
    ids = loaded(PROBE)["input_ids"]
    return bool(ids == tokenizer.encode(PROBE).ids and loaded.decode(ids) == PROBE)


def _config(model: Llama) -> LlamaConfig:
    shape = model.shape
    return LlamaConfig(
        vocab_size=model.model.embed_tokens.num_embeddings,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=model.context,
        rms_norm_eps=RMS_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
