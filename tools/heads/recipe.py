"""Every number that training a head depends on, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained, on what, and how.

    Attributes:
        steps: Optimiser steps at most.
        seconds: Seconds of training at most; None: no limit. The rate then follows the time, too.
        batch_tokens: Tokens in a step.
        lr, warmup, weight_decay: Peak rate of AdamW, reached after `warmup` steps and left along a cosine; decay of the
            matrices.
        ema: Decay of the running mean of the weights, which is what is kept.
        unroll: Passes that training chains: the head reads the target's features in the first, its own in the others.
        least_weight: Weight of a place that drafting hardly reaches; one that it always reaches weighs 1.
        overlap_weight: Weight of minus the logarithm of the chance of acceptance, beside the cross entropy.
        greedy_temperature: A low temperature that stands for greedy decoding in that chance.
        intermediate: Width of the head's MLP; None is the target's.
        draft_vocab: Tokens that the head can draft, the most frequent ones; None is all.
        boundaries: Hidden states that the head reads, each by the number of target layers below it; None takes
            2, half of the layers, and 3 less than all.
        own_rows, own_length: Rows that the target writes, and tokens in one, its prompt included.
        own_prompts: Lengths of the corpus text such a row begins with, in turn.
        own_temperatures: Temperatures such rows are drawn at, in turn.
        own_batch: Rows that are written at a time.
        own_seconds: Seconds after which no more answers to prompts are written; None: no limit.
        real_rows, real_length: Rows of corpus text, and tokens in one.
        prompts, prompt_length, new_tokens: The held-out texts that measure acceptance, at each temperature.
        places: Tokens drafted in a step when acceptance is measured.
        dflash_layers: Layers of a DFlash head, whose block has `unroll` masks; None makes an EAGLE-3 head.
        mtp: Makes an MTP layer, which drafts again from its own state.
        mask_id: Token whose embedding stands for a mask of a DFlash head; None is the last of the vocabulary.
    """

    steps: int = 4000
    seconds: float | None = None
    batch_tokens: int = 16384
    lr: float = 2e-3
    warmup: int = 50
    weight_decay: float = 0.02
    ema: float = 0.998
    unroll: int = 5
    least_weight: float = 0.1
    overlap_weight: float = 0.5
    greedy_temperature: float = 0.4
    intermediate: int | None = None
    draft_vocab: int | None = None
    boundaries: tuple[int, ...] | None = None
    own_rows: int = 16384
    own_length: int = 384
    own_prompts: tuple[int, ...] = (16, 64, 128, 256)
    own_temperatures: tuple[float, ...] = (0.0, 0.0, 1.0, 0.7, 1.0)
    own_batch: int = 256
    own_seconds: float | None = None
    real_rows: int = 1024
    real_length: int = 1024
    prompts: int = 64
    prompt_length: int = 128
    new_tokens: int = 128
    places: int = 5
    dflash_layers: int | None = None
    mask_id: int | None = None
    mtp: bool = False


CONTINUED = Recipe(steps=1000, lr=2e-4, own_rows=4096)
"""The recipe with which a published head is trained further: fewer and smaller steps."""
