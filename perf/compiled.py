"""A peer: torch.compile over a static K/V cache, each pass one CUDA graph, in gpt-fast's manner.

The technique is gpt-fast's: caches of fixed size written in place, positions as tensors, inductor's kernels, and one
graph launch a pass; speculation for one prompt at a time, with one wait for the device a step. The code is our own,
over the live transformers weights, and it compiles one layer, which serves all of a model's layers, instead of the
whole model: a minute less to wait, and the same kernels but for those across two layers. On a CPU nothing is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from perf.peers import FAILURES, SEED, Setting, failed, wait
from perf.records import Row
from perf.runs import Call, summary

OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True}  # what gpt-fast sets for matrix-vector products
WARM_UPS = 3


class Layer(NamedTuple):
    """Weights of a layer; biases and head norms where the family has them."""

    norms: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    head_norms: tuple[Tensor, Tensor] | None
    o: Tensor
    mlp: tuple[Tensor, Tensor, Tensor]


def layer_pass(
    x: Tensor, layer: Layer, cache: tuple[Tensor, Tensor], place: tuple[Tensor, ...], dim: int, eps: float
) -> Tensor:
    """One layer over x [B, Q, hidden]; writes K and V [B, heads, length, dim] at the positions, then attends.

    Args:
        place: positions [Q], their rotation's cos and sin [Q, dim], and the mask [Q, length].
        dim: of a head.
    """
    positions, cos, sin, mask = place
    y = F.rms_norm(x, x.shape[-1:], layer.norms[0], eps)
    shape = (*x.shape[:2], -1, dim)
    q, k, v = (
        F.linear(y, weight, bias).view(shape).transpose(1, 2)
        for weight, bias in zip(layer.qkv, layer.biases, strict=True)
    )
    if layer.head_norms is not None:
        q, k = (F.rms_norm(each, (dim,), norm, eps) for each, norm in zip((q, k), layer.head_norms, strict=True))
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    for kept, new in zip(cache, (k, v), strict=True):
        kept[:, :, positions] = new
    group = q.shape[1] // k.shape[1]
    keys, values = (kept.repeat_interleave(group, dim=1) for kept in cache)  # with a mask no fused kernel groups heads
    attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    x = x + F.linear(attended.transpose(1, 2).flatten(2), layer.o)
    y = F.rms_norm(x, x.shape[-1:], layer.norms[1], eps)
    gate, up, down = layer.mlp
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def head_pass(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 logits of x [B, Q, hidden]."""
    return F.linear(F.rms_norm(x, x.shape[-1:], norm, eps), weight).float()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class StaticDecoder:
    """A transformers model's weights with caches of fixed size.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 model; its weights are used as they lie.
        batch, length: rows, and positions of each.
    """

    def __init__(self, model: PreTrainedModel, batch: int, length: int) -> None:
        body: Any = model.model
        config, weight = model.config, body.embed_tokens.weight
        self.device: torch.device = weight.device
        self._embed, self._norm, self._eps = weight, body.norm.weight, config.rms_norm_eps
        self._head: Tensor = model.get_output_embeddings().weight
        self._dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers = [_weights(layer) for layer in body.layers]
        shape = (batch, config.num_key_value_heads, length, self._dim)
        self._caches = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self._layers]
        places = torch.arange(length, device=self.device)
        cos, sin = body.rotary_emb(weight.new_zeros(1, 1, 1), places[None])
        self._tables = cos[0], sin[0], places[None] <= places[:, None]
        self._compiled, self._compiled_head = layer_pass, head_pass
        if self.device.type == "cuda":
            self._compiled = torch.compile(layer_pass, fullgraph=True, dynamic=False, options=OPTIONS)
            self._compiled_head = torch.compile(head_pass, fullgraph=True, dynamic=False, options=OPTIONS)

    def logits(self, ids: Tensor, positions: Tensor, *, prompt: bool = False) -> Tensor:
        """fp32 [B, Q, V] of what follows ids [B, Q] at positions [Q]; of a prompt, for its last place alone."""
        place = (positions, *(table[positions] for table in self._tables))
        # a prompt's length is met once
        run, finish = (layer_pass, head_pass) if prompt else (self._compiled, self._compiled_head)
        x = F.embedding(ids, self._embed)
        for layer, cache in zip(self._layers, self._caches, strict=True):
            x = run(x, layer, cache, place, self._dim, self._eps)
        return finish(x[:, -1:] if prompt else x, self._norm, self._head, self._eps)


