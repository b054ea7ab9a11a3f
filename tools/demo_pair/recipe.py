"""Every number the training depends on, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from .model import Shape


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of optimisation.

    Attributes:
        steps: Optimiser steps planned.
        batch: Rows of real text in a step.
        lr: Peak learning rate; it warms up, then falls along a cosine.
        weight_decay: Of the matrices.
        warmup: Steps until the peak.
        ema: Decay of the running mean of the weights, which is what is measured and kept.
        evaluations: Times the validation loss is read, evenly spaced.
        patience: Readings without a new best after which the phase ends early.
    """

    steps: int
    batch: int
    lr: float
    weight_decay: float
    warmup: int = 100
    ema: float = 0.998
    evaluations: int = 15
    patience: int = 3


TARGET = Shape(layers=8, hidden=256, heads=4, kv_heads=2, mlp=768)
DRAFT = Shape(layers=2, hidden=128, heads=2, kv_heads=1, mlp=384)
LEARN = Phase(steps=6500, batch=32, lr=2e-3, weight_decay=1.5)
UNLOOP = Phase(steps=200, batch=16, lr=3e-4, weight_decay=0.1, warmup=10, ema=0.9, evaluations=5)
DISTIL = Phase(steps=6500, batch=16, lr=5e-3, weight_decay=0.02, evaluations=8)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained, and how.

    Attributes:
        vocab_size: Tokens of the byte-level BPE, the end of text among them.
        context: Positions of both models and length of a training row.
        dropout: Of the target while it trains; the draft has none.
        test_share: Share of the test files that one pass over the corpus reads.
        target, draft: The sizes of the two.
        learn, unloop, distil: The three phases, in order.
        unloop_weight: Weight of the loss on repeats beside the loss on real text.
        unloop_rows, unloop_refresh: Rows written at a time to look for repeats; steps that use them up.
        greedy_repeats: Share of greedy text in repeated 8-grams that unlooping aims at.
        own_rows, own_length: Rows that the target writes for the draft, and tokens in one, its prompt included.
        own_chunk, own_batch: Rows written at a time; rows in a step.
        own_prompts: Lengths of the real text that such a row begins with.
        own_temperatures: Temperatures that such rows are drawn at.
        overlap_weight: Weight of the overlap of the two laws beside their divergence, in the draft's loss.
        overlap_temperatures: Temperatures it is taken at; a low one stands for greedy decoding.
        prompts, prompt_length, new_tokens: The rollouts that measure acceptance.
        compiled: Whether training steps go through torch.compile.
        max_files: Files kept in each part of the corpus; None keeps all.
    """

    vocab_size: int = 4096
    context: int = 1024
    dropout: float = 0.1
    test_share: float = 0.75
    target: Shape = TARGET
    draft: Shape = DRAFT
    learn: Phase = LEARN
    unloop: Phase = UNLOOP
    distil: Phase = DISTIL
    unloop_weight: float = 0.5
    unloop_rows: int = 1024
    unloop_refresh: int = 8
    greedy_repeats: float = 0.72
    own_rows: int = 32768
    own_length: int = 384
    own_chunk: int = 4096
    own_batch: int = 112
    own_prompts: tuple[int, ...] = (16, 64, 128, 256)
    own_temperatures: tuple[float, ...] = (0.0, 0.0, 0.6, 0.8, 1.0)
    overlap_weight: float = 0.5
    overlap_temperatures: tuple[float, ...] = (0.4, 0.8)
    prompts: int = 128
    prompt_length: int = 128
    new_tokens: int = 128
    compiled: bool = True
    max_files: int | None = None


def smoke_recipe() -> Recipe:
    """Returns a recipe that runs every part of the pipeline in seconds on a CPU and learns nothing much."""
    brief = Phase(steps=6, batch=4, lr=2e-3, weight_decay=0.1, warmup=2, evaluations=2)
    return Recipe(
        vocab_size=384,
        context=128,
        target=Shape(layers=2, hidden=32, heads=2, kv_heads=1, mlp=64),
        draft=Shape(layers=1, hidden=16, heads=2, kv_heads=1, mlp=32),
        learn=brief,
        unloop=brief,
        distil=brief,
        unloop_rows=16,
        unloop_refresh=2,
        own_rows=32,
        own_batch=4,
        own_length=64,
        own_chunk=16,
        own_prompts=(8, 16),
        prompts=4,
        prompt_length=16,
        new_tokens=24,
        compiled=False,
        max_files=24,
    )
