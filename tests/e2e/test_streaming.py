"""Streams with transformers' own streamers, and interrupts from inside a step, on the shipped pair."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer

from fastspec import FastSpecGenerator, demo_pair
from fastspec.scheduling.prefill import PrefillQueue
from fastspec.scheduling.scheduler import Scheduler
from fastspec.text.text_stream import TextStream
from tests.helpers.devices import devices


@pytest.fixture(scope="module", params=devices())
def gen(request: pytest.FixtureRequest) -> Iterator[FastSpecGenerator]:
    with FastSpecGenerator(*demo_pair(), max_batch_size=2, device=request.param, progress=False) as made:
        yield made


def ids_of(gen: FastSpecGenerator, text: str) -> list[list[int]]:
    assert gen.tokenizer is not None
    return [gen.tokenizer(text)["input_ids"]]


def test_transformers_text_streamer(gen: FastSpecGenerator, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt and text on stdout, several tokens at a time, are what decoding them at once gives."""
    ids = ids_of(gen, "def main(argv=None):")
    out = gen.generate(ids, max_new_tokens=60, streamer=TextStreamer(gen.tokenizer))
    assert isinstance(out, torch.Tensor)
    assert capsys.readouterr().out == gen.tokenizer.decode(out[0]) + "\n"  # type: ignore[union-attr]


def test_transformers_iterator_streamer_from_a_thread(gen: FastSpecGenerator) -> None:
    ids = ids_of(gen, "import unittest")
    streamer = TextIteratorStreamer(gen.tokenizer, skip_prompt=True)
    thread = Thread(target=gen.generate, args=(ids,), kwargs={"max_new_tokens": 40, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    out = gen.generate(ids, max_new_tokens=40)
    assert isinstance(out, torch.Tensor)
    assert text == gen.tokenizer.decode(out[0, len(ids[0]) :])  # type: ignore[union-attr]


@pytest.mark.parametrize(("temperature", "ends"), [(0.0, False), (1.0, False), (3.0, False), (3.0, True)])
def test_streamed_text_is_the_decoded_text(gen: FastSpecGenerator, temperature: float, ends: bool) -> None:
    """At a temperature of 3 a byte-level model writes broken and multi-byte characters all the time.

    Others may end by themselves, too: that hangs on the bits of a device's logits.
    """
    assert gen.tokenizer is not None
    ids = ids_of(gen, "x = 'naïve café 👩‍🚀'")
    options: dict[str, Any] = {
        "max_new_tokens": 120,
        "do_sample": True,
        "temperature": temperature,
        "top_k": 0,
        "seed": 1,
    }
    if ends:
        options |= {"min_new_tokens": 100, "logit_bias": {gen.tokenizer.eos_token_id: 100.0}}
    stream = TextStream(gen.tokenizer, context=ids[0])
    pieces = [stream.push(step[0]) for step in gen.stream(ids, **options)]
    pieces.append(stream.finish())
    out = gen.generate(ids, **options)
    assert isinstance(out, torch.Tensor)
    if ends:
        assert out[0, len(ids[0]) + 100 :].tolist() == [gen.tokenizer.eos_token_id]
    whole = gen.tokenizer.decode(out[0], skip_special_tokens=True)
    assert whole.endswith("".join(pieces))
    assert len(pieces) > 5


@pytest.mark.parametrize(
    "at", [(Scheduler, "_admit"), (PrefillQueue, "catch_up"), (Scheduler, "_collect")], ids=lambda at: at[1]
)
@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_interrupt_inside_a_step(
    gen: FastSpecGenerator, at: tuple[type, str], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before, between and after the device's work: the next call gives what a fresh generator gives."""
    prompts = [ids_of(gen, text)[0] for text in ("class A:", "import os", "def f(x):")]
    options: dict[str, Any] = {"max_new_tokens": 30, "return_dict_in_generate": True}
    before = gen.generate(prompts, **options).new_tokens  # type: ignore[union-attr]
    original = getattr(*at)
    calls = 0

    def interrupted(self: object, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(*at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            gen.generate(prompts, **options)
    assert gen.generate(prompts, **options).new_tokens == before  # type: ignore[union-attr]
