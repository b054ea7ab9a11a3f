"""OpenAI's protocol through Ray Serve, real Ray: two replicas, one of which dies while it answers."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

ray = pytest.importorskip("ray", reason="runs with `make test-integrations`")
serve = pytest.importorskip("ray.serve", reason="runs with `make test-integrations`")

from fastspec import DeterministicProposer, FastSpecGenerator, UnsupportedOption, demo_pair  # noqa: E402
from fastspec.integrations.ray_serve import REPLICA_HEADER, deployment  # noqa: E402

TARGET, DRAFT = map(str, demo_pair())
GENERATOR = {"device": "cpu", "max_length": 128, "max_batch_size": 4}
PORT = 8123
DEADLY, HELD = "kill me(", "hold me("
TOKENS = 24


class Events(DeterministicProposer):
    """Drafts nothing. Kills its process, once a file, in the middle of an answer to a deadly prompt; waits for a file in
    that of a held one.
    """

    def __init__(self, folder: str, deadly: list[int], held: list[int]) -> None:
        self.folder, self.deadly, self.held = folder, deadly, held

    def guess(self, tokens: torch.Tensor, lengths: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        folder = Path(self.folder)
        for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
            for prompt, act in ((self.deadly, self._die), (self.held, self._wait)):
                if row[: len(prompt)] == prompt and length >= len(prompt) + TOKENS // 2:
                    act(folder)
        return tokens.new_zeros(len(tokens), k), torch.zeros_like(lengths)

    def _die(self, folder: Path) -> None:
        if (folder / "armed").exists():
            (folder / "armed").unlink()
            os._exit(1)

    def _wait(self, folder: Path) -> None:
        (folder / "held").touch()
        pause = threading.Event()
        while not (folder / "go").exists():
            pause.wait(0.02)
