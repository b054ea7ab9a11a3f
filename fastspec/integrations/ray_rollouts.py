"""Rollouts by Ray actors that get new weights from a trainer over torch.distributed: `ray.remote(RolloutReplica)`.

    replicas = [ray.remote(num_gpus=1)(RolloutReplica).remote(target, draft, max_length=4096) for _ in range(4)]
    joined = [each.join.remote("tcp://10.0.0.1:29500", rank, 5) for rank, each in enumerate(replicas, 1)]
    torch.distributed.init_process_group("nccl", init_method="tcp://10.0.0.1:29500", rank=0, world_size=5)
    ray.get(joined)

    updated = [each.update_weights.remote(version=step) for each in replicas]
    send(model.state_dict().items())  # of fastspec.integrations.transfer
    ray.get(updated)

The class does not import Ray, and works in any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fastspec.generator import FastSpecGenerator
from fastspec.integrations.transfer import receive
from fastspec.output import GenerateOutput
from fastspec.sampling.rules import COUPLED


class RolloutReplica:
    """One generator for rollouts, whose weights a trainer replaces.

    Args:
        target, draft: directories or Hub ids that the actor's machine can read.
        **options: further arguments of `FastSpecGenerator`. The default of `verification` is "coupled" here: a text
            depends on its seed, but not on the drafts or on the replica.
    """

    def __init__(self, target: str, draft: str | None = None, **options: object) -> None:
        arguments: dict[str, Any] = {"verification": COUPLED, "progress": False, **options}
        self._generator = FastSpecGenerator(target, draft, **arguments)

    def join(self, where: str, rank: int, size: int) -> None:
        """Joins the trainer's process group. Returns when all processes have joined.

        Args:
            where: address of the group's store, such as "tcp://10.0.0.1:29500".
            rank: number of this process. The trainer is 0.
            size: number of all processes.
        """
        backend = "nccl" if self._generator.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=size)

    def update_weights(self, version: int | str | None = None) -> None:
        """Waits until running answers have ended, then receives the weights that the trainer sends with `send`.

        Args:
            version: version of the new weights; see `FastSpecGenerator.update_weights`.
        """
        generator = self._generator
        tensors = receive(device=generator.device)
        if generator.asleep == 2:
            generator.wake(dict(tensors), version=version)
            return
        generator.pause()
        try:
            generator.update_weights(tensors, version=version)
        finally:
            generator.resume()

    def generate(self, prompts: Sequence[Sequence[int]], **options: object) -> dict[str, object]:
        """Continues prompts.

        Args:
            prompts: token ids of each prompt.
            **options: options of `FastSpecGenerator.generate`.

        Returns:
            Lists with an entry for each answer: token_ids, logprobs under the distribution from which they were
            sampled, and finish_reasons. Also weight_version, the version of the weights.
        """
        asked: dict[str, Any] = {"logprobs": True, "logprobs_mode": "processed", **options}
        asked["return_dict_in_generate"] = True
        output = self._generator.generate([list(prompt) for prompt in prompts], **asked)
        assert isinstance(output, GenerateOutput)
        return {
            "token_ids": output.new_tokens,
            "logprobs": output.logprobs,
            "finish_reasons": output.finish_reasons,
            "weight_version": output.stats.weight_version,
        }

    def sleep(self, level: int = 1) -> None:
        """Frees memory, see `FastSpecGenerator.sleep`. After level 2, `update_weights` allocates everything again."""
        self._generator.sleep(level)

    def wake(self) -> None:
        """Allocates the memory that `sleep` freed; see `FastSpecGenerator.wake`."""
        self._generator.wake()
