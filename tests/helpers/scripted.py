"""A tiny Llama that writes given texts: its logits are a function of the last four tokens.

Its embedding is a code of unit length for each token. A layer of attention adds the codes of the three tokens before:
the scores of a head are largest at one distance (rotary embedding). The MLP has a unit for each context of a script,
which is on where all four tokens match, and adds the one-hot vector of the token that follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastspec.text.token_bytes import byte_letters

BACK, DIM = 3, 64  # tokens before the last, a head each; numbers of a code
ALIKE = 24 / DIM  # product of two tokens' codes, at most; of a code with itself 1
SHARP, STEEP, SURE = 1000.0, 100.0, 30.0  # of the scores, of the units, and of the logits
END = "<eos>"


def scripted_pair(
    folder: Path,
    template: str,
    script: str,
    prompt_end: str,
    *,
    others: Mapping[str, str] | None = None,
    marks: tuple[str, ...] = (),
    special: bool = True,
    pieces: bool = True,
) -> tuple[Path, Path]:
    """Directories of (target, draft), which are the same.

    Args:
        folder: for them.
        template: chat template.
        script: text that the model writes after a prompt, before it ends.
        prompt_end: the last characters of every prompt, four tokens at least.
        others: scripts after prompts with another end, by that end.
        marks: texts of the script that are one token each.
        special: True if these are special tokens.
        pieces: False: the model writes byte by byte, as grammars tokenise texts that they force. Then four tokens of
            the script must tell the next one.
    """
    parts: list[str] = []
    ends, places = [prompt_end, *(others or {})], [0]
    for each in (script, *(others or {}).values()):
        parts += _parts(each, marks, parts) if pieces else _split(each, marks)
        places.append(len(parts))
    new = [part for part in parts if part not in marks] if pieces else []
    tokenizer = _tokenizer(new, marks, template, special=special)
    end: int = tokenizer.convert_tokens_to_ids(END)  # type: ignore[assignment]
    chains = []
    for at, written in enumerate(ends):
        before: list[int] = tokenizer(written)["input_ids"][-BACK - 1 :]  # type: ignore[index,assignment]
        own = parts[places[at] : places[at + 1]]
        chains.append([*before, *_ids(tokenizer, own, marks), end])
    _check(chains)
    model = _model(len(tokenizer), chains, end)
    target, draft = folder / "target", folder / "draft"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    draft.symlink_to(target)
    return target, draft


def _ids(tokenizer: PreTrainedTokenizerFast, parts: Sequence[str], marks: tuple[str, ...]) -> list[int]:
    """Tokens of parts; a part that is no token is several: one for each byte."""
    ids: list[int] = []
    for part in parts:
        name = _name(part, marks)
        known = name in tokenizer.get_vocab()
        ids += [tokenizer.convert_tokens_to_ids(one) for one in ([name] if known else name)]
    return ids


def _check(chains: list[list[int]]) -> None:
    """Raises AssertionError where four tokens do not tell the next one."""
    following: dict[tuple[int, ...], int] = {}
    for chain in chains:
        for at in range(BACK + 1, len(chain)):
            context = tuple(chain[at - BACK - 1 : at])
            assert following.setdefault(context, chain[at]) == chain[at], (context, following[context], chain[at])


def _split(script: str, marks: tuple[str, ...]) -> list[str]:
    """Cuts the script into marks and the texts between them."""
    pattern = "|".join(f"({re.escape(mark)})" for mark in sorted(marks, key=len, reverse=True))
    return [one for one in re.split(pattern, script) if one] if marks else [script]


def _parts(script: str, marks: tuple[str, ...], used: Sequence[str] = ()) -> list[str]:
    """Cuts the script into marks, and into pieces that come once each and are not used yet."""
    parts, taken = list[str](), set(used)
    for run in _split(script, marks):
        if run in marks:
            parts.append(run)
            continue
        while run:
            sizes = (size for size in range(2, len(run) + 1) if len(run) - size != 1)  # no single letter is left
            size = next((size for size in sizes if run[:size] not in taken), len(run))
            assert run[:size] not in taken or size == len(run)
            parts.append(run[:size])
            taken.add(run[:size])
            run = run[size:]
    return parts


def _name(part: str, marks: tuple[str, ...]) -> str:
    letters = {byte: letter for letter, byte in byte_letters().items()}
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


def _codes(vocab: int) -> torch.Tensor:
    """Codes [vocab, DIM]: random signs, drawn again where they are too much like those of an earlier token."""
    generator, found = torch.Generator().manual_seed(0), torch.empty(0, DIM)
    while len(found) < vocab:
        code = (2.0 * torch.randint(2, (1, DIM), generator=generator) - 1) / DIM**0.5
        if not len(found) or float((found @ code[0]).max()) <= ALIKE:
            found = torch.cat([found, code])
    return found


def _model(vocab: int, chains: list[list[int]], end: int) -> LlamaForCausalLM:
    heads, codes = BACK, _codes(vocab)
    places = [(chain, at) for chain in chains for at in range(BACK + 1, len(chain))]
    one, following = (BACK + 1) * DIM, (BACK + 1) * DIM + 1
    hidden = following + vocab  # the last tokens, a one, and the next token
    hidden += -hidden % heads
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": -(-len(places) // 16) * 16,
        "num_hidden_layers": 1,
    }
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": DIM, "vocab_size": vocab}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, max_position_embeddings=8192, eos_token_id=end, bos_token_id=None, rms_norm_eps=1e-6)
    ).eval()
    model.generation_config.eos_token_id = end
    layer = model.model.layers[0]
    theta = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.weight.fill_(1.0)
        embed, attention = model.model.embed_tokens.weight, layer.self_attn
        embed[:, :DIM] = codes
        embed[:, one] = 1.0
        scale = (hidden / 2) ** 0.5  # of a code and a one, after their norm
        for head in range(heads):
            start, distance, place = head * DIM, head + 1, (head + 1) * DIM
            attention.q_proj.weight[start : start + DIM // 2, one] = SHARP / scale
            attention.k_proj.weight[start : start + DIM // 2, one] = torch.cos(distance * theta) / scale
            attention.k_proj.weight[start + DIM // 2 : start + DIM, one] = torch.sin(distance * theta) / scale
            attention.v_proj.weight[start : start + DIM, :DIM] = torch.eye(DIM) / scale
            attention.o_proj.weight[place : place + DIM, start : start + DIM] = torch.eye(DIM)
        size = (hidden / (BACK + 2)) ** 0.5  # of each code and the one of the MLP's input, after its norm
        mlp = layer.mlp
        off = (1 - ALIKE) / 2  # from the sum where all tokens match, and from the largest where one does not
        for unit, (chain, at) in enumerate(places):
            mlp.gate_proj.weight[unit, one] = -STEEP * (BACK + 1 - off) / size
            mlp.up_proj.weight[unit, one] = 1 / size
            mlp.down_proj.weight[following + chain[at], unit] = 1 / (STEEP * off)
            for back in range(BACK + 1):
                mlp.gate_proj.weight[unit, back * DIM : (back + 1) * DIM] = STEEP / size * codes[chain[at - 1 - back]]
        model.lm_head.weight[:, following : following + vocab] = SURE * torch.eye(vocab)
    return model
