"""`sleep` and `wake`: memory goes back, results are the same to the bit, and whatever is refused is named."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import CheckpointError, FastSpecGenerator, NGram, Suffix, demo_pair
from fastspec.engine import sleep as sleeping
from fastspec.engine.sleep import Asleep, held_bytes
from fastspec.graphs.addresses import reachable, storages
from fastspec.kernels.cpu.blocked import Blocked
from tests.engine.test_update_weights import OPTIONS, fresh, result, tensors_of
from tests.helpers import families, hosted, hybrid
from tests.helpers.checkpoints import make_checkpoint, make_model
from tests.helpers.heads import LAYERS, eagle3_tensors, write_speculators

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the fixtures have none
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),  # nor do they pay
]


@pytest.fixture(autouse=True)
def _junk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that comes back holds NaN, and small storages are freed too."""
    monkeypatch.setattr(sleeping, "_SMALL", 64)
    resize = torch.UntypedStorage.resize_

    def filled(self: torch.UntypedStorage, size: int) -> None:
        resize(self, size)
        torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).fill_(255)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", filled)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("two")
    return make_checkpoint(path / "old", "llama2"), make_checkpoint(path / "new", "llama2", seed=5)


@pytest.fixture
def gen(two: tuple[Path, Path]) -> Iterator[FastSpecGenerator]:
    with FastSpecGenerator(two[0], proposer=NGram(), dtype="float32", **OPTIONS) as made:
        yield made


def stays_the_same(gen: FastSpecGenerator, vocab: int = 97) -> bool:
    before = result(gen, vocab)
    for level in (1, 2):
        assert gen.sleep(level) > 0
        gen.wake()
        if result(gen, vocab) != before:
            return False
    return True


def write(kind: str, path: Path) -> tuple[dict[str, Any], int]:
    """Arguments of a generator, and the size of its vocabulary."""
    if kind in hybrid.KINDS:
        hybrid.make_hybrid(kind).save_pretrained(path / "target")
        return {"target": path / "target", "proposer": NGram(), "dtype": "float32"}, hybrid.VOCAB
    if kind in families.FAMILIES:
        families.make_family(kind).save_pretrained(path / "target")
        return {"target": path / "target", "proposer": Suffix(), "dtype": "float32"}, families.VOCAB
    target = make_checkpoint(path / "target", "llama3", num_hidden_layers=LAYERS)
    if kind == "head":
        head = write_speculators(path / "head", eagle3_tensors(std=0.5), boundaries=[2, 4, 5])
        return {"target": target, "draft": head, "dtype": "float32"}, 97
    draft = make_checkpoint(path / "draft", "llama3", seed=1, num_hidden_layers=1)
    return {"target": target, "draft": draft, "dtype": "bfloat16", "kv_dtype": "fp8"}, 97


@pytest.mark.parametrize("kind", ["pair", "head", next(iter(hybrid.KINDS)), "qwen3_moe"])
def test_results_are_the_same_after_sleep(kind: str, tmp_path: Path) -> None:
    arguments, vocab = write(kind, tmp_path)
    with FastSpecGenerator(**arguments, **OPTIONS) as gen:
        assert stays_the_same(gen, vocab)


def contents(gen: FastSpecGenerator) -> dict[int, torch.Tensor]:
    """Bytes of every storage of the engine but its ring. Those of K, V and states must be zero after `wake`."""
    engine = gen._loop.engine
    ring, caches = (storages(each) for each in ([engine.ring], sleeping._caches(objects_of(engine))))
    held = {key: each for key, each in storages([engine]).items() if key not in ring}
    return {key: sleeping._bytes(each).clone() * (key not in caches) for key, each in held.items()}


def objects_of(engine: Any) -> list[object]:
    return list(reachable([engine.modules]))


