"""What ranks are told to do: functions that a process can be sent."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from safetensors.torch import load_file

from fastspec import DeterministicProposer, FastSpecGenerator, NGram, demo_pair
from fastspec.integrations.transfer import receive, send
from tests.helpers.rank_processes import Rank

PROMPTS = [[65, 30, 12, 7, 90], [4, 8, 15, 16, 23, 42, 8, 15], [5, 6]]
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95}


class Own(DeterministicProposer):
    """Drafts what hidden states of the target say, to the bit."""

    features = (1,)

    def guess(
        self, tokens: torch.Tensor, lengths: torch.Tensor, k: int, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids that change with the last bit of any element."""
        bits = features.float().contiguous().view(torch.int32).flatten(1).long().sum(-1, keepdim=True)
        return (bits + torch.arange(k)) % 128, torch.full_like(lengths, k)


def open_generator(here: Rank, name: str, options: dict[str, Any]) -> str:
    """Makes a generator and keeps it; what explain() says of ranks and of what they refuse."""
    target, draft_or_none = options.pop("pair", None) or map(str, demo_pair())
    if options.pop("lookup", False):
        options["proposer"] = NGram()
    if options.pop("plain", False):
        draft_or_none = None
    if options.pop("own", False):
        options["proposer"] = Own()
    options = {"max_length": 128, "max_batch_size": 2, "progress": False, "device": "cpu", **options}
    generator = FastSpecGenerator(target, draft_or_none, **options)
    here.kept[name] = generator
    lines = generator.explain().splitlines()
    return "\n".join(line for line in lines if line.startswith("ranks"))


def texts(here: Rank, name: str, calls: list[dict[str, Any]]) -> list[Any]:
    """The new tokens of each call."""
    return [text(here, name, call) for call in calls]


def text(here: Rank, name: str, call: dict[str, Any]) -> list[list[int]]:
    """The new tokens of a call."""
    options = {"prompts": 3, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0, **call}
    first = options.pop("first", 0)
    prompts = PROMPTS[first : first + options.pop("prompts")]
    output = here.kept[name].generate(prompts, return_dict_in_generate=True, **options)
    found: list[list[int]] = output.new_tokens
    return found


def scored(here: Rank, name: str) -> list[Any]:
    """Log-probabilities of drawn answers, and those that `score` gives for them and their prompts."""
    options = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0, "logprobs": 2, "seed": 3, **SAMPLED}
    drawn = here.kept[name].generate(PROMPTS, return_dict_in_generate=True, **options)
    rows = [prompt + new for prompt, new in zip(PROMPTS, drawn.new_tokens, strict=True)]
    found = here.kept[name].score(rows, lengths=[len(prompt) for prompt in PROMPTS], top_logprobs=2)
    assert found.logprobs == drawn.logprobs
    assert found.top_logprobs == drawn.top_logprobs
    return [found.logprobs, found.prompt_logprobs]


