"""Planted pairs: a target and a draft of real shape whose agreement is natural and can be chosen.

Weights of real models cannot be had everywhere, and those of random ones agree on nothing. So a small language is
planted in both: every token has four successors with log-weights, drawn once per pair; the two models have nothing
else in common.

- The residual stream has two halves. A token's embedding carries a random code of its own in the first, and in the
  second what the head looks for: a combination of the codes of the tokens that it may follow.
- Part of the first layer's MLP moves the code from the first half to the second, where the head reads it; a model
  with tied embeddings works as well as one without.
- Everything else is noise at full size: all attention, and the MLPs, disturb the stream by an amount that depends
  on the whole context and differs between the models. It moves the successors' logits by about `noise`.

How far the successors' weights lie apart, against that noise, decides how often both models would pick the same
token. `plant` finds the distance that gives the agreement asked for, from passes of both models over text of the
planted language. Text is no loop: the successors are drawn over the whole vocabulary, and contexts disturb.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from perf.workloads import Workload

SUCCESSORS = 4
MARGIN = 6.0  # of the best successor's logit over the log of the vocabulary: keeps the other tokens below 1%
SCALE = 0.1  # standard deviation of embeddings
READ = 0.3  # of what the head looks for, in units of SCALE: small, or a tied model would see each token follow itself
UNREAD = 0.01  # weight of the other coordinates in the final norm
CONSTANT = 4.0  # of some coordinates of the stream that are the same for all tokens, in units of SCALE
SHARPNESS = 1.4  # of queries and keys: attention goes to a few keys, so that contexts differ
QUIET = 0.02  # noise among planted weights, in units of ordinary noise
TURNS, WHOLE_TURNS = 16, 3  # passes that settle the noise, at most, and those of them that correct all that they find
NEAR = 1.7  # factor that the noise may be off by in the end
REACHED = 0.03  # agreement found may differ so much from what was asked for
CALIBRATION = {"cpu": (12, 64, 24), "cuda": (24, 192, 64)}  # sequences, their length, and the part not counted


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """The planted law: successor j of token t is successors[j, t], with log-weight gaps[j, t] * spread.

    Attributes:
        successors: int64 [SUCCESSORS, V]; for every j a permutation without fixed points.
        predecessors: its inverse.
        gaps: [SUCCESSORS, V], 0 for the best successor of a token and below 0 for the others.
    """

    successors: Tensor
    predecessors: Tensor
    gaps: Tensor

    @classmethod
    def draw(cls, vocab_size: int, seed: int) -> Language:
        """The same on every machine for the same arguments."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.arange(vocab_size)
        # different shifts under one permutation: no token has the same successor, or predecessor, twice
        shifts = torch.randperm(vocab_size, generator=generator)[:SUCCESSORS, None]
        order = torch.randperm(vocab_size, generator=generator)
        moved = (ids + shifts) % vocab_size
        while len(own := (order[moved] == ids).nonzero()):  # such a token would follow itself: a loop
            other = int(torch.randint(vocab_size, (1,), generator=generator))
            places = torch.tensor([int(moved[tuple(own[0])]), other])
            order[places] = order[places.flip(0)]
        successors = order[moved]
        predecessors = torch.empty_like(successors)
        predecessors.scatter_(1, successors, ids.expand(SUCCESSORS, -1))
        gaps = torch.randn(SUCCESSORS, vocab_size, generator=generator)
        return cls(successors, predecessors, gaps - gaps.amax(0))

    def text(self, rows: int, length: int, *, spread: float, seed: int) -> Tensor:
        """Random text of the planted law, int64 [rows, length]."""
        generator = torch.Generator().manual_seed(seed)
        token = torch.randint(self.gaps.shape[1], (rows,), generator=generator)
        tokens = [token]
        for _ in range(length - 1):
            law = (self.gaps[:, token].T * spread).softmax(-1)
            chosen = torch.multinomial(law, 1, generator=generator)[:, 0]
            token = self.successors[chosen, token]
            tokens.append(token)
        return torch.stack(tokens, 1)


