"""The public class: what goes in, what comes out, and that a refusal leaves everything usable."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BatchEncoding, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from fastspec import FastSpecGenerator, GenerateOutput, UnsupportedOption
from tests.helpers.checkpoints import make_checkpoint, make_model
from tests.helpers.devices import devices

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the fixtures have none
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),  # nor do they pay
]
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]


def full(gen: FastSpecGenerator, prompts: Any = None, **options: Any) -> GenerateOutput:
    options = {"max_new_tokens": 12, "eos_token_id": None, "return_dict_in_generate": True, **options}
    out = gen.generate(PROMPTS if prompts is None else prompts, **options)
    assert isinstance(out, GenerateOutput)
    return out


def test_returns_what_transformers_returns(gen: FastSpecGenerator, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([[0, 0, 3, 1, 4], [7, 8, 9, 1, 2], [0, 0, 0, 0, 6]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    stop = full(gen, [[3, 1, 4]]).new_tokens[0][4]
    options = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    ours = gen.generate(ids, mask, **options)
    theirs = model.generate(ids, attention_mask=mask, **options)
    assert isinstance(ours, torch.Tensor)
    assert torch.equal(ours, theirs)
    assert ours.dtype == torch.int64
    assert ours.device == ids.device


def test_a_checkpoint_without_a_tokenizer_says_so(gen: FastSpecGenerator) -> None:
    assert not gen.has_tokenizer
    with pytest.raises(ValueError, match=r"brings no tokenizer; put its tokenizer.json beside its config.json"):
        _ = gen.tokenizer


def test_details_of_the_output(gen: FastSpecGenerator) -> None:
    out = full(gen)
    assert [len(tokens) for tokens in out.new_tokens] == [12, 12, 12]
    assert out.finish_reasons == ["length"] * 3
    assert out.sequences.shape == (3, 5 + 12)
    assert out.sequences[1].tolist() == [0] * 4 + PROMPTS[1] + out.new_tokens[1]
    stop = out.new_tokens[0][3]
    cut = full(gen, PROMPTS[:1], eos_token_id=stop)
    first = out.new_tokens[0].index(stop)
    assert cut.new_tokens[0] == out.new_tokens[0][: first + 1]
    assert cut.finish_reasons == ["stop"]
    assert cut.sequences.shape == (1, 5 + first + 1)


def test_statistics_add_up(gen: FastSpecGenerator) -> None:
    stats = full(gen, max_new_tokens=40).stats
    assert stats.emitted == 120 == stats.steps + stats.accepted - stats.dropped
    assert stats.drafted == 4 * (stats.steps - stats.plain_steps)  # a first token of a prompt's pass is a plain step
    assert stats.k == 4
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert stats.accepted_per_position is not None
    assert len(stats.accepted_per_position) == 4
    assert sum(stats.accepted_per_position) * (stats.steps - stats.plain_steps) == pytest.approx(stats.accepted)
    assert stats.tokens_per_step == 120 / stats.steps
    assert "acceptance" in str(stats)
    assert "\n" not in str(stats)
    for row in stats.rows:
        assert sum(row.histogram) == row.steps
    plain = full(gen, num_speculative_tokens=0).stats
    assert plain.acceptance_rate is None
    assert plain.accepted_per_position is None
    assert plain.tokens_per_step == 1.0
    assert plain.drafted == plain.accepted == plain.dropped == 0


@pytest.fixture(scope="module")
def before(gen: FastSpecGenerator) -> list[list[int]]:
    """Six tokens of each prompt."""
    return full(gen, max_new_tokens=6).new_tokens


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([[1, 10**6]],), {}, "position 1: token id 1000000"),
        (([[1.5]],), {}, "not an integer"),
        (([[1], []],), {}, "prompt 1 is empty"),
        (([[1] * 190],), {"max_new_tokens": 11}, "more than max_length=200"),
        (([[1]],), {"num_speculative_tokens": 5}, "made for at most 4"),
        (([[1]],), {"num_beams": 3}, "num_beams"),
        (([[1]],), {"temprature": 3}, "temprature"),
        (([[1]],), {"temperature": -1.0, "do_sample": True}, "temperature"),
        (([[1], [2]],), {"temperature": [0.5], "do_sample": True}, "1 values for 2 prompts"),
        (([[1]],), {"logprobs": 21}, "between 0 and 20"),
        (([[1]],), {"eos_token_id": 10**6}, "eos_token_id"),
    ],
    ids=str,
)
def test_a_refusal_names_its_reason_and_changes_nothing(
    gen: FastSpecGenerator,
    before: list[list[int]],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        gen.generate(*arguments, **options)
    assert full(gen, max_new_tokens=6).new_tokens == before


@pytest.mark.parametrize("delta", range(-6, 3))
def test_up_to_the_last_position(gen: FastSpecGenerator, delta: int) -> None:
    """prompt + new around max_length: the last k + 1 positions are no different, one more is refused."""
    prompt = [[(7 * i) % 90 for i in range(170)]]
    new = gen.max_length + delta - 170
    if delta > 0:
        with pytest.raises(ValueError, match="more than max_length"):
            full(gen, prompt, max_new_tokens=new)
    else:
        drafted = full(gen, prompt, max_new_tokens=new)
        assert len(drafted.new_tokens[0]) == new
        assert drafted.new_tokens == full(gen, prompt, max_new_tokens=new, num_speculative_tokens=0).new_tokens


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("delta", range(-6, 3))
def test_a_draft_with_a_shorter_context(delta: int, directory: Path, tmp_path: Path, device: str) -> None:
    """Around the draft's last position and beyond: the row goes on without drafts, and the statistics say so."""
    draft = make_checkpoint(tmp_path, "llama2", seed=1, max_position_embeddings=64, num_hidden_layers=1)
    with FastSpecGenerator(directory, draft, device=device, dtype="float32", progress=False) as short:
        assert short.max_length == 64  # by default both models can take in a whole row
    options: dict[str, Any] = {"max_length": 120, "dtype": "float32", "device": device, "progress": False}
    with FastSpecGenerator(directory, draft, **options) as gen:
        prompt = [[(7 * i) % 90 for i in range(50)]]
        new = 64 + delta - 50
        drafted = full(gen, prompt, max_new_tokens=new)
        assert drafted.new_tokens == full(gen, prompt, max_new_tokens=new, num_speculative_tokens=0).new_tokens
        if delta != 0:
            return
        longer = full(gen, prompt, max_new_tokens=70)
        assert longer.new_tokens == full(gen, prompt, max_new_tokens=70, num_speculative_tokens=0).new_tokens
        assert longer.stats.plain_steps >= 120 - 65
        assert "steps without drafts" in str(longer.stats)
        assert longer.stats.steps > longer.stats.plain_steps


