"""Generation of NeMo RL's `GenerationInterface` shape by fastspec: its methods and tensors.

    class Generation(fastspec.integrations.nemo_rl.Generation, GenerationInterface): ...

NeMo RL's `GenerationConfig` gives model and sampling; its entry `fastspec_cfg` has a draft and further arguments of
`FastSpecGenerator`. Verification is "coupled" unless it says otherwise: a text depends on its seed, not on the drafts.
Needs nothing of NeMo RL itself: batches are any mappings with its fields.
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

_ROWS = 64  # decoded at once, where `fastspec_cfg` does not say


class Generation:
    """A generator with the methods of NeMo RL's `GenerationInterface`.

    Args:
        config: NeMo RL's `GenerationConfig`: model_name, max_new_tokens, temperature, top_p, top_k, stop_token_ids,
            `_pad_token_id`, colocated, and `fastspec_cfg`.
        seed: seed of all rollouts.
    """

    def __init__(self, config: Mapping[str, Any], *, seed: int = 0) -> None:
        own = dict(config.get("fastspec_cfg") or {})
        options = {"verification": COUPLED, "max_batch_size": _ROWS, "progress": False, **own}
        self.cfg = config
        self.generator = FastSpecGenerator(config["model_name"], options.pop("draft", None), **options)
        self._seed, self._calls, self._closed = seed, 0, False
        self._names: frozenset[str] | None = None

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Any]:
        """Joins the group of torch.distributed over which weights come, as the first process after the trainer's.

        Args:
            ip, port: address of the group's store.
            world_size: processes of trainer and generators.
            train_world_size: processes of the trainer; process 0 sends.
        """
        backend = "nccl" if self.generator.device.type == "cuda" else "gloo"
        where = f"tcp://{ip}:{port}"
        dist.init_process_group(backend, init_method=where, rank=train_world_size, world_size=world_size)
        return []

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Continues a batch.

        Args:
            data: a mapping with input_ids int64 [B, T], right-padded, and input_lengths int64 [B].
            greedy: take the most probable tokens.

        Returns:
            A mapping of the same class with output_ids [B, T'], and logprobs fp32 [B, T'] of the answers, right-padded;
            generation_lengths and unpadded_sequence_lengths int64 [B]; truncated bool [B], True for a row without a
            stop id.

        Raises:
            UnsupportedOption: stop strings of single rows.
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
        """Returns options of `generate`."""
        if greedy:
            return {"do_sample": False}
        found = {name: self.cfg.get(name) for name in ("temperature", "top_p")}
        top_k = self.cfg.get("top_k")
        return {"do_sample": True, **found, "top_k": max(0, int(top_k)) if top_k is not None else 0}

    def prepare_for_generation(self, *args: object, **kwargs: object) -> bool:
        """Wakes the generator, if it sleeps."""
        if self.generator.asleep is not None:
            self.generator.wake()
        return True

    def finish_generation(self, *args: object, release_gpu: bool = True, **kwargs: object) -> bool:
        """Gives K/V and buffers back if the trainer shares the GPU. Weights stay, for updates meanwhile need them."""
        if self.blocks_training() and release_gpu and self.generator.asleep is None:
            self.generator.sleep(1)
        return True

    def shutdown(self) -> bool:
        """Closes the generator; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.generator.close()
        return True

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """Takes the names of the tensors that will come. A later update with others is refused."""
        self._names = frozenset(state_dict_info)

    def update_weights_from_collective(self) -> list[Any]:
        """Receives weights that the trainer's process 0 sends by `fastspec.integrations.transfer.send`.

        Raises:
            UnsupportedOption: other names than `prepare_refit_info` had; nothing has changed.
            CheckpointError: see `FastSpecGenerator.update_weights`.
            RuntimeError: the generator sleeps: `prepare_for_generation` comes before.
        """
        tensors = dict(receive(device=self.generator.device))
        if self._names is not None and tensors.keys() != self._names:
            differ = sorted(self._names ^ tensors.keys())[:3]
            raise UnsupportedOption(f"the trainer sent other tensors than prepare_refit_info had: {', '.join(differ)}")
        self.generator.update_weights(tensors)
        return []

    def invalidate_kv_cache(self) -> bool:
        """Drops K/V and states of earlier prompts."""
        self.generator.reset_prefix_cache()
        return True

    def pause_generation(self, *, clear_cache: bool) -> bool:
        """Returns False: answers are not kept while weights change; `FastSpecGenerator.pause` waits for them."""
        return False

    def resume_generation(self) -> bool:
        """Returns False, see `pause_generation`."""
        return False

    @property
    def requires_kv_scale_sync(self) -> bool:
        """False: scales of K and V are the checkpoint's."""
        return False

    def blocks_training(self) -> bool:
        """True if the trainer shares the GPU (`colocated`)."""
        return bool((self.cfg.get("colocated") or {}).get("enabled"))


def _padded(rows: list[list[Any]], fill: float, like: Tensor) -> Tensor:
    """Returns rows as a tensor [B, T] of the dtype and device of `like`, padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=like.dtype, device=like.device)