@dataclass(frozen=True, slots=True)
class Halves:
    """Where things lie in the residual stream of a model.

    Attributes:
        own, read: coordinates of a token's own code, and of what the head reads; constant: the same for all.
        size: of a half.
    """

    own: slice
    read: slice
    constant: slice
    size: int

    @classmethod
    def of(cls, hidden: int) -> Halves:
        """Two equal halves; at least 1 in 128 coordinates, and at least 4, are constant."""
        size = (hidden - max(4, hidden // 128)) // 2
        return cls(slice(0, size), slice(size, 2 * size), slice(2 * size, hidden), size)


class Planted:
    """One model with the language planted in it.

    Args:
        model: of any supported family; every weight is overwritten.
        language: may cover fewer ids than the model has rows: the rest is padding that never wins.
        noise: wanted standard deviation, over contexts, of a successor's logit.
        seed: of all that is random.
    """

    def __init__(self, model: PreTrainedModel, language: Language, *, noise: float, seed: int) -> None:
        self.model = model.eval().requires_grad_(False)
        self._body: Any = model.model
        config = model.config
        self._halves = Halves.of(config.hidden_size)
        self._shared = language.gaps.shape[1]
        self.peak = math.log(config.vocab_size) + MARGIN  # logit of the best successor
        self._noise = noise
        self._embed = cast("Tensor", self._body.embed_tokens.weight)
        self._head = cast("Tensor", model.get_output_embeddings().weight)
        self._language = Language(*(getattr(language, name).to(self._embed.device) for name in Language.__slots__))
        self._fill(torch.Generator(self._embed.device).manual_seed(seed))
        self._plant_shift()

    def _fill(self, generator: torch.Generator) -> None:
        halves, config = self._halves, self.model.config
        share = self._noise * math.sqrt(halves.size / SUCCESSORS) / self.peak  # of the stream, at the end
        # first guess of what attention (4/5 of the noise) and the MLPs bring; `settle` puts it right
        branches = {"o_proj": 0.8 / 0.4**2, "down_proj": 0.2 / 0.6**2}
        gains = {name: SCALE * share * math.sqrt(part / config.num_hidden_layers) for name, part in branches.items()}
        for name, weight in self.model.named_parameters():
            kind = name.split(".")[-2]
            if "norm" in kind:
                weight.normal_(SHARPNESS if kind in ("q_norm", "k_norm") else 1.0, 0.1, generator=generator)
            elif name.endswith("bias") or kind in ("embed_tokens", "lm_head"):
                weight.normal_(0.0, SCALE, generator=generator)
            else:
                sharp = SHARPNESS if kind in ("q_proj", "k_proj") else 1.0
                weight.normal_(0.0, gains.get(kind, sharp) / math.sqrt(weight.shape[1]), generator=generator)
                if kind not in gains:  # reads the stream: its constant part would disturb all contexts alike
                    weight[:, halves.constant] *= 0.1
        self._embed[:, halves.constant] = SCALE * CONSTANT
        for matrix in (self._embed, self._head)[: 1 if self._head is self._embed else 2]:
            matrix[self._shared :, halves.read] *= READ / math.sqrt(SUCCESSORS)  # padding looks for nothing planted
        for part in (halves.own, halves.constant):  # a tied head reads them as well, and each token would find itself
            self._body.norm.weight[part] *= UNREAD

    def _plant_shift(self) -> None:
        """Lets the first MLP replace the second half of the stream by the first: x - s(x) pairs of silu are linear."""
        halves, layer = self._halves, self._body.layers[0]
        scale = layer.post_attention_layernorm.weight
        gate, up, down = (getattr(layer.mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
        size, constants = halves.size, scale[halves.constant]
        square = ((1 + READ**2) * size + len(constants) * CONSTANT**2) / len(
            scale
        )  # of the stream there, in units of SCALE
        for weight in (gate[: 4 * size], up[: 4 * size], down[:, : 4 * size]):
            weight *= QUIET
        up[: 4 * size, halves.constant] += math.sqrt(square) / CONSTANT / len(constants) / constants  # makes up(x) = 1
        units = torch.arange(size, device=gate.device)
        out = units + size
        for block, (source, sign) in enumerate(((units, 1.0), (out, -1.0))):
            for half, slope in enumerate((1.0, -1.0)):
                rows = units + (2 * block + half) * size
                gate[rows, source] += slope / scale[source]
                down[out, rows] += slope * sign * SCALE * math.sqrt(square)

    def plant_head(self, spread: float) -> None:
        """Writes what the head looks for: logits peak + spread * gaps for successors of a noiseless code."""
        halves, language = self._halves, self._language
        identity = torch.eye(SUCCESSORS, device=self._embed.device)
        codes = self._embed[: self._shared, halves.own]
        for start in range(0, self._shared, 8192):
            before = language.predecessors[:, start : start + 8192]
            vectors = codes[before].float() / SCALE  # [SUCCESSORS, tokens, size]
            wanted = (1 + spread / self.peak * language.gaps.gather(1, before)).clamp(min=0.0)
            gram = torch.einsum("itd,jtd->tij", vectors, vectors) / halves.size
            mix = torch.linalg.solve(gram + 1e-4 * identity, wanted.T / math.sqrt(SUCCESSORS))
            found = (torch.einsum("tj,jtd->td", mix, vectors) * SCALE * READ).to(self._embed.dtype)
            self._embed[start : start + len(found), halves.read] = found
            self._head[start : start + len(found), halves.read] = found

    def settle(self, text: Tensor, skip: int) -> Tensor:
        """Scales noise and logits to what was asked for.

        Args:
            text: int64 [rows, length] of the language. skip: positions at the start that are not counted.

        Returns:
            [rows * (length - skip), hidden]: what the head gets after each of those tokens.
        """
        text = text.to(self._embed.device)
        ids = text[:, skip:].flatten()
        codes, looked_for = (self._embed[ids, part].float() for part in (self._halves.own, self._halves.read))
        length = SCALE * READ * math.sqrt(self._halves.size / SUCCESSORS)  # of a row of the head
        for turn in range(TURNS):
            states = torch.cat([self._body(row[None]).last_hidden_state[0, skip:] for row in text]).float()
            read = states[:, self._halves.read]
            moved, kept = _along(read, codes), _along(read, looked_for)
            gain = self.peak * math.sqrt(SUCCESSORS) / READ / (moved * codes.square().sum(-1, keepdim=True)).mean()
            self._body.norm.weight.mul_(gain)
            self.noise = float(gain * (read - moved * codes).std() * length)
            off = self._noise / self.noise
            if turn == TURNS - 1 or (turn >= WHOLE_TURNS and 1 / NEAR < off < NEAR):
                break
            # where few layers share the noise, a whole step overshoots: the norms see less of all else
            step = 1.0 if turn < WHOLE_TURNS else 0.5
            self._rescale(off**step, max(0.1, float(1 + kept.mean() / moved.mean())) ** step)
        return (states * gain).to(self._head.dtype)

    def _rescale(self, noise: float, shift: float) -> None:
        """Factors on the noise of every layer, and on what moves the code."""
        for index, layer in enumerate(self._body.layers):
            layer.self_attn.o_proj.weight *= noise
            planted = 4 * self._halves.size if index == 0 else 0
            layer.mlp.down_proj.weight[:, :planted] *= shift
            layer.mlp.down_proj.weight[:, planted:] *= noise

    def picks(self, states: Tensor) -> Tensor:
        """The largest logit's id [n] after each of the final states [n, hidden]."""
        head = self._head.float().T  # as fastspec has logits: rounded to 16 bits, close ones would be equal
        return torch.cat([(rows.float() @ head).argmax(-1) for rows in states.split(256)])


@dataclass(frozen=True, slots=True, eq=False)
class PlantedPair:
    """Live models with a language in common.

    Attributes:
        target, draft: transformers models.
        language: what they have in common.
        report: how they were made and what was found: JSON-ready.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    language: Language
    report: dict[str, Any]

    def prompts(self, rows: int, length: int, seed: int = 0) -> list[list[int]]:
        """Text of the planted law."""
        text = self.language.text(rows, length, spread=self.report["spread"], seed=1000 + seed)
        return cast("list[list[int]]", text.tolist())

    def save(self, directory: Path, *, max_shard_size: str = "5GB") -> tuple[Path, Path]:
        """Writes both as checkpoints that AutoModelForCausalLM.from_pretrained reads; returns their directories."""
        places = directory / "target", directory / "draft"
        for model, place in zip((self.target, self.draft), places, strict=True):
            model.save_pretrained(place, max_shard_size=max_shard_size)
        return places


def plant(
    workload: Workload,
    *,
    acceptance: float = 0.78,
    noise: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> PlantedPair:
    """Makes a pair.

    Args:
        workload: the shapes.
        acceptance: wanted share of places at which both models' largest logits are the same token's, in text of the
            planted language; so also that of greedy drafts accepted, given that those before were.
        noise: how far contexts move logits, in the models' own units: 1 makes about as many sampled drafts fail.
        seed: another one gives another pair.
        device, dtype: of the models. Default dtype: the workload's.

    Raises:
        ValueError: the acceptance is not between 0.3 and 0.98, or these shapes do not reach it, or a model's MLP has no
            room for the language.
    """
    if not 0.3 <= acceptance <= 0.98:
        raise ValueError(f"acceptance={acceptance}, wanted 0.3 to 0.98")
    start = time.perf_counter()
    configs = [workload.config(role) for role in ("target", "draft")]
    for config in configs:
        if config.intermediate_size < 4 * Halves.of(config.hidden_size).size:
            raise ValueError(f"intermediate_size={config.intermediate_size} is less than twice {config.hidden_size}")
    language = Language.draw(min(config.vocab_size for config in configs), seed)
    with torch.no_grad():
        pair = [
            Planted(unplanted(config, dtype or workload.dtype, device), language, noise=noise, seed=seed + number)
            for number, config in enumerate(configs, start=1)
        ]
        spread, agreement = _find_spread(pair, language, acceptance, torch.device(device).type, seed)
    if abs(agreement - acceptance) > REACHED:
        found = " and ".join(f"{planted.noise:.2f}" for planted in pair)
        raise ValueError(
            f"acceptance={acceptance} is out of reach of these shapes, which came to {agreement:.2f}; noise {found}, "
            f"wanted {noise:.2f}"
        )
    models = [planted.model for planted in pair]
    report = {
        "planted": workload.name,
        "acceptance_wanted": acceptance,
        "agreement": round(agreement, 3),
        "noise": [round(planted.noise, 2) for planted in pair],
        "spread": round(spread, 3),
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
    }
    return PlantedPair(models[0], models[1], language, report)


def unplanted(config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """A model of this shape with the random weights that transformers begins with; no token ends a text."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model.generation_config = GenerationConfig(do_sample=False, **ends)
    return model


def _find_spread(pair: list[Planted], language: Language, wanted: float, device: str, seed: int) -> tuple[float, float]:
    """The spread at which the models agree as often as wanted, and how often they then do."""
    rows, length, skip = CALIBRATION[device]
    guess = 2.0
    text = language.text(rows, length, spread=guess, seed=seed)

    def agreement(spread: float) -> float:
        picks = []
        for planted, states in zip(pair, ends, strict=True):
            planted.plant_head(spread)
            picks.append(planted.picks(states))
        return float((picks[0] == picks[1]).float().mean())

    for planted in pair:
        planted.plant_head(guess)
    ends = [planted.settle(text, skip) for planted in pair]
    low, high = 0.0, 12.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if agreement(middle) < wanted else (low, middle)
    found = (low + high) / 2
    return found, agreement(found)


def _along(vectors: Tensor, directions: Tensor) -> Tensor:
    """How much of each direction [n, d] is in its vector [n, d]: [n, 1]."""
    return (vectors * directions).sum(-1, keepdim=True) / directions.square().sum(-1, keepdim=True)
