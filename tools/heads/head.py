"""What heads have in common, and an EAGLE-3 head in torch, its parameters named as published heads name them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Variant:
    """Parts that published heads have beyond those of the heads that are made here.

    Attributes:
        reads: elements of one hidden state of the target. None: as many as the head has.
        qk_norm, fc_norm, norm_before_fc, fc_bias: True if there are such tensors.
        norm_before_residual: True if the normed feature goes to the residual stream.
        norm_output: True if the next pass reads the feature after the last norm.
        frequencies: radians per position of the rotated pairs. (): those of `HeadShape.rope_theta`.
        logit_scale: factor on logits.
    """

    reads: int | None = None
    qk_norm: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    frequencies: tuple[float, ...] = ()
    logit_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of a head.

    Attributes:
        hidden: Its width, which is also the target's.
        features: Hidden states of the target that one position gives it.
        heads, kv_heads, head_dim: Its attention.
        intermediate: Width of its MLP.
        vocab, draft_vocab: Tokens of the target, and those it can draft.
        rope_theta, rms_eps: The target's.
        variant: What a published head has in addition.
    """

    hidden: int
    features: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    rope_theta: float
    rms_eps: float
    variant: Variant = Variant()


class Norm(nn.RMSNorm):
    """RMSNorm that computes and answers in float32, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """Norms x [..., hidden]."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight, self.eps)


class Past:
    """Keys and values of the passes so far, for starts that share one sequence.

    The first pass has one row for each position, over the target's features: start i sees the rows up to i. A later
    pass has one row for each start, over the head's own features, and only its own start sees it.

    Attributes:
        keys, values: One [rows, heads, starts, head_dim] for each pass.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, query: Tensor) -> Tensor:
        """Mixes the values for queries [rows, heads, starts, head_dim] of the newest pass; the same shape."""
        scale = query.shape[-1] ** -0.5
        starts = query.shape[2]
        hidden = torch.ones(starts, starts, dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ self.keys[0].transpose(-1, -2)).float().masked_fill(hidden, -math.inf)
        own = [(query * keys).float().sum(-1, keepdim=True) for keys in self.keys[1:]]
        shares = F.softmax(torch.cat([scores, *own], -1) * scale, -1).to(query.dtype)
        mixed = shares[..., :starts] @ self.values[0]
        for place, values in enumerate(self.values[1:]):
            mixed = mixed + shares[..., starts + place, None] * values
        return mixed


class Attention(nn.Module):
    """Causal attention.

    Args:
        shape: Sizes.
        reads: Elements of its input: twice the width in an EAGLE-3 head, the token's embedding and then the feature.
    """

    def __init__(self, shape: HeadShape, reads: int) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(reads, wide, bias=False)
        self.k_proj = nn.Linear(reads, narrow, bias=False)
        self.v_proj = nn.Linear(reads, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        if shape.variant.qk_norm:
            self.q_norm, self.k_norm = (Norm(shape.head_dim, eps=shape.rms_eps) for _ in "qk")

    def forward(self, x: Tensor, first: int, past: Past) -> Tensor:
        """Mixes x [rows, starts, reads], start i at position first + i, with what its start saw before."""
        group = self.shape.heads // self.shape.kv_heads
        query, key = self._heads(self.q_proj(x)), self._heads(self.k_proj(x))
        if self.shape.variant.qk_norm:
            query, key = self.q_norm(query).to(query.dtype), self.k_norm(key).to(key.dtype)
        query, key = (rotate(each, first, self.shape) for each in (query, key))
        past.keys.append(key.repeat_interleave(group, 1))
        past.values.append(self._heads(self.v_proj(x)).repeat_interleave(group, 1))
        added: Tensor = self.o_proj(past.attend(query).transpose(1, 2).flatten(2))
        return added

    def _heads(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        return x.view(rows, tokens, -1, self.shape.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., hidden] to the same shape."""
        mapped: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return mapped


