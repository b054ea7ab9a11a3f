"""Rollouts of verl's and NeMo RL's shape: their tensors, updates, sleep; the same with and without drafts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastspec import FastSpecGenerator, UnsupportedOption, demo_pair
from fastspec.integrations.nemo_rl import Generation
from fastspec.integrations.verl import Rollout

TARGET, DRAFT = map(str, demo_pair())
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
NEW = 10
pytestmark = pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning")


class Proto:
    """What the adapter uses of verl's DataProto."""

    def __init__(self, batch: dict[str, torch.Tensor], meta_info: dict[str, Any]) -> None:
        self.batch, self.meta_info = batch, meta_info

    @classmethod
    def from_dict(cls, tensors: dict[str, torch.Tensor], meta_info: dict[str, Any]) -> Proto:
        return cls(tensors, meta_info)


def config(**more: Any) -> Any:
    fields = {"prompt_length": 6, "response_length": NEW, "max_model_len": 64, "max_num_seqs": 3, "dtype": "float32"}
    sampling = {"temperature": 0.8, "top_k": -1, "top_p": 0.95, "do_sample": True, "seed": 4}
    return SimpleNamespace(**{**fields, **sampling, "engine_kwargs": {"fastspec": {"draft": DRAFT}}, **more})


@pytest.fixture
def rollout() -> Iterator[Rollout]:
    made = Rollout(config(), SimpleNamespace(path=TARGET))
    yield made
    made.generator.close()


def batch() -> Proto:
    ids = torch.tensor([[0] * (6 - len(row)) + row for row in PROMPTS])
    return Proto({"input_ids": ids, "attention_mask": (ids != 0).long()}, {"eos_token_id": [2], "pad_token_id": 0})


def changed() -> dict[str, torch.Tensor]:
    state = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).state_dict()
    return {name: each * 1.2 if "down_proj" in name else each for name, each in state.items()}


def test_a_batch_of_verl(rollout: Rollout) -> None:
    """Padded tensors of verl's names; log-probabilities are those of the sampled distribution."""
    found = rollout.generate_sequences(batch()).batch
    assert found["responses"].shape == (3, NEW)
    assert torch.equal(found["input_ids"], torch.cat((batch().batch["input_ids"], found["responses"]), dim=1))
    whole = found["attention_mask"].sum(dim=1).tolist()
    rows = [
        row[6 - len(prompt) : 6 - len(prompt) + size].tolist()
        for row, prompt, size in zip(found["input_ids"], PROMPTS, whole, strict=True)
    ]
    law = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95, "logprobs_mode": "processed"}
    scores = rollout.generator.score(rows, lengths=[len(row) for row in PROMPTS], eos_token_id=[2], **law)  # type: ignore[arg-type]
    for values, wanted in zip(found["rollout_log_probs"], scores.logprobs, strict=True):
        assert torch.equal(values[: len(wanted)], torch.tensor(wanted))
    assert found["position_ids"][1, 4:7].tolist() == [0, 1, 2]


def test_drafts_change_no_rollout() -> None:
    """More rows than are decoded at once; every k, and none."""
    texts = []
    for own in ({"draft": DRAFT}, {"draft": DRAFT, "num_speculative_tokens": 2}, {"num_speculative_tokens": 0}):
        options = {"max_length": 64, "max_batch_size": 3, "dtype": "float32", "progress": False, **own}
        draft = options.pop("draft", None)
        with FastSpecGenerator(TARGET, draft, verification="coupled", **options) as generator:
            found = generator.generate(
                PROMPTS,
                max_new_tokens=12,
                do_sample=True,
                top_p=0.9,
                num_return_sequences=3,
                seed=7,
                logprobs=True,
                logprobs_mode="processed",
                return_dict_in_generate=True,
            )
            texts.append((found.new_tokens, found.logprobs, found.finish_reasons))
    assert len(texts[0][0]) == 9
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.integration
def test_verl_updates_and_releases(rollout: Rollout) -> None:
    async def life() -> None:
        first = await rollout.generate([5, 6, 7], {"temperature": 1.0, "top_k": -1, "max_tokens": 6, "seed": 3})
        assert (first.stop_reason, len(first.token_ids), len(first.log_probs or [])) == ("completed", 6, 6)
        await rollout.release()
        await rollout.resume(["weights"])
        await rollout.update_weights(iter(changed().items()), global_steps=3)
        await rollout.resume(["kv_cache"])
        second = await rollout.generate([5, 6, 7], {"temperature": 1.0, "top_k": -1, "max_tokens": 6, "seed": 3})
        assert second.extra_fields == {"weight_version": 3}
        assert second.log_probs != first.log_probs
        await rollout.update_weights(changed().items(), global_steps=4)
        assert rollout.generator.weight_version == 4
        await rollout.clear_kv_cache()
        await rollout.sleep()
        with pytest.raises(RuntimeError, match=r"the weights were released; update_weights"):
            await rollout.wake_up()
        await rollout.update_weights(changed().items(), global_steps=5)
        await rollout.abort_all_requests()
        waiting = asyncio.ensure_future(rollout.generate([5, 6], {"max_tokens": 3}, "one"))
        await asyncio.sleep(0)
        await rollout.resume_generation()
        assert (await waiting).stop_reason == "completed"

    asyncio.run(life())