def test_sampling_repeats_with_its_seed(gen: FastSpecGenerator) -> None:
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    first = full(gen, seed=1, **options).new_tokens
    assert full(gen, seed=1, **options).new_tokens == first
    assert full(gen, seed=2, **options).new_tokens != first
    torch.manual_seed(0)
    drawn = full(gen, **options).new_tokens
    torch.manual_seed(0)
    assert full(gen, **options).new_tokens == drawn
    greedy = full(gen).new_tokens
    mixed = full(gen, seed=1, do_sample=True, temperature=[0.0, 1.0, 0.0], top_k=0).new_tokens
    assert [mixed[0], mixed[2]] == [greedy[0], greedy[2]]
    assert mixed[1] == first[1]


def test_a_generation_config_object_is_taken(gen: FastSpecGenerator) -> None:
    config = GenerationConfig(max_new_tokens=5, eos_token_id=None)
    out = gen.generate([[1, 2]], generation_config=config)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (1, 7)


class Recorder(BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamer_gets_the_prompt_then_what_each_step_emitted(gen: FastSpecGenerator) -> None:
    recorder = Recorder()
    out = gen.generate(PROMPTS[:1], max_new_tokens=20, eos_token_id=None, streamer=recorder)
    assert isinstance(out, torch.Tensor)
    assert recorder.puts[0] == PROMPTS[0]
    assert [token for put in recorder.puts[1:] for token in put] == out[0, 5:].tolist()
    assert recorder.ended == 1
    with pytest.raises(UnsupportedOption, match="a streamer takes one prompt, got 3"):
        gen.generate(PROMPTS, streamer=recorder)
    with pytest.raises(UnsupportedOption, match="needs put"):
        gen.generate(PROMPTS[:1], streamer=3)  # type: ignore[arg-type]


def test_stream_yields_each_rows_tokens(gen: FastSpecGenerator) -> None:
    collected: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for emitted in gen.stream(PROMPTS, max_new_tokens=12, eos_token_id=None):
        for index, tokens in emitted.items():
            collected[index] += tokens
    assert list(collected.values()) == full(gen).new_tokens


def test_leaving_a_stream_early_is_harmless(gen: FastSpecGenerator) -> None:
    before = full(gen).new_tokens
    for steps in range(4):
        stream = gen.stream(PROMPTS, max_new_tokens=12, eos_token_id=None)
        for _ in range(steps):
            next(stream)
        del stream
        assert full(gen).new_tokens == before

    def interrupted() -> None:
        for _ in gen.stream(PROMPTS, max_new_tokens=12):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert full(gen).new_tokens == before

    class Raises(Recorder):
        def put(self, value: torch.Tensor) -> None:
            if self.puts:
                raise RuntimeError("the consumer failed")
            super().put(value)

    with pytest.raises(RuntimeError, match="the consumer failed"):
        gen.generate(PROMPTS[:1], streamer=Raises())
    assert full(gen).new_tokens == before


def test_several_threads_may_use_one_generator(gen: FastSpecGenerator) -> None:
    before = full(gen).new_tokens
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(full(gen).new_tokens))
    thread.start()
    thread.join()
    assert found == [before]
    stream = gen.stream(PROMPTS, max_new_tokens=12)
    next(stream)
    with pytest.raises(RuntimeError, match="in use by other calls"):
        gen.warmup()
    with pytest.raises(RuntimeError, match="in use by another call"):
        gen.close()
    assert full(gen).new_tokens == before, "calls go on together"
    stream.close()  # type: ignore[attr-defined]
    assert full(gen).new_tokens == before


