"""Rollouts of verl's `BaseRollout` shape by fastspec: the methods and tensors that verl's own rollouts have.

    class Rollout(fastspec.integrations.verl.Rollout, BaseRollout): ...

verl's `RolloutConfig` gives sizes and sampling. Its `engine_kwargs={"fastspec": {"draft": ..., ...}}` has a draft and
further arguments of `FastSpecGenerator`. Verification is "coupled" unless it says otherwise: a text depends on its
seed, not on the drafts. Needs nothing of verl itself: the methods take any objects with verl's fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import UnsupportedOption
from fastspec.generator import FastSpecGenerator
from fastspec.inputs.row_options import derive_seed
from fastspec.output import GenerateOutput
from fastspec.sampling.rules import COUPLED

_WEIGHTS, _CACHE = "weights", "kv_cache"
_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
_IGNORED = ("logprobs", "n")  # of sampling_params: log-probabilities always come, and a request has one answer


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """An answer, with the fields of verl's class of this name.

    Attributes:
        token_ids: the new tokens.
        log_probs: their log-probabilities under the distribution that they were sampled from.
        stop_reason: "completed", or "aborted" by `abort_all_requests`.
        routed_experts, num_preempted: None.
        extra_fields: `weight_version`, the version of the weights that drew it.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: None = None
    stop_reason: str | None = None
    num_preempted: None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Rollout:
    """A generator with the methods of verl's `BaseRollout` and of its servers.

    Args:
        config: verl's `RolloutConfig`, or an object or a dict with its fields.
        model_config: verl's `HFModelConfig`: its `local_path` or `path` is the target.
        device_mesh: verl's mesh. fastspec shares a model by `tensor_parallel` of `engine_kwargs` instead.

    Raises:
        UnsupportedOption: tensor_model_parallel_size is not that of `engine_kwargs`.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any = None, *args: object, **kwargs: object
    ) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh
        own = dict((_of(config, "engine_kwargs") or {}).get("fastspec") or {})
        ranks = int(_of(config, "tensor_model_parallel_size") or 1)
        if ranks != int(own.get("tensor_parallel") or 1):
            raise UnsupportedOption(
                f"tensor_model_parallel_size={ranks} needs engine_kwargs fastspec.tensor_parallel={ranks} in {ranks} "
                "processes; set it, or use 1"
            )
        target = _of(model_config, "local_path") or _of(model_config, "path")
        length = _of(config, "max_model_len") or int(_of(config, "prompt_length")) + int(_of(config, "response_length"))
        sizes = {"max_length": int(length), "max_batch_size": min(int(_of(config, "max_num_seqs") or 64), 256)}
        options = {"verification": COUPLED, "dtype": _of(config, "dtype"), "progress": False, **sizes, **own}
        self.generator = FastSpecGenerator(target, options.pop("draft", None), **options)
        self._calls = 0
        self._stale = False  # True if the weights of the last update were released

    async def resume(self, tags: list[str]) -> None:
        """Takes memory again: weights with the next `update_weights`, and all of it with "kv_cache".

        Raises:
            ValueError: another tag.
            RuntimeError: "kv_cache" while the weights of an earlier update are released.
        """
        if others := set(tags) - {_WEIGHTS, _CACHE}:
            raise ValueError(f"tags are {_WEIGHTS} and {_CACHE}, got {sorted(others)}")
        if _CACHE not in tags or self.generator.asleep is None:
            return
        if self._stale:
            raise RuntimeError("the weights were released; update_weights(...) comes before kv_cache")
        await asyncio.to_thread(self.generator.wake)

    async def release(self) -> None:
        """Gives the memory of weights and K/V back. `update_weights` brings both again."""
        if self.generator.asleep is None:
            await asyncio.to_thread(self.generator.sleep, 2)
            self._stale = self.generator.weight_version != 0

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], wire_format: str = "named_tensors", **kwargs: object
    ) -> None:
        """Replaces the weights, between two requests. Requests that come meanwhile wait.

        Args:
            weights: (name, tensor) pairs, all of them after `release`.
            wire_format: "named_tensors".
            **kwargs: `global_steps` names the weights. `peft_config` is refused: merge adapters before.

        Raises:
            UnsupportedOption: another wire format, or adapters.
            CheckpointError: see `FastSpecGenerator.update_weights`.
        """
        if wire_format != "named_tensors":
            raise UnsupportedOption(f"wire_format={wire_format!r} is not supported; send named_tensors")
        if kwargs.get("peft_config") is not None:
            raise UnsupportedOption("peft_config is not supported: merge the adapter into the weights before")
        await asyncio.to_thread(self._update, weights, kwargs.get("global_steps"))

    def _update(self, weights: Iterable[tuple[str, Tensor]], version: Any) -> None:
        generator = self.generator
        if generator.asleep == 2:
            generator.wake(dict(weights), version=version)
        else:
            paused = generator.paused
            generator.pause()
            try:
                generator.update_weights(weights, version=version)
            finally:
                if not paused:
                    generator.resume()
        self._stale = False

    def generate_sequences(self, prompts: Any) -> Any:
        """Continues a batch, as verl's synchronous rollouts do.

        Args:
            prompts: a `DataProto` whose batch has input_ids and attention_mask int64 [B, P], left-padded. meta_info has
                eos_token_id and pad_token_id, and may have do_sample, temperature, top_k, top_p and response_length.

        Returns:
            A `DataProto` with prompts [B, P], responses [B, R], input_ids, attention_mask and position_ids [B, P + R],
            and rollout_log_probs fp32 [B, R]; R is response_length.
        """
        batch, told = prompts.batch, prompts.meta_info
        ids, mask = batch["input_ids"], batch["attention_mask"]
        new, pad = int(told.get("response_length") or _of(self.config, "response_length")), told["pad_token_id"]
        sampling = self._sampling(told)
        output = self.generator.generate(
            ids,
            mask,
            return_dict_in_generate=True,
            max_new_tokens=new,
            logprobs=True,
            logprobs_mode="processed",
            seed=self._seeds(len(ids)),
            eos_token_id=told["eos_token_id"],
            pad_token_id=pad,
            **sampling,
        )
        assert isinstance(output, GenerateOutput)
        responses = padded(output.new_tokens, new, pad, ids)
        answered = padded([[1] * len(row) for row in output.new_tokens], new, 0, mask)
        whole = torch.cat((mask, answered), dim=1)
        tensors = {
            "prompts": ids,
            "responses": responses,
            "input_ids": torch.cat((ids, responses), dim=1),
            "attention_mask": whole,
            "position_ids": (whole.cumsum(dim=1) - 1).clamp_min(0),
            "rollout_log_probs": padded(output.logprobs or [], new, 0.0, ids.to(torch.float32)),
        }
        return type(prompts).from_dict(tensors=tensors, meta_info={"weight_version": output.stats.weight_version})

    async def generate(
        self, prompt_ids: list[int], sampling_params: Mapping[str, Any], request_id: str = "", **kwargs: object
    ) -> TokenOutput:
        """Continues one prompt beside others.

        Args:
            prompt_ids: token ids.
            sampling_params: temperature, top_k (-1: all), top_p, repetition_penalty, max_tokens or max_new_tokens, stop
                ids as stop_token_ids.
            request_id: gives the seed, if sampling_params has none.
            **kwargs: images and the like, which are refused.

        Raises:
            UnsupportedOption: an option that `generate` does not have.
        """
        if given := [name for name, value in kwargs.items() if value]:
            raise UnsupportedOption(f"{given[0]} is not supported: prompts are token ids alone")
        asked = {name: value for name, value in sampling_params.items() if name not in _IGNORED}
        limits = [asked.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        room = self.generator.max_length - len(prompt_ids)
        new = next((int(limit) for limit in limits if limit), None) or int(_of(self.config, "response_length"))
        stops = asked.pop("stop_token_ids", None)
        options: dict[str, Any] = {"max_new_tokens": max(1, min(new, room)), **_plain(asked)}
        if stops is not None:
            options["eos_token_id"] = list(stops)
        seed = options.pop("seed", None)
        options["seed"] = seed if seed is not None else self._seed_of(request_id)
        handle = self.generator.submit(prompt_ids, logprobs=True, logprobs_mode="processed", **options)
        output = await handle
        reason = "aborted" if output.finish_reasons[0] == "cancelled" else "completed"
        version = {"weight_version": output.stats.weight_version}
        return TokenOutput(output.new_tokens[0], (output.logprobs or [[]])[0], stop_reason=reason, extra_fields=version)

    async def sleep(self) -> None:
        """See `release`."""
        await self.release()

    async def wake_up(self) -> None:
        """See `resume`."""
        await self.resume([_WEIGHTS, _CACHE])

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Ends all answers with the tokens that they have, and lets new requests wait for `resume_generation`.

        Raises:
            UnsupportedOption: reject_request, because requests wait here.
        """
        if reject_request:
            raise UnsupportedOption("reject_request is not supported: requests wait for resume_generation()")
        await asyncio.to_thread(self.generator.pause, abort=True)

    async def resume_generation(self) -> None:
        """Lets the waiting requests go on."""
        self.generator.resume()

    async def clear_kv_cache(self) -> None:
        """Drops K/V and states of earlier prompts."""
        await asyncio.to_thread(self.generator.reset_prefix_cache)

    def _sampling(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Returns options of `generate` by `meta_info`, and else by the config."""
        sampled = told.get("do_sample", _of(self.config, "do_sample"))
        if sampled is not None and not sampled:
            return {"do_sample": False}
        found = {name: told.get(name, _of(self.config, name)) for name in _SAMPLING}
        return _plain(found)

    def _seeds(self, rows: int) -> list[int]:
        """Returns a seed for each row, by the config's seed and the number of the call."""
        self._calls += 1
        base = derive_seed(int(_of(self.config, "seed") or 0), self._calls, 0)
        return [derive_seed(base, row, 0) for row in range(rows)]

    def _seed_of(self, request: str) -> int:
        """Returns the seed of a request."""
        number = int.from_bytes(request.encode()[-8:], "little") if request else self._seeds(1)[0]
        return derive_seed(int(_of(self.config, "seed") or 0), number, 1)


def padded(rows: list[list[Any]], width: int, fill: float, like: Tensor) -> Tensor:
    """Returns rows as a tensor [B, width] of the dtype and device of `like`, padded on the right."""
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=like.dtype, device=like.device)


def _plain(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sampling options of `generate`; verl writes top_k = -1 for all ids."""
    found = {name: value for name, value in asked.items() if value is not None}
    found["top_k"] = max(0, int(found.get("top_k", 0)))
    return {"do_sample": True, **found}


def _of(config: Any, name: str) -> Any:
    """Returns a field of a config, or None."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