def streamed(here: Rank, name: str, steps: int) -> list[dict[int, list[int]]]:
    """What a stream gives in its first steps, which is then left, and what the next call makes of it."""
    stream = here.kept[name].stream(PROMPTS[:2], max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    found = [next(stream) for _ in range(steps)]
    stream.close()
    return found


def call_with(here: Rank, name: str, options_by_rank: list[dict[str, Any]]) -> list[list[int]]:
    """A call with other options on each rank."""
    return text(here, name, options_by_rank[here.rank])


def warm_up_with(here: Rank, name: str, arguments_by_rank: list[tuple[Any, ...]]) -> str:
    """Steps made ready with other arguments on each rank."""
    here.kept[name].warmup(*arguments_by_rank[here.rank])
    return "ready"


def open_with(here: Rank, options_by_rank: list[dict[str, Any]]) -> str:
    """A generator with other options on each rank."""
    return open_generator(here, "other", dict(options_by_rank[here.rank]))


class Fails:
    """A streamer that lets one rank fail in the middle of a text."""

    def __init__(self, here: Rank, how: str) -> None:
        self._here, self._how, self._calls = here, how, 0

    def put(self, tokens: torch.Tensor) -> None:
        self._calls += 1
        if self._calls < 3 or self._here.rank != 1:
            return
        if self._how == "die":
            os._exit(3)
        if self._how == "raise":
            raise ZeroDivisionError("a streamer's own error")
        self._here.wait()  # until the test says so

    def end(self) -> None:
        pass


def fail(here: Rank, name: str, how: str, patience: float) -> list[list[int]]:
    """A call in whose middle rank 1 fails."""
    here.kept[name]._ranks.world.patience = patience
    return text(here, name, {"prompts": 1, "max_new_tokens": 40, "streamer": Fails(here, how)})


def follow(here: Rank, name: str) -> str:
    """Makes the steps of what rank 0 submits, until it closes its generator."""
    here.kept[name].follow()
    here.kept[name].close()
    return "followed"


def submits(here: Rank, name: str, options: list[dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 gets of prompts that it submits at once, of one that is cancelled, and of calls beside them."""
    generator = here.kept[name]
    common: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    handles = [
        generator.submit(PROMPTS[index % len(PROMPTS)], **{**common, **each}) for index, each in enumerate(options)
    ]
    endless = generator.submit(PROMPTS[0], max_new_tokens=100, eos_token_id=None)
    next(iter(endless))  # and its iteration is left
    found = {"submitted": [handle.result().new_tokens[0] for handle in handles]}
    found["beside"] = text(here, name, {"num_speculative_tokens": 2})
    found["cancelled"] = endless.result().finish_reasons
    found["again"] = [generator.submit(PROMPTS[1], **common).result().new_tokens[0]]  # behind a pause of all ranks
    found["refused"] = refusal(generator.warmup), refusal(generator.follow)
    generator.close()
    return found


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    """What a call raises."""
    try:
        return f"no error, but {call(*arguments, **options)!r}"
    except Exception as error:  # noqa: BLE001  (the test judges it)
        return f"{type(error).__name__}: {error}"


def follow_and_fail(here: Rank, name: str, how: str) -> str:
    """Follows rank 0 until its first steps, then fails."""
    _fail_in_a_step(here, name, how)
    here.kept[name].follow()
    return "followed"


def submit_and_fail(here: Rank, name: str, how: str) -> list[str]:
    """What rank 0 is told where it fails itself."""
    _fail_in_a_step(here, name, how)
    return submit_and_see(here, name)


def fail_in_a_step(here: Rank, name: str, how: str) -> Any:
    """A call in whose steps this rank fails."""
    _fail_in_a_step(here, name, how)
    return text(here, name, {"max_new_tokens": 40})


def _fail_in_a_step(here: Rank, name: str, how: str) -> None:
    scheduler, steps = here.kept[name]._loop.scheduler, 0
    real = scheduler.step

    def step() -> Any:
        nonlocal steps
        steps += 1
        if steps > 3:
            if how == "die":
                os._exit(3)
            if how == "raise":
                raise ZeroDivisionError("a rank's own error")
            os.kill(os.getpid(), signal.SIGSTOP)
        return real()

    scheduler.step = step


def submit_and_see(here: Rank, name: str) -> list[str]:
    """What rank 0 is told of a request whose ranks fail, and of the next one."""
    generator = here.kept[name]
    handle = generator.submit(PROMPTS[0], max_new_tokens=60, eos_token_id=None)
    return [refusal(handle.result), refusal(generator.submit, PROMPTS[0], max_new_tokens=2)]


def updated(here: Rank, name: str, path: str, wrong: int = -1) -> None:
    """Replaces the weights by those of a checkpoint, half of them as pairs; rank `wrong` gives a name too many."""
    generator, tensors = here.kept[name], load_file(f"{path}/model.safetensors")
    if here.rank == wrong:
        tensors["model.layers.77.mlp.up_proj.weight"] = torch.zeros(2, 2)
    for each in (0, 1):
        generator.update_weights({key: tensors[key] for key in sorted(tensors) if ("layers.0" in key) == bool(each)})


def trained(here: Rank, paths: tuple[str, str]) -> list[list[int]] | None:
    """Rank 0 sends the tensors of a checkpoint; the others have a generator each, and receive them."""
    if here.rank == 0:
        send(load_file(f"{paths[1]}/model.safetensors").items())
        return None
    with FastSpecGenerator(paths[0], device="cpu", dtype="float32", max_length=128, progress=False) as generator:
        generator.update_weights(receive(device="cpu"), version=3)
        output = generator.generate(PROMPTS, max_new_tokens=12, eos_token_id=None, return_dict_in_generate=True)
        assert output.stats.weight_version == 3
        found: list[list[int]] = output.new_tokens
        return found
