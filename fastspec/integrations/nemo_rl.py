"""A class with the methods of NeMo RL's `GenerationInterface`, which generates with fastspec.

    class Generation(fastspec.integrations.nemo_rl.Generation, GenerationInterface): ...

NeMo RL's `GenerationConfig` has the model and the sampling options. Its entry `fastspec_cfg` has the draft and further
arguments of `FastSpecGenerator`. The default of `verification` is "coupled": a text depends on its seed, but not on the
drafts. This module does not import NeMo RL. Batches are any mappings with its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastspec.errors import UnsupportedOption
from fastspec.generator import FastSpecGenerator
from fastspec.inputs.row_options import derive_seed
from fastspec.integrations.transfer import receive
from fastspec.output import GenerateOutput
from fastspec.sampling.rules import COUPLED

_ROWS = 64  # default of `max_batch_size`


class Generation:
    """`FastSpecGenerator` with the methods of NeMo RL's `GenerationInterface`.

    Args:
        config: NeMo RL's `GenerationConfig`. These fields are read: model_name, max_new_tokens, temperature, top_p,
            top_k, stop_token_ids, stop_strings, `_pad_token_id`, colocated, and `fastspec_cfg`.
        seed: number from which the seeds of all rollouts are derived.
    """

    def __init__(self, config: Mapping[str, Any], *, seed: int = 0) -> None:
        own = dict(config.get("fastspec_cfg") or {})
        options = {"verification": COUPLED, "max_batch_size": _ROWS, "progress": False, **own}
        self.cfg = config
        self.generator = FastSpecGenerator(config["model_name"], options.pop("draft", None), **options)
        self._seed, self._calls, self._closed = seed, 0, False
        self._names: frozenset[str] | None = None

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Any]:
        """Joins the process group of torch.distributed over which the trainer sends weights.

        The rank of this process is `train_world_size`, the first one after the trainer's ranks.

        Args:
            ip, port: address of the group's store.
            world_size: number of all processes, of trainer and generators.
            train_world_size: number of the trainer's processes. Rank 0 sends the weights.
        """
        backend = "nccl" if self.generator.device.type == "cuda" else "gloo"
        where = f"tcp://{ip}:{port}"
        dist.init_process_group(backend, init_method=where, rank=train_world_size, world_size=world_size)
        return []

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Continues the prompts of a batch.

        Args:
            data: a mapping with the prompts: input_ids int64 [B, T], right-padded, and input_lengths int64 [B].
            greedy: True to take the most probable tokens. False: tokens are sampled.

        Returns:
            A mapping of the same class, with these tensors:

            - output_ids int64 [B, T'], prompts with their answers, right-padded.
            - logprobs fp32 [B, T'], log-probabilities of the answers' tokens, and 0 elsewhere.
            - generation_lengths int64 [B], tokens of each answer.
            - unpadded_sequence_lengths int64 [B], tokens of each prompt and its answer.
            - truncated bool [B], True for an answer that did not end with a stop id or stop string.

        Raises:
            UnsupportedOption: the batch has stop strings for single rows.
        """
        if any(data.get("stop_strings") or ()):
            raise UnsupportedOption("stop_strings of single rows are not supported; give stop_strings of the config")
        ids, lengths, pad = data["input_ids"], data["input_lengths"], int(self.cfg.get("_pad_token_id") or 0)
        prompts = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
        self._calls += 1
        base = derive_seed(self._seed, self._calls, 0)
        output = self.generator.generate(
            prompts,
            return_dict_in_generate=True,
            max_new_tokens=int(self.cfg["max_new_tokens"]),
            logprobs=True,
            logprobs_mode="processed",
            seed=[derive_seed(base, row, 0) for row in range(len(prompts))],
            eos_token_id=list(self.cfg.get("stop_token_ids") or []),
            stop_strings=self.cfg.get("stop_strings"),
            pad_token_id=pad,
            **self._sampling(greedy),
        )
        assert isinstance(output, GenerateOutput)
        whole = [prompt + answer for prompt, answer in zip(prompts, output.new_tokens, strict=True)]
        values = [
            [0.0] * len(prompt) + logprobs for prompt, logprobs in zip(prompts, output.logprobs or [], strict=True)
        ]
        found: dict[str, Tensor] = {
            "output_ids": _padded(whole, pad, ids),
            "logprobs": _padded(values, 0.0, ids.to(torch.float32)),
            "generation_lengths": ids.new_tensor(list(map(len, output.new_tokens))),
            "unpadded_sequence_lengths": ids.new_tensor(list(map(len, whole))),
            "truncated": torch.tensor([reason != "stop" for reason in output.finish_reasons], device=ids.device),
        }
        return type(data)(found)

    def _sampling(self, greedy: bool) -> dict[str, Any]:
        """Returns the sampling options of the config, as `FastSpecGenerator.generate` names them."""
        if greedy:
            return {"do_sample": False}
        found = {name: self.cfg.get(name) for name in ("temperature", "top_p")}
        top_k = self.cfg.get("top_k")
        return {"do_sample": True, **found, "top_k": max(0, int(top_k)) if top_k is not None else 0}

    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """Wakes the generator if it sleeps, so that it has the memory for K/V and buffers again."""
        if self.generator.asleep is not None:
            self.generator.wake()
        return True

    def finish_generation(self, *args: object, release_gpu: bool = True, **kwargs: object) -> bool:
        """Frees the memory of K/V and buffers if the trainer shares the GPU. Weights stay for updates."""
        if self.blocks_training() and release_gpu and self.generator.asleep is None:
            self.generator.sleep(1)
        return True

    def shutdown(self) -> bool:
        """Closes the generator. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.generator.close()
        return True

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """Stores the names of the tensors that updates of weights will have. An update with other names is refused."""
        self._names = frozenset(state_dict_info)

    def update_weights_from_collective(self) -> list[Any]:
        """Receives new weights, which the trainer's rank 0 sends with `fastspec.integrations.transfer.send`.

        Raises:
            UnsupportedOption: the names are not those of `prepare_refit_info`. Nothing has changed then.
            CheckpointError: see `FastSpecGenerator.update_weights`.
            RuntimeError: the generator sleeps. Call `prepare_for_generation` first.
        """
        tensors = dict(receive(device=self.generator.device))
        if self._names is not None and tensors.keys() != self._names:
            differ = sorted(self._names ^ tensors.keys())[:3]
            raise UnsupportedOption(f"the trainer sent other tensors than prepare_refit_info had: {', '.join(differ)}")
        self.generator.update_weights(tensors)
        return []

    def invalidate_kv_cache(self) -> bool:
        """Empties the prefix cache, which has K/V and recurrent states of earlier prompts."""
        self.generator.reset_prefix_cache()
        return True

    def pause_generation(self, *, clear_cache: bool) -> bool:
        """Returns False, because running answers cannot be paused. `FastSpecGenerator.pause` waits until they end."""
        return False

    def resume_generation(self) -> bool:
        """Returns False, because `pause_generation` does not pause."""
        return False

    @property
    def requires_kv_scale_sync(self) -> bool:
        """False, because scales of K and V come from the checkpoint and do not change in training."""
        return False

    def blocks_training(self) -> bool:
        """True if the trainer shares the GPU (`colocated`)."""
        return bool((self.cfg.get("colocated") or {}).get("enabled"))


def _padded(rows: list[list[Any]], fill: float, like: Tensor) -> Tensor:
    """Makes a tensor [B, T] from B lists, padded on the right with `fill` to the longest, T.

    It has the dtype and device of `like`.
    """
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=like.dtype, device=like.device)