def test_two_generators_do_not_touch_each_other(gen: FastSpecGenerator, directory: Path) -> None:
    before = full(gen).new_tokens
    with FastSpecGenerator(
        directory, max_batch_size=1, max_length=64, dtype="float32", device=gen.device, progress=False
    ) as other:
        ours, theirs = gen.stream(PROMPTS[:1], max_new_tokens=12), other.stream(PROMPTS[:1], max_new_tokens=12)
        for _ in range(3):  # another thread may make the steps by now: then tokens of several may come at once
            next(ours, None)
            next(theirs, None)
        del ours, theirs
        assert full(other).new_tokens == before
    assert full(gen).new_tokens == before


def test_a_closed_generator_refuses_calls_and_closing_twice_is_fine(directory: Path) -> None:
    gen = FastSpecGenerator(directory, max_length=64, max_batch_size=1, device="cpu", progress=False)
    gen.close()
    gen.close()
    with pytest.raises(RuntimeError, match="closed"):
        gen.generate([[1]])


def test_torch_is_left_as_it_was(directory: Path) -> None:
    before = (torch.get_default_dtype(), torch.get_rng_state(), torch.is_grad_enabled(), torch.get_num_threads())
    with FastSpecGenerator(directory, max_length=64, max_batch_size=1, device="cpu", progress=False) as gen:
        gen.generate([[1]], do_sample=True, seed=3)
    after = (torch.get_default_dtype(), torch.get_rng_state(), torch.is_grad_enabled(), torch.get_num_threads())
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert before[2:] == after[2:]


