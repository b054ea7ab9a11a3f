"""EAGLE-3 in straight lines: the formulas of arXiv 2503.01840 and its variants over a whole text, without any cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@dataclass
class Definition:
    """One head: tensors by the names of its first layout, and the variant.

    Attributes:
        embed, lm_head: where the head shares them with its target.
        scale: factor on logits.
    """

    tensors: dict[str, Tensor]
    dim: int = 16
    theta: float = 10000.0
    eps: float = 1e-5
    norm_before_residual: bool = False
    norm_output: bool = False
    embed: Tensor | None = None
    lm_head: Tensor | None = None
    scale: float = 1.0
    window: int | None = None
    inv_freq: Tensor | None = field(default=None)

    def condense(self, features: Tensor) -> Tensor:
        """[n, hidden] of hidden states [n, read, target's hidden]."""
        t = self.tensors
        if "fc_norm.0.weight" in t:
            parts = [rms(part, t[f"fc_norm.{i}.weight"], self.eps) for i, part in enumerate(features.unbind(1))]
            features = torch.stack(parts, 1)
        a = features.flatten(1)
        if "input_norm.weight" in t:
            a = rms(a, t["input_norm.weight"], self.eps)
        return F.linear(a, t["fc.weight"], t.get("fc.bias")) if "fc.weight" in t else a

    def behind(self, g: Tensor, following: Tensor) -> Tensor:
        """What is behind the last layer, of g [n, hidden] at positions 0..n-1 and the tokens that follow each."""
        t, n = self.tensors, len(g)
        table = t.get("embed_tokens.weight", self.embed)
        assert table is not None
        e = rms(table[following], t["midlayer.input_layernorm.weight"], self.eps)
        h = rms(g, t["midlayer.hidden_norm.weight"], self.eps)
        x, into = (h if self.norm_before_residual else g), torch.cat((e, h), 1)
        layers = sum(name.endswith("input_layernorm.weight") for name in t)
        for layer in range(layers):
            at = f"layers.{layer}." if layer else "midlayer."
            if layer:
                into = rms(x, t[f"{at}input_layernorm.weight"], self.eps)
            x = x + self._attention(at, into, n)
            inner = rms(x, t[f"{at}post_attention_layernorm.weight"], self.eps)
            gate, up = F.linear(inner, t[f"{at}mlp.gate_proj.weight"]), F.linear(inner, t[f"{at}mlp.up_proj.weight"])
            x = x + F.linear(F.silu(gate) * up, t[f"{at}mlp.down_proj.weight"])
        return x

    def _attention(self, at: str, into: Tensor, n: int) -> Tensor:
        t, made = self.tensors, {}
        for which in "qkv":
            product = F.linear(into, t[f"{at}self_attn.{which}_proj.weight"], t.get(f"{at}self_attn.{which}_proj.bias"))
            made[which] = product.view(n, -1, self.dim).transpose(0, 1)  # [heads, n, dim]
        for which in "qk":
            if f"{at}self_attn.{which}_norm.weight" in t:
                made[which] = rms(made[which], t[f"{at}self_attn.{which}_norm.weight"], self.eps)
            made[which] = self._turned(made[which], n)
        q, k, v = made["q"], made["k"], made["v"]
        groups = len(q) // len(k)
        scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) / self.dim**0.5
        distance = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (distance < 0) | (distance >= (self.window or n))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = (weights @ v.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)
        return F.linear(out, t[f"{at}self_attn.o_proj.weight"], t.get(f"{at}self_attn.o_proj.bias"))

    def _turned(self, x: Tensor, n: int) -> Tensor:
        inv_freq = self.inv_freq
        if inv_freq is None:
            inv_freq = 1.0 / self.theta ** (torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.arange(n)[:, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., : self.dim // 2], x[..., self.dim // 2 :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def logits(self, x: Tensor) -> Tensor:
        """Of the head's own ids."""
        head = self.tensors.get("lm_head.weight", self.lm_head)
        assert head is not None
        return F.linear(rms(x, self.tensors["norm.weight"], self.eps), head) * self.scale

    def feature(self, x: Tensor) -> Tensor:
        """What the next position has in place of g."""
        return rms(x, self.tensors["norm.weight"], self.eps) if self.norm_output else x

    def target_ids(self, ids: Tensor) -> Tensor:
        """Of the head's own ids."""
        return ids + self.tensors["d2t"][ids] if "d2t" in self.tensors else ids

    def drafts(self, features: Tensor, text: Tensor, k: int) -> tuple[list[int], list[float]]:
        """k drafts behind text [n], from features [n - 1, read, hidden], and by how much each was the best.

        Every draft is made out of the whole text anew.
        """
        g, following, drafted, margins = self.condense(features), text[1:], [], []
        for _ in range(k):
            x = self.behind(g, following)[-1:]
            best = self.logits(x)[0].topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            token = self.target_ids(best.indices[:1])
            drafted.append(int(token))
            g, following = torch.cat((g, self.feature(x))), torch.cat((following, token))
        return drafted, margins


@dataclass
class ParallelDefinition(Definition):
    """P-EAGLE in straight lines: masks behind the text, each with the hidden states of the file."""

    mask_id: int = 7

    def laws(self, features: Tensor, text: Tensor, k: int) -> Tensor:
        """Logits [k, head's ids] of drafts behind text [n], from features [n - 1, read, hidden]."""
        read = features.shape[1:]
        masks = self.tensors["mask_hidden"].view(1, *read).expand(k - 1, *read)
        following = torch.cat((text[1:], torch.full((k - 1,), self.mask_id)))
        return self.logits(self.behind(self.condense(torch.cat((features, masks))), following)[-k:])

    def drafts(self, features: Tensor, text: Tensor, k: int) -> tuple[list[int], list[float]]:
        if k == 0:
            return [], []
        best = self.laws(features, text, k).topk(2)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        return self.target_ids(best.indices[:, 0]).tolist(), margins


def learn(head: Definition, texts: list[tuple[Tensor, Tensor, Tensor]], steps: int = 60) -> None:
    """Lets a head learn texts by heart.

    Args:
        head: its tensors are changed.
        texts: (features [n, read, hidden], the tokens that follow [n], what is to be drafted behind those [n]).
    """
    tensors = head.tensors
    learnt = [tensor.requires_grad_() for tensor in tensors.values() if tensor.is_floating_point()]
    optimiser = torch.optim.Adam(learnt, lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        for features, following, wanted in texts:
            g = head.condense(features)
            F.cross_entropy(head.logits(head.behind(g, following)), wanted).backward()
        optimiser.step()
    for tensor in learnt:
        tensor.requires_grad_(False)