class Midlayer(nn.Module):
    """The one decoder layer: norms for embedding and feature, attention over both, MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape, 2 * shape.hidden), Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, eps=shape.rms_eps)
        self.hidden_norm = Norm(shape.hidden, eps=shape.rms_eps)
        self.post_attention_layernorm = Norm(shape.hidden, eps=shape.rms_eps)

    def forward(self, embedded: Tensor, feature: Tensor, first: int, past: Past) -> Tensor:
        """Maps embeddings and features [rows, starts, hidden] to the next features, the same shape."""
        normed = self.hidden_norm(feature)
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        residual = normed if self.self_attn.shape.variant.norm_before_residual else feature
        x = residual + self.self_attn(both, first, past)
        mapped: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mapped


class DraftHead(nn.Module, ABC):
    """What heads of all types have: the product of the target's hidden states, an output matrix and a vocabulary.

    Args:
        shape: Its sizes.
        drafted: The target's ids of the tokens it can draft, int64 [draft_vocab], ascending.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: HeadShape, drafted: Tensor) -> None:
        super().__init__()
        self.shape, variant = shape, shape.variant
        self.fc = nn.Linear(shape.features * (variant.reads or shape.hidden), shape.hidden, bias=variant.fc_bias)
        self.norm = Norm(shape.hidden, eps=shape.rms_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        drafted = drafted.cpu()
        self.register_buffer("d2t", drafted - torch.arange(shape.draft_vocab))  # published heads store the offset
        self.register_buffer("t2d", torch.zeros(shape.vocab, dtype=torch.bool).index_fill(0, drafted, True))

    @property
    def drafted(self) -> Tensor:
        """The target's ids of its tokens, int64 [draft_vocab]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @abstractmethod
    def unroll(self, features: Tensor, ids: Tensor, embedding: Tensor, passes: int) -> list[Tensor]:
        """Drafts from every position of known text, all its chains at once.

        Start i knows the features up to position i and the tokens up to i + 1. At place j it speaks about token
        i + 2 + j, whose law the target gives at position i + 1 + j.

        Args:
            features: The target's, [rows, tokens, features * hidden].
            ids: int64 [rows, tokens].
            embedding: The target's, [vocabulary, hidden]; not read by a head that has its own.
            passes: Length of a chain.

        Returns:
            One [rows, tokens - passes, draft_vocab] of logits for each place.
        """

    def begin(self, norm: Tensor, head: Tensor) -> Self:
        """Sets the values that training begins with: random layers; the last norm and the output are the target's.

        Args:
            norm: Weight of the target's last norm, [hidden].
            head: The target's output head, [vocabulary, hidden].
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    ends_block = name.endswith(("o_proj.weight", "down_proj.weight"))
                    nn.init.normal_(parameter, 0.0, (0.5 if ends_block else 1.0) * parameter.shape[1] ** -0.5)
            self.norm.weight.copy_(norm)
            self.lm_head.weight.copy_(head[self.drafted.to(head.device)])
        return self


class Eagle3Head(DraftHead):
    """A head that drafts the token after next from a position's features and the next token."""

    table: Tensor | None  # its own embedding, which is not trained

    def __init__(self, shape: HeadShape, drafted: Tensor) -> None:
        super().__init__(shape, drafted)
        variant, reads = shape.variant, shape.variant.reads or shape.hidden
        if variant.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(reads, eps=shape.rms_eps) for _ in range(shape.features))
        if variant.norm_before_fc:
            self.input_norm = Norm(shape.features * reads, eps=shape.rms_eps)
        self.register_buffer("table", None, persistent=False)
        self.midlayer = Midlayer(shape)

    def step(self, embedded: Tensor, feature: Tensor, first: int, past: Past) -> tuple[Tensor, Tensor]:
        """One pass.

        Args:
            embedded: Embeddings [rows, starts, hidden] of the tokens that follow the features' positions.
            feature: [rows, starts, hidden]: `fc` of the target's features, or what the last pass returned.
            first: Position of the first start; start i lies at first + i.
            past: What the starts saw before; this pass is added.

        Returns:
            Features for the next pass, [rows, starts, hidden], and logits [rows, starts, draft_vocab].
        """
        feature = self.midlayer(embedded, feature, first, past)
        normed = self.norm(feature)
        logits: Tensor = self.lm_head(normed) * self.shape.variant.logit_scale
        return (normed if self.shape.variant.norm_output else feature), logits

    def condense(self, features: Tensor) -> Tensor:
        """The feature [..., hidden] of the target's hidden states [..., features * reads]."""
        if self.shape.variant.fc_norm:
            chunks = features.chunk(self.shape.features, -1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        if self.shape.variant.norm_before_fc:
            features = self.input_norm(features)
        made: Tensor = self.fc(features)
        return made

    def unroll(self, features: Tensor, ids: Tensor, embedding: Tensor, passes: int) -> list[Tensor]:
        """Drafts from every position of known text, fed the text's own tokens; see `DraftHead.unroll`.

        In pass j, start i reads token i + 1 + j. Published trainers call this training-time test.
        """
        starts, past = ids.shape[1] - passes, Past()
        feature = self.condense(features[:, :starts])
        embedding = embedding if self.table is None else self.table
        said = []
        for place in range(passes):
            tokens = ids[:, 1 + place : 1 + place + starts]
            feature, logits = self.step(F.embedding(tokens, embedding), feature, place, past)
            said.append(logits)
        return said


def rotate(x: Tensor, first: int, shape: HeadShape) -> Tensor:
    """Turns x [rows, heads, positions, head_dim] by the angles of positions first, first + 1, ..."""
    positions, head_dim = x.shape[-2:]
    frequencies = shape.rope_theta ** (-torch.arange(0, head_dim, 2, device=x.device).float() / head_dim)
    if shape.variant.frequencies:
        frequencies = torch.tensor(shape.variant.frequencies, device=x.device)
    angles = torch.outer(torch.arange(first, first + positions, device=x.device).float(), frequencies).repeat(1, 2)
    low, high = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat((-high, low), -1) * angles.sin().to(x.dtype)