def _weights(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    products = attention.q_proj, attention.k_proj, attention.v_proj
    norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    return Layer(
        (layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
        (products[0].weight, products[1].weight, products[2].weight),
        (products[0].bias, products[1].bias, products[2].bias),
        norms,
        attention.o_proj.weight,
        (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight),
    )


def drawn(probs: Tensor) -> Tensor:
    """One draw from each row of probs [..., V], without a wait."""
    return (probs / torch.empty_like(probs).exponential_(1)).argmax(-1)


class Passes:
    """Passes over Q tokens a row: static inputs and outputs around one graph.

    Attributes:
        ids [B, Q], positions [Q]: what the next pass is fed. With one token a row a pass leaves its own pick there.
        probs [B, Q, V]: the law after each token, when sampled. picks [B, Q].
    """

    def __init__(self, decoder: StaticDecoder, batch: int, queries: int, *, sampled: bool) -> None:
        self._decoder, self._sampled = decoder, sampled
        self.ids = torch.zeros(batch, queries, dtype=torch.int64, device=decoder.device)
        self.positions = torch.arange(queries, device=decoder.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._body()
        if decoder.device.type == "cuda":
            self._capture()

    def _body(self) -> None:
        logits = self._decoder.logits(self.ids, self.positions)
        if self._sampled:
            self.probs = logits.softmax(-1)
            self.picks = drawn(self.probs)
        else:
            self.picks = logits.argmax(-1)
        if self.ids.shape[1] == 1:
            self.ids.copy_(self.picks)
            self.positions.add_(1)

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.positions.copy_(torch.arange(len(self.positions), device=self._decoder.device))
                self._body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):  # where cuBLAS has its work area already
            self._body()
        self._graph = graph

    def run(self) -> None:
        """One pass."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._body()


class CompiledEngine:
    """Plain decoding of a batch, or speculation for one prompt."""

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel | None, setting: Setting, k: int) -> None:
        batch, longest = len(setting.batches[0]), len(setting.batches[0][0]) + setting.new + k + 2
        longest = -(-longest // 8) * 8  # masks of other widths are copied before they are used
        self._setting, self._k = setting, k
        self._target = StaticDecoder(target, batch, longest)
        self._passes = Passes(self._target, batch, k + 1, sampled=setting.sampled)
        self._draft = None
        if k and draft is not None:
            self._draft = StaticDecoder(draft, batch, longest)
            self._drafts = Passes(self._draft, batch, 1, sampled=setting.sampled)

    def call(self, prompts: list[list[int]]) -> Call:
        """One timed generation."""
        device = self._target.device
        torch.manual_seed(SEED)
        wait(device)
        start = time.perf_counter()
        ids = torch.tensor(prompts, device=device)
        places = torch.arange(ids.shape[1], device=device)
        logits = self._target.logits(ids, places, prompt=True)[:, 0]
        if self._draft is not None:
            self._draft.logits(ids, places, prompt=True)
        token = drawn(logits.softmax(-1)) if self._setting.sampled else logits.argmax(-1)
        wait(device)
        first = time.perf_counter() - start
        decode = self._plain if self._draft is None else self._speculative
        text, passes, counts = decode(token, ids.shape[1])
        wait(device)
        seconds = time.perf_counter() - start
        drafted, accepted = counts or (None, None)
        rows = passes * len(prompts)
        return Call(sum(map(len, text)), passes, rows, seconds, first, text, drafted, accepted)

    def _plain(self, token: Tensor, length: int) -> tuple[list[list[int]], int, None]:
        text = torch.empty(len(token), self._setting.new, dtype=torch.int64, device=token.device)
        text[:, 0] = token
        self._passes.ids.copy_(token[:, None])
        self._passes.positions.fill_(length)
        for place in range(1, self._setting.new):
            self._passes.run()
            text[:, place : place + 1] = self._passes.ids
        return text.tolist(), self._setting.new, None

    def _speculative(self, token: Tensor, length: int) -> tuple[list[list[int]], int, tuple[int, int]]:
        text, passes, accepted = [int(token)], 1, 0
        while len(text) < self._setting.new:
            at = length + len(text) - 1  # of the last token, which no model was fed yet
            drafts, laws = self._propose(token, at)
            self._passes.ids[0, 0], self._passes.ids[0, 1:] = token[0], drafts
            self._passes.positions.copy_(at + torch.arange(self._k + 1, device=token.device))
            self._passes.run()
            taken, token = self._judge(drafts, laws)
            if taken == self._k:  # the draft was never fed its own last one
                self._drafts.run()
            text += [*drafts[:taken].tolist(), int(token)]
            passes, accepted = passes + 1, accepted + taken
        return [text[: self._setting.new]], passes, ((passes - 1) * self._k, accepted)

    def _propose(self, token: Tensor, at: int) -> tuple[Tensor, Tensor | None]:
        """Drafts [k], and the law of each [k, V] when sampled."""
        self._drafts.ids.copy_(token[:, None])
        self._drafts.positions.fill_(at)
        found, laws = [], []
        for _ in range(self._k):
            self._drafts.run()
            found.append(self._drafts.ids[0].clone())
            if self._setting.sampled:
                laws.append(self._drafts.probs[0, 0].clone())
        return torch.cat(found), torch.stack(laws) if laws else None

    def _judge(self, drafts: Tensor, laws: Tensor | None) -> tuple[int, Tensor]:
        """Drafts accepted, and the token after them [1]: the one wait for the device of a step."""
        if laws is None:
            picks = self._passes.picks[0]
            taken = int((picks[:-1] == drafts).int().cumprod(0).sum())
            return taken, picks[taken : taken + 1].clone()
        return judged_by_law(self._passes.probs[0], laws, drafts)


def judged_by_law(p: Tensor, q: Tensor, drafts: Tensor) -> tuple[int, Tensor]:
    """Rejection sampling of drafts [k] with laws p [k+1, V] and q [k, W]; what is left of p where one is refused."""
    width = min(p.shape[1], q.shape[1])
    q = F.pad(q[:, :width], (0, p.shape[1] - width))
    each = torch.arange(len(drafts), device=p.device)
    kept = torch.rand(len(drafts), device=p.device) * q[each, drafts] < p[each, drafts]
    taken = int(kept.int().cumprod(0).sum())
    law = p[taken] if taken == len(drafts) else (p[taken] - q[taken]).clamp(min=0)
    return taken, drawn(law[None])


def rows(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    setting: Setting,
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Rows of plain decoding, and of speculation where there is a draft and one prompt at a time."""
    found: list[Row] = []
    suffix = "" if target.device.type == "cuda" else " (not compiled on a CPU)"
    for k in dict.fromkeys((0, setting.k if draft is not None else 0)):
        name = f"torch.compile, static K/V, {'speculative' if k else 'plain'}{suffix}"
        if k and len(setting.batches[0]) > 1:
            found.append({"engine": name, "k": k, "status": "takes one prompt at a time"})
            continue
        try:
            with torch.inference_mode():
                torch.compiler.reset()  # shapes of earlier settings would count towards the limit of recompilations
                start = time.perf_counter()
                engine = CompiledEngine(target, draft, setting, k)
                engine.call(setting.batches[0])
                warm_up = time.perf_counter() - start
                calls = [engine.call(batch) for batch in setting.batches]
        except FAILURES as error:
            found.append(failed(name, k, error, say))
            continue
        found.append({**summary(name, k, calls), "warm_up_s": round(warm_up, 2)})
        say(f"{name}: {found[-1]['ms_step']} ms a step")
    return found
