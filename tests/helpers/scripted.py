"""A tiny Llama that writes a given text: its logits are a function of the last two tokens.

Its embedding is one-hot. A layer of attention adds the one-hot vector of the token before, since the scores of all heads
are largest at a distance of one (rotary embedding). The head maps each pair of the script to the token that follows it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastspec.text.text_stream import _byte_letters

HEADS, DIM = 8, 64  # the one-hot vector of a token is cut into one slice a head
SHARP, SURE = 1000.0, 30.0  # of the scores, and of the logits
END = "<eos>"


def scripted_pair(
    folder: Path, template: str, script: str, prompt_end: str, *, marks: tuple[str, ...] = (), special: bool = True
) -> tuple[Path, Path]:
    """Directories of (target, draft), which are the same.

    Args:
        folder: for them.
        template: chat template.
        script: text that the model writes after a prompt, before it ends.
        prompt_end: the last characters of every prompt, two tokens at least.
        marks: texts of the script that are one token each.
        special: True if these are special tokens.
    """
    parts = _parts(script, marks)
    tokenizer = _tokenizer([part for part in parts if part not in marks], marks, template, special=special)
    ids = [tokenizer.convert_tokens_to_ids(_name(part, marks)) for part in parts]
    before: list[int] = tokenizer(prompt_end)["input_ids"][-2:]  # type: ignore[index,assignment]
    chain = [*before, *ids, tokenizer.convert_tokens_to_ids(END)]
    model = _model(len(tokenizer), chain, tokenizer.convert_tokens_to_ids(END))
    for path in (folder / "target", folder / "draft"):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return folder / "target", folder / "draft"


def _parts(script: str, marks: tuple[str, ...]) -> list[str]:
    """Cuts the script into marks, and into pieces that come once each."""
    parts: list[str] = []
    pattern = "|".join(f"({re.escape(mark)})" for mark in sorted(marks, key=len, reverse=True))
    for run in [one for one in re.split(pattern, script) if one] if marks else [script]:
        if run in marks:
            parts.append(run)
            continue
        while run:
            size = next((size for size in range(2, len(run) + 1) if run[:size] not in parts), len(run))
            assert run[:size] not in parts or size == len(run)
            parts.append(run[:size])
            run = run[size:]
    return parts


def _name(part: str, marks: tuple[str, ...]) -> str:
    letters = {byte: letter for letter, byte in _byte_letters().items()}
    return part if part in marks else "".join(letters[byte] for byte in part.encode())


def _tokenizer(pieces: list[str], marks: tuple[str, ...], template: str, *, special: bool) -> PreTrainedTokenizerFast:
    """Bytes, and the pieces, which only the model writes: no merge leads to them."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(_name(piece, marks) for piece in pieces)]
    vocab = {name: at for at, name in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(mark, special=special) for mark in marks])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    made.chat_template = template
    return made


def _model(vocab: int, chain: list[int], end: int) -> LlamaForCausalLM:
    assert vocab <= HEADS * DIM
    hidden = 2 * vocab + 1  # the token, the token before, and a one
    hidden += -hidden % HEADS
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": vocab}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, max_position_embeddings=4096, eos_token_id=end, bos_token_id=None, rms_norm_eps=1e-6)
    ).eval()
    model.generation_config.eos_token_id = end
    layer, one = model.model.layers[0], 2 * vocab
    theta = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.weight.fill_(1.0)
        embed = model.model.embed_tokens.weight
        embed[:, :vocab] = torch.eye(vocab)
        embed[:, one] = 1.0
        scale = (hidden / 2) ** 0.5  # of a vector with two ones, after its norm
        for head in range(HEADS):
            rows = slice(head * DIM, head * DIM + DIM // 2), slice(head * DIM + DIM // 2, (head + 1) * DIM)
            layer.self_attn.q_proj.weight[rows[0], one] = SHARP / scale
            layer.self_attn.k_proj.weight[rows[0], one] = torch.cos(theta) / scale
            layer.self_attn.k_proj.weight[rows[1], one] = torch.sin(theta) / scale
        layer.self_attn.v_proj.weight[:vocab, :vocab] = torch.eye(vocab) / scale
        layer.self_attn.o_proj.weight[vocab : 2 * vocab, :vocab] = torch.eye(vocab)
        for before, token, following in zip(chain, chain[1:], chain[2:], strict=False):
            model.lm_head.weight[following, token] = SURE
            model.lm_head.weight[following, vocab + before] = SURE
    return model