@pytest.mark.parametrize("fault", [None, "_saved", "_zeroed"])
def test_every_byte_is_what_it_was(fault: str | None, gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """And memory that is not restored is found."""
    regain = Asleep.regain

    def forgetful(self: Asleep, engine: Any) -> None:
        if fault:
            getattr(self, fault).clear()
        regain(self, engine)

    monkeypatch.setattr(Asleep, "regain", forgetful)
    result(gen)
    gen._loop.scheduler.forget_prompts()
    before = contents(gen)
    gen.sleep()
    gen.wake()
    engine = gen._loop.engine
    after = {key: sleeping._bytes(each) for key, each in storages([engine]).items() if key in before}
    assert len(after) == len(before) > 20
    assert all(torch.equal(after[key], before[key]) for key in before) == (fault is None)


def test_what_is_freed_is_what_the_plan_says() -> None:
    with FastSpecGenerator(*demo_pair(), max_length=512, max_batch_size=4, progress=False) as gen:
        engine, plan = gen._loop.engine, gen.memory_plan
        weights = [each.weights for each in gen._weights.values()]
        blocked = sum(each.nbytes for each in reachable(weights) if isinstance(each, Blocked))
        caches = plan.target_cache + plan.draft_cache
        held = held_bytes(engine)
        freed = gen.sleep(1)
        assert freed >= 0.95 * (caches + plan.buffers)
        gen.wake()
        assert held_bytes(engine) == held
        assert gen.sleep(2) >= 0.95 * (freed + blocked)  # the plan counts fp32, and most of these are fp16
        assert not sum(each.way is not None for each in reachable(weights) if isinstance(each, Blocked))
        assert blocked > 0


def test_calls_of_a_sleeper_are_refused(gen: FastSpecGenerator, two: tuple[Path, Path]) -> None:
    before = result(gen)
    assert gen.asleep is None
    with pytest.raises(RuntimeError, match=r"is not asleep; sleep\(\) comes before wake"):
        gen.wake()
    with pytest.raises(ValueError, match="level must be 1"):
        gen.sleep(3)
    gen.sleep()
    calls = (
        lambda: result(gen),
        lambda: gen.submit([1, 2]),
        lambda: gen.score([[1, 2]]),
        lambda: gen.warmup(),
        lambda: gen.update_weights(two[1]),
        lambda: gen.sleep(2),
        lambda: gen.resume(),
    )
    for refused in calls:
        with pytest.raises(RuntimeError, match=r"this generator is asleep \(level 1\); call wake\(\) first"):
            refused()
    assert (gen.asleep, gen.kv_usage) == (1, 0.0)
    with pytest.raises(ValueError, match=r"sleep\(1\) has kept the weights"):
        gen.wake(two[1])
    gen.wake()
    assert result(gen) == before


def test_new_weights_wake_a_generator(gen: FastSpecGenerator, two: tuple[Path, Path]) -> None:
    before = result(gen)
    new = tensors_of(two[1])
    gen.sleep(2)
    with pytest.raises(ValueError, match="holds a part of the target's tensors"):
        gen.wake(dict(list(new.items())[:2]))
    with pytest.raises(CheckpointError, match="its config is not that of the target"):
        gen.wake(make_model("qwen2"))
    assert gen.asleep == 2
    gen.wake(new, version="step 4")
    assert result(gen) == fresh(two[1])
    assert gen.weight_version == "step 4"
    gen.sleep(2)
    gen.wake()
    assert (result(gen), gen.weight_version) == (before, 0)


def test_a_loaded_model_needs_new_weights() -> None:
    with FastSpecGenerator(make_model("llama2"), dtype="float32", **OPTIONS) as gen:
        before = result(gen)
        gen.sleep(2)
        with pytest.raises(ValueError, match="was a loaded model, and has no file to read again"):
            gen.wake()
        gen.wake(make_model("llama2").state_dict())
        assert result(gen) == before


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3"])
def test_a_hosted_model(name: str, tmp_path: Path) -> None:
    for place, seed in (("old", 0), ("new", 1)):
        hosted.make_model(name, seed=seed).save_pretrained(tmp_path / place)
    with FastSpecGenerator(tmp_path / "old", proposer=NGram(), **OPTIONS) as gen:
        before, freed = result(gen, 60), []
        for level in (1, 2):
            freed.append(gen.sleep(level))
            gen.wake()
            assert result(gen, 60) == before
        assert freed[1] > freed[0] > 0
        gen.sleep(2)
        gen.wake(hosted.make_model(name, seed=1).state_dict())
        with FastSpecGenerator(tmp_path / "new", proposer=NGram(), **OPTIONS) as other:
            assert result(gen, 60) == result(other, 60) != before
    with FastSpecGenerator(hosted.make_model(name), proposer=NGram(), **OPTIONS) as gen:
        gen.sleep(2)
        with pytest.raises(ValueError, match="was a loaded model, and has no file to read again"):
            gen.wake()
        gen.wake(hosted.make_model(name))
        assert result(gen, 60) == before


def test_no_room_to_wake(gen: FastSpecGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    before, resize, calls = result(gen), torch.UntypedStorage.resize_, [0]

    def full(self: torch.UntypedStorage, size: int) -> None:
        calls[0] += size > 0
        if size and calls[0] == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        resize(self, size)

    gen.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(MemoryError, match=r"wake\(\) found no room for"):
            gen.wake()
    assert gen.asleep == 1
    gen.wake()
    assert result(gen) == before


def test_a_generator_in_use_does_not_sleep(gen: FastSpecGenerator) -> None:
    stream = gen.stream([[5, 6]], max_new_tokens=30, eos_token_id=[])
    next(stream)
    with pytest.raises(RuntimeError, match="in use"):
        gen.sleep()
    stream.close()
    gen.pause()
    waiting = gen.submit([5, 6], max_new_tokens=3, eos_token_id=[])
    gen.sleep()
    gen.wake()
    gen.resume()
    assert len(waiting.result().new_tokens[0]) == 3


@pytest.mark.gpu
def test_contents_are_saved_with_one_wait() -> None:
    values = [torch.arange(count, device="cuda") for count in (9, 4096, 100_000)]
    held = [each.untyped_storage() for each in (*values, torch.zeros(50, device="cuda"))]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            zero = sleeping._all_zero(held)
            copies = [sleeping._to_host(each) for each in held[:3]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert sum("synchronizing" in str(each.message) for each in waits) == 1
    assert zero == [False, False, False, True]
    for value, copy in zip(values, copies, strict=True):
        assert torch.equal(copy.view(torch.int64), value.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_memory_goes_back_to_the_driver(level: int) -> None:
    """At least 95% of what the plan says, by the driver's own count; steps are captured again."""
    with FastSpecGenerator(*demo_pair(), max_length=1024, max_batch_size=64, progress=False) as gen:
        before, plan = result(gen), gen.memory_plan
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        gen.sleep(level)
        freed = torch.cuda.mem_get_info()[0] - free
        wanted = plan.target_cache + plan.draft_cache + plan.buffers
        assert freed >= 0.95 * (wanted + (plan.target_weights + plan.draft_weights if level == 2 else 0))
        gen.wake()
        assert result(gen) == before
