"""MiMo: a Qwen2, whose checkpoints hold an MTP layer; transformers has no class of its own for it."""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.qwen2 import QWEN2

MIMO = replace(QWEN2, architecture="MiMoForCausalLM", read_as="qwen2")