@pytest.mark.parametrize("device", devices())
def test_a_live_module_is_copied_not_changed(device: str) -> None:
    model = make_model("llama2", seed=3).to(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with FastSpecGenerator(model, max_length=64, max_batch_size=1, progress=False) as gen:
        assert gen.device.type == device
        full(gen)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_logprobs_equal_a_teacher_forced_pass(gen: FastSpecGenerator, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for options in ({}, {"do_sample": True, "temperature": 2.0, "seed": 5}):
        out = full(gen, max_new_tokens=30, logprobs=4, **options)
        assert out.logprobs is not None
        assert out.top_logprobs is not None
        for index, prompt in enumerate(PROMPTS):
            ids = torch.tensor([prompt + out.new_tokens[index]])
            with torch.no_grad():
                theirs = model(ids).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
            taken = theirs.gather(1, torch.tensor(out.new_tokens[index])[:, None])[:, 0]
            # fp32 passes of two implementations differ by up to 1e-4 in these logits (see the parity tests)
            torch.testing.assert_close(torch.tensor(out.logprobs[index]), taken, rtol=0, atol=2e-4)
            top = theirs.topk(4).values
            ours = torch.tensor([[value for _, value in place] for place in out.top_logprobs[index]])
            torch.testing.assert_close(ours, top, rtol=0, atol=2e-4)
    assert full(gen).logprobs is None
    assert full(gen, logprobs=True).top_logprobs == [[[]] * 12] * 3


def test_padding_is_inferred_as_transformers_infers_it(gen: FastSpecGenerator, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([[0, 0, 3, 1, 4], [7, 8, 9, 1, 2], [0, 0, 0, 0, 6]])
    for stop in (None, 9):
        options: dict[str, Any] = {
            "max_new_tokens": 9,
            "min_new_tokens": 9,
            "do_sample": False,
            "eos_token_id": stop,
            "pad_token_id": 0,
        }
        theirs = model.generate(ids, **options)
        assert torch.equal(theirs, model.generate(ids, attention_mask=(ids != 0).long(), **options))
        for form in (ids, ids.numpy(), ids.int()):
            assert gen.generate(form, **options).tolist() == theirs.tolist()
    with pytest.warns(UserWarning, match="none can be inferred") as told:
        gen.generate(ids, max_new_tokens=2, eos_token_id=0, pad_token_id=0)
    assert [warning.filename for warning in told] == [__file__]
    with pytest.warns(UserWarning, match="temperature has no effect") as told:
        gen.generate(ids[1:2], max_new_tokens=2, temperature=0.5)
    assert [warning.filename for warning in told] == [__file__]


def test_prompts_by_transformers_names(gen: FastSpecGenerator) -> None:
    ids = torch.tensor([[3, 1, 4]])
    wanted = full(gen, ids).new_tokens
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}
    encoding = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    by_name: Any = gen.generate(inputs=ids, return_dict_in_generate=True, **options)
    whole: Any = gen.generate(encoding, return_dict_in_generate=True, **options)
    apart: Any = gen.generate(**encoding, return_dict_in_generate=True, **options)
    assert by_name.new_tokens == whole.new_tokens == apart.new_tokens == wanted
    assert torch.equal(by_name.sequences[:, :3], ids)
    streamed = [token for step in gen.stream(inputs=ids, **options) for token in step[0]]
    assert streamed == wanted[0]
    with pytest.raises(ValueError, match="given twice, as input_ids and as inputs"):
        gen.generate(ids, inputs=ids)
    for nothing in (gen.generate, gen.stream, gen.calibrate):
        with pytest.raises(ValueError, match="input_ids is missing"):
            nothing()
