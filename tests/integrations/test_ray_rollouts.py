"""Ray actors that draw rollouts, real Ray: weights of a trainer reach all of them by one broadcast."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

ray = pytest.importorskip("ray", reason="runs with `make test-integrations`")

from fastspec import FastSpecGenerator, demo_pair  # noqa: E402
from fastspec.integrations.ray_rollouts import RolloutReplica  # noqa: E402
from fastspec.integrations.transfer import send  # noqa: E402

TARGET, DRAFT = map(str, demo_pair())
SIZES = {"device": "cpu", "dtype": "float32", "max_length": 64, "max_batch_size": 3}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "top_p": 0.9, "seed": [1, 2, 3]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_weights_reach_every_replica(cluster: None) -> None:
    """One has a draft, the other has none; their rollouts are the same, and those of the new weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    made = ray.remote(num_cpus=1)(RolloutReplica)
    replicas = [made.remote(TARGET, DRAFT, **SIZES), made.remote(TARGET, num_speculative_tokens=0, **SIZES)]
    before = ray.get([each.generate.remote(PROMPTS, **SAMPLED) for each in replicas])
    assert before[0] == before[1]
    joined = [each.join.remote(where, rank, 3) for rank, each in enumerate(replicas, 1)]
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=3)
    try:
        ray.get(joined)
        ray.get(replicas[1].sleep.remote(2))
        model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        state = {name: each * 1.2 if "down_proj" in name else each for name, each in model.state_dict().items()}
        updated = [each.update_weights.remote(version=7) for each in replicas]
        send(state.items())
        ray.get(updated)
    finally:
        dist.destroy_process_group()
    after = ray.get([each.generate.remote(PROMPTS, **SAMPLED) for each in replicas])
    assert after[0] == after[1] != before[0]
    assert after[0]["weight_version"] == 7
    with FastSpecGenerator(TARGET, DRAFT, verification="coupled", progress=False, **SIZES) as generator:  # type: ignore[arg-type]
        generator.update_weights(state)
        found = generator.generate(PROMPTS, return_dict_in_generate=True, **SAMPLED)  # type: ignore[call-overload]
    assert after[0]["token_ids"] == found.new_tokens
