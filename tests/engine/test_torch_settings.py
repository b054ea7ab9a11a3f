"""What a caller has told torch has no effect on what we do, and is as it was afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator, NGram, torch_settings
from fastspec.torch_settings import shielded
from tests.helpers.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
SEEDED = {"do_sample": True, "temperature": [0.0, 0.9, 1.3], "top_p": 0.9, "top_k": 20, "seed": 5}
OPTIONS = {**SEEDED, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {7: 1.5}, "logprobs": 3}


@contextmanager
def setting(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> Iterator[None]:
    """A setting that outlives no test."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def default_device(name: str) -> AbstractContextManager[None]:
    return setting(lambda: None, torch.set_default_device, name)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return setting(torch.get_default_dtype, torch.set_default_dtype, dtype)


def deterministic() -> AbstractContextManager[None]:
    return setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device meta": partial(default_device, "meta"),
    "default device cuda": partial(default_device, "cuda"),  # also where there is none
    "with meta": partial(torch.device, "meta"),
    "with cuda": partial(torch.device, "cuda"),
    "autocast bfloat16": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "autocast float16": partial(torch.autocast, "cpu", dtype=torch.float16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "deterministic": deterministic,
    "default dtype float64": partial(default_dtype, torch.float64),
    "default dtype bfloat16": partial(default_dtype, torch.bfloat16),
    "default dtype float16": partial(default_dtype, torch.float16),
}


def state_of_torch() -> tuple[Any, ...]:
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    whole = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    return *modes, torch.get_autocast_dtype("cpu"), *whole, torch_settings._has_default_device()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = tmp_path_factory.mktemp("pair")
    return make_checkpoint(made / "target", "llama2", seed=0), make_checkpoint(
        made / "draft", "llama2", seed=1, num_hidden_layers=1
    )


def opened(pair: tuple[Path, Path], dtype: str) -> FastSpecGenerator:
    return FastSpecGenerator(*pair, max_batch_size=2, max_length=96, dtype=dtype, device="cpu", progress=False)


def generated(generator: FastSpecGenerator, **options: Any) -> tuple[Any, ...]:
    out: Any = generator.generate(PROMPTS, max_new_tokens=6, eos_token_id=None, return_dict_in_generate=True, **options)
    return out.sequences.tolist(), out.logprobs, out.top_logprobs, out.sequences.device.type


def told(generator: FastSpecGenerator) -> tuple[Any, ...]:
    """Everything that calls of several kinds return."""
    found = [*generated(generator, logprobs=2), *generated(generator, **OPTIONS)]
    padded = generator.generate(PROMPTS, max_new_tokens=4, eos_token_id=None)
    assert isinstance(padded, torch.Tensor)
    streamed = list(generator.stream(PROMPTS, max_new_tokens=4, eos_token_id=None, **SEEDED))
    return *found, padded.tolist(), streamed


class Seen:
    """A streamer that notes what state its caller finds torch in."""

    def __init__(self) -> None:
        self.states: set[tuple[Any, ...]] = set()
        self.devices: set[str] = set()

    def put(self, value: torch.Tensor) -> None:
        self.states.add(state_of_torch())
        self.devices.add(value.device.type)

    def end(self) -> None:
        self.states.add(state_of_torch())


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def usual(request: pytest.FixtureRequest, pair: tuple[Path, Path]) -> Iterator[tuple[FastSpecGenerator, str, Any]]:
    with opened(pair, request.param) as generator:
        yield generator, request.param, told(generator)


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_call_is_the_same_anywhere(usual: tuple[FastSpecGenerator, str, Any], name: str) -> None:
    generator, _, expected = usual
    with SURROUNDINGS[name]():
        before, seen = state_of_torch(), Seen()
        assert told(generator) == expected
        generator.generate(PROMPTS[:1], streamer=seen, max_new_tokens=5)  # type: ignore[arg-type]
        for _ in generator.stream(PROMPTS[:1], max_new_tokens=5):
            assert state_of_torch() == before  # while a caller has the word
        assert state_of_torch() == before
        assert (seen.states, seen.devices) == ({before}, {"cpu"})


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_generator_is_the_same_wherever_it_is_made(
    usual: tuple[FastSpecGenerator, str, Any], pair: tuple[Path, Path], name: str
) -> None:
    _, dtype, expected = usual
    with SURROUNDINGS[name]():
        before = state_of_torch()
        generator = opened(pair, dtype)
        assert state_of_torch() == before
    with generator:
        assert generated(generator, logprobs=2) == expected[:4]


@pytest.mark.parametrize("name", ["default device meta", "autocast bfloat16", "default dtype float64"])
def test_lookup_calibration_and_auto_work_anywhere(pair: tuple[Path, Path], name: str) -> None:
    options: dict[str, Any] = {"max_length": 96, "device": "cpu", "progress": False, "num_speculative_tokens": "auto"}
    with SURROUNDINGS[name](), FastSpecGenerator(*pair, proposer=NGram(), **options) as generator:
        generator.generate(PROMPTS, max_new_tokens=9, eos_token_id=None)
        assert generator.calibrate(PROMPTS[:1], max_new_tokens=8, eos_token_id=None).trials


def test_the_callers_random_numbers_are_left_alone(usual: tuple[FastSpecGenerator, str, Any], pair: Any) -> None:
    """As by transformers, whose greedy decoding draws nothing; a generator that is made draws nothing either."""
    gen = usual[0]
    before = torch.get_rng_state()
    gen.generate([[3, 1, 4]], max_new_tokens=4, do_sample=False)
    gen.generate([[3, 1, 4]], max_new_tokens=4, do_sample=True, seed=3)
    FastSpecGenerator(*pair, device="cpu", max_length=64, progress=False).close()
    assert torch.equal(torch.get_rng_state(), before)
    gen.generate([[3, 1, 4]], max_new_tokens=4, do_sample=True)
    assert not torch.equal(torch.get_rng_state(), before)


def test_seeds_are_drawn_from_the_cpu_anywhere(usual: tuple[FastSpecGenerator, str, Any]) -> None:
    generator, _, _ = usual
    drawn = []
    for around in (nullcontext(), torch.device("meta")):
        torch.manual_seed(3)
        with around:
            drawn.append(generator.generate(PROMPTS, do_sample=True, max_new_tokens=6).tolist())  # type: ignore[union-attr]
    assert drawn[0] == drawn[1]


def test_deterministic_algorithms_are_off_on_cuda_as_long_as_anybody_works() -> None:
    """Here without a device: the setting is the process's."""
    cuda, asked = torch.device("cuda"), torch.are_deterministic_algorithms_enabled
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with shielded(cuda):
            inside.set()
            leave.wait()

    with setting(asked, lambda on: torch.use_deterministic_algorithms(on, warn_only=on), True):
        with shielded(torch.device("cpu")):
            assert asked()  # nothing there that it would change
        with shielded(cuda):
            assert not asked()
            thread = threading.Thread(target=other)
            thread.start()
            inside.wait()
        assert not asked()
        leave.set()
        thread.join()
        assert asked()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    with shielded(cuda):
        pass
    assert not asked()


def test_autocast_of_cuda_is_off_inside() -> None:
    with setting(lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on), True):
        with shielded():
            assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cuda")