@pytest.mark.integration
def test_what_verl_may_not_ask(rollout: Rollout) -> None:
    refused: list[tuple[Any, type[Exception], str]] = [
        (rollout.update_weights([], wire_format="delta_flush"), UnsupportedOption, "wire_format='delta_flush'"),
        (rollout.update_weights([], peft_config={"r": 8}), UnsupportedOption, "merge the adapter"),
        (rollout.resume(["gradients"]), ValueError, "tags are weights and kv_cache"),
        (rollout.abort_all_requests(reject_request=True), UnsupportedOption, "requests wait for"),
        (rollout.generate([5], {}, image_data=[1]), UnsupportedOption, "image_data is not supported"),
        (rollout.generate([5], {"best_of": 2}), UnsupportedOption, "unknown option 'best_of'"),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            asyncio.run(call)
    with pytest.raises(UnsupportedOption, match="tensor_model_parallel_size=2"):
        Rollout(config(tensor_model_parallel_size=2), SimpleNamespace(path=TARGET))


def test_a_batch_of_nemo_rl() -> None:
    cfg = {
        "model_name": TARGET, "max_new_tokens": NEW, "temperature": 1.0, "top_p": 0.9, "top_k": None,
        "stop_token_ids": [2], "stop_strings": None, "_pad_token_id": 0, "colocated": {"enabled": True},
        "fastspec_cfg": {"draft": DRAFT, "max_length": 64, "max_batch_size": 3, "dtype": "float32"},
    }  # fmt: skip
    ids = torch.tensor([row + [0] * (4 - len(row)) for row in PROMPTS])
    data = {"input_ids": ids, "input_lengths": torch.tensor([len(row) for row in PROMPTS])}
    generation = Generation(cfg, seed=2)
    greedy = generation.generate(data, greedy=True)
    found = generation.generate(data)
    for row, prompt in enumerate(PROMPTS):
        size, new = int(found["unpadded_sequence_lengths"][row]), int(found["generation_lengths"][row])
        assert found["output_ids"][row, : len(prompt)].tolist() == prompt
        assert size == len(prompt) + new
        assert not found["output_ids"][row, size:].any()
        assert not found["logprobs"][row, : len(prompt)].any()
        law = {"do_sample": True, "top_k": 0, "top_p": 0.9, "eos_token_id": [2], "logprobs_mode": "processed"}
        whole = found["output_ids"][row, :size].tolist()
        (values,) = generation.generator.score([whole], lengths=len(prompt), **law).logprobs  # type: ignore[arg-type]
        assert torch.equal(found["logprobs"][row, len(prompt) : size], torch.tensor(values))
        assert bool(found["truncated"][row]) == (new == NEW and int(found["output_ids"][row, size - 1]) != 2)
    assert generation.finish_generation()
    assert generation.generator.asleep == 1
    assert generation.prepare_for_generation()
    assert generation.prepare_for_generation()
    assert generation.invalidate_kv_cache()
    again = generation.generate(data, greedy=True)
    assert torch.equal(again["output_ids"], greedy["output_ids"])
    with pytest.raises(UnsupportedOption, match="stop_strings of single rows"):
        generation.generate({**data, "stop_strings": ["x", None, None]})
    assert generation.shutdown()
    assert generation.shutdown()


def test_verl_has_these_methods() -> None:
    """Its own abstract class, where it is installed."""
    base = pytest.importorskip("verl.workers.rollout.base", reason="runs with `make test-integrations`").BaseRollout
    made = type("Made", (Rollout, base), {})
    assert not inspect.isabstract(made)
    for name in base.__abstractmethods__:
        theirs, ours = (inspect.signature(getattr(each, name)).parameters for each in (base, Rollout))
        assert [*theirs] == [*ours], name
