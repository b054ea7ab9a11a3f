"""A class with the methods of verl's `BaseRollout`, which generates rollouts with fastspec.

    class Rollout(fastspec.integrations.verl.Rollout, BaseRollout): ...

verl's `RolloutConfig` has sizes and sampling options. Its `engine_kwargs={"fastspec": {"draft": ..., ...}}` has the
draft and further arguments of `FastSpecGenerator`. The default of `verification` is "coupled": a text depends on its
seed, but not on the drafts. This module does not import verl. The methods take any objects with verl's fields.
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
# entries of sampling_params that are not read: log-probabilities are always returned, and a request has one answer
_IGNORED = ("logprobs", "n")


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One answer, with the fields of verl's class of this name.

    Attributes:
        token_ids: the new tokens.
        log_probs: log-probabilities of the tokens under the distribution from which they were sampled.
        stop_reason: "completed", or "aborted" if `abort_all_requests` ended the answer.
        routed_experts, num_preempted: None, because fastspec does not report them.
        extra_fields: has `weight_version`, the version of the weights that generated the answer.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: None = None
    stop_reason: str | None = None
    num_preempted: None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Rollout:
    """`FastSpecGenerator` with the methods of verl's `BaseRollout` and of verl's rollout servers.

    Args:
        config: verl's `RolloutConfig`, or an object or a dict with its fields.
        model_config: verl's `HFModelConfig`. Its `local_path` or `path` is the target.
        device_mesh: verl's device mesh. It is stored but not used: `tensor_parallel` in `engine_kwargs` says how many
            processes share the model.

    Raises:
        UnsupportedOption: tensor_model_parallel_size is not `tensor_parallel` of `engine_kwargs`.
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
        self._stale = False  # True if weights that an update brought were released, and no update followed

    async def resume(self, tags: list[str]) -> None:
        """Allocates the memory that `release` freed.

        "kv_cache" brings back K/V and the weights of the checkpoint. "weights" alone does nothing yet, because the next
        `update_weights` allocates the weights.

        Args:
            tags: some of "weights" and "kv_cache".

        Raises:
            ValueError: another tag.
            RuntimeError: "kv_cache" after released weights that came from an update. `update_weights` must come first.
        """
        if others := set(tags) - {_WEIGHTS, _CACHE}:
            raise ValueError(f"tags are {_WEIGHTS} and {_CACHE}, got {sorted(others)}")
        if _CACHE not in tags or self.generator.asleep is None:
            return
        if self._stale:
            raise RuntimeError("the weights were released; update_weights(...) comes before kv_cache")
        await asyncio.to_thread(self.generator.wake)

    async def release(self) -> None:
        """Frees the memory of weights and K/V. `update_weights` allocates both again."""
        if self.generator.asleep is None:
            await asyncio.to_thread(self.generator.sleep, 2)
            self._stale = self.generator.weight_version != 0

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], wire_format: str = "named_tensors", **kwargs: object
    ) -> None:
        """Replaces the weights after running requests have ended. New requests wait until then.

        Args:
            weights: (name, tensor) pairs. After `release` every tensor of the model must be there.
            wire_format: must be "named_tensors".
            **kwargs: `global_steps` is the version of the weights. `peft_config` is refused: merge adapters first.

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
        """Continues the prompts of a batch, with the tensors of verl's synchronous rollouts.

        Args:
            prompts: a `DataProto` whose batch has input_ids and attention_mask int64 [B, P], left-padded. Its meta_info
                has eos_token_id and pad_token_id. It may have do_sample, temperature, top_k, top_p,
                repetition_penalty and response_length. Otherwise the config's values are used.

        Returns:
            A `DataProto` with prompts [B, P], responses [B, R], input_ids, attention_mask and position_ids [B, P + R],
            and rollout_log_probs fp32 [B, R]. R is response_length, and responses are right-padded.
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
        """Continues one prompt. Several requests may run at the same time.

        Args:
            prompt_ids: token ids of the prompt.
            sampling_params: temperature, top_k (-1: all), top_p, repetition_penalty, max_tokens or max_new_tokens,
                stop_token_ids, seed, and further options of `FastSpecGenerator.submit`.
            request_id: name of the request. The seed is derived from it if sampling_params has no seed.
            **kwargs: other inputs of verl, such as images. Any that is not empty is refused.

        Raises:
            UnsupportedOption: an input other than token ids, or an option that `submit` does not have.
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
        """Frees the memory of weights and K/V, as `release` does."""
        await self.release()

    async def wake_up(self) -> None:
        """Allocates the memory of weights and K/V again; see `resume`."""
        await self.resume([_WEIGHTS, _CACHE])

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Ends all running answers with the tokens so far. New requests wait until `resume_generation` is called.

        Args:
            reject_request: must be False, because new requests wait here and are not rejected.

        Raises:
            UnsupportedOption: `reject_request` is True.
        """
        if reject_request:
            raise UnsupportedOption("reject_request is not supported: requests wait for resume_generation()")
        await asyncio.to_thread(self.generator.pause, abort=True)

    async def resume_generation(self) -> None:
        """Starts the requests that have waited since `abort_all_requests`."""
        self.generator.resume()

    async def clear_kv_cache(self) -> None:
        """Empties the prefix cache, which has K/V and recurrent states of earlier prompts."""
        await asyncio.to_thread(self.generator.reset_prefix_cache)

    def _sampling(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Returns options for `FastSpecGenerator.generate`, from `told` (a batch's meta_info) or from the config."""
        sampled = told.get("do_sample", _of(self.config, "do_sample"))
        if sampled is not None and not sampled:
            return {"do_sample": False}
        found = {name: told.get(name, _of(self.config, name)) for name in _SAMPLING}
        return _plain(found)

    def _seeds(self, rows: int) -> list[int]:
        """Returns a seed for each row. It depends on the config's seed and on the number of earlier calls."""
        self._calls += 1
        base = derive_seed(int(_of(self.config, "seed") or 0), self._calls, 0)
        return [derive_seed(base, row, 0) for row in range(rows)]

    def _seed_of(self, request: str) -> int:
        """Returns the seed of a request. It depends on the config's seed and on the end of the request's name."""
        number = int.from_bytes(request.encode()[-8:], "little") if request else self._seeds(1)[0]
        return derive_seed(int(_of(self.config, "seed") or 0), number, 1)


def padded(rows: list[list[Any]], width: int, fill: float, like: Tensor) -> Tensor:
    """Makes a tensor [B, width] from B lists, padded on the right with `fill`.

    It has the dtype and device of `like`.
    """
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=like.dtype, device=like.device)


def _plain(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Converts verl's sampling options to those of `FastSpecGenerator.generate`. verl's top_k of -1 becomes 0: all."""
    found = {name: value for name, value in asked.items() if value is not None}
    found["top_k"] = max(0, int(found.get("top_k", 0)))
    return {"do_sample": True, **found}


def _of(config: Any, name: str) -> Any:
    """Returns the field `name` of a config, which is a mapping or an object. None if there is no such field."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
