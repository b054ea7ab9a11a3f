"""`update_weights`: results are those of a new generator, to the bit; what is refused or fails leaves no mixture."""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from fastspec import CheckpointError, FastSpecGenerator, NGram, UnsupportedModel, generator
from fastspec.engine.engine import Engine
from fastspec.kernels.common.weights import Weight
from fastspec.models.checkpoints.weight_loader import Loader
from fastspec.output import GenerateOutput
from tests.helpers import families, hybrid, quantised
from tests.helpers.checkpoints import make_checkpoint, make_model
from tests.helpers.dflash import WRITERS, Head
from tests.helpers.dflash_definition import RELATIVES
from tests.helpers.heads import LAYERS, eagle3_tensors, write_speculators
from tests.helpers.mtp import write_target

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),  # the fixtures have none
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),  # nor do they pay
]
OPTIONS: dict[str, Any] = {"max_length": 128, "max_batch_size": 2, "device": "cpu", "progress": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
Q, K, V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
GATE, NORM = "model.layers.1.mlp.gate_proj.weight", "model.norm.weight"


def result(gen: FastSpecGenerator, vocab: int = 97, **more: Any) -> tuple[Any, ...]:
    """Sampled tokens and log-probabilities of answers and prompts."""
    rng = random.Random(2)
    prompts = [[rng.randrange(3, vocab) for _ in range(length)] for length in (3, 66)]
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "seed": 1, "eos_token_id": [], "logprobs": 2}
    found = gen.generate(prompts, prompt_logprobs=1, return_dict_in_generate=True, **options | more)
    assert isinstance(found, GenerateOutput)
    return found.new_tokens, found.logprobs, found.top_logprobs, found.prompt_logprobs


def fresh(source: Any, vocab: int = 97, **more: Any) -> tuple[Any, ...]:
    with FastSpecGenerator(source, **{"proposer": NGram(), "dtype": "float32", **OPTIONS, **more}) as gen:
        return result(gen, vocab)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one model."""
    path = tmp_path_factory.mktemp("two")
    return make_checkpoint(path / "old", "llama2"), make_checkpoint(path / "new", "llama2", seed=5)


@pytest.fixture
def gen(two: tuple[Path, Path]) -> Iterator[FastSpecGenerator]:
    with FastSpecGenerator(two[0], proposer=NGram(), dtype="float32", **OPTIONS) as made:
        yield made


FORMS: dict[str, Callable[[Path], Any]] = {
    "path": lambda path: path,
    "name": str,
    "model": lambda path: make_model("llama2", seed=5),
    "state_dict": lambda path: make_model("llama2", seed=5).state_dict(),
    "pairs": lambda path: iter(tensors_of(path).items()),
    "wrapped": lambda path: {
        f"_orig_mod.base_model.model.{name.replace('_proj.', '_proj.base_layer.')}": each
        for name, each in tensors_of(path).items()
    },
    "handles": lambda path: {name: reduce_tensor(each) for name, each in tensors_of(path).items()},
    "stripped": lambda path: {name.removeprefix("model."): each for name, each in tensors_of(path).items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_results_are_those_of_a_new_generator(form: str, gen: FastSpecGenerator, two: tuple[Path, Path]) -> None:
    before = result(gen)
    gen.update_weights(FORMS[form](two[1]))
    after = result(gen)
    assert after == fresh(two[1]) != before
    gen.update_weights(two[0])
    assert result(gen) == before


@pytest.mark.parametrize("family", families.daily())
def test_every_family(family: str, tmp_path: Path) -> None:
    for name, seed in (("old", 0), ("new", 1)):
        families.make_family(family, seed).save_pretrained(tmp_path / name)
    with FastSpecGenerator(tmp_path / "old", proposer=NGram(), dtype="float32", **OPTIONS) as gen:
        before = result(gen, families.VOCAB)
        state = families.make_family(family, 1).state_dict()
        gen.update_weights(state)
        after = result(gen, families.VOCAB)
        assert after == fresh(tmp_path / "new", families.VOCAB) != before
        gen.update_weights({name: each for name, each in state.items() if "layers.1." in name})  # once more, a part
        assert result(gen, families.VOCAB) == after


@pytest.mark.parametrize("kind", hybrid.KINDS)
def test_hybrids(kind: str, tmp_path: Path) -> None:
    for name, seed in (("old", 0), ("new", 1)):
        hybrid.make_hybrid(kind, seed).save_pretrained(tmp_path / name)
    with FastSpecGenerator(tmp_path / "old", proposer=NGram(), dtype="float32", **OPTIONS) as gen:
        before = result(gen, hybrid.VOCAB)
        gen.update_weights(tmp_path / "new")
        assert result(gen, hybrid.VOCAB) == fresh(tmp_path / "new", hybrid.VOCAB) != before


@pytest.mark.parametrize("names", [(Q,), (K, V), (GATE,), (NORM,), ("lm_head.weight",)], ids=str)
def test_a_part_of_the_tensors(
    names: tuple[str, ...], gen: FastSpecGenerator, two: tuple[Path, Path], tmp_path: Path
) -> None:
    """The other tensors keep their values, those of the same fused matrix too."""
    new = {name: each for name, each in tensors_of(two[1]).items() if name in names}
    assert len(new) == len(names)
    mixed = make_checkpoint(tmp_path / "mixed", "llama2")
    save_file({**tensors_of(mixed), **new}, mixed / "model.safetensors", {"format": "pt"})
    before = result(gen)
    gen.update_weights(new)
    assert result(gen) == fresh(mixed) != before


@pytest.mark.parametrize(
    "more",
    [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"target_quantization": "int8"}, {"target_quantization": "int4"}],
)
def test_dtypes_and_rounded_targets(more: dict[str, Any], two: tuple[Path, Path]) -> None:
    with FastSpecGenerator(two[0], proposer=NGram(), **{"dtype": "float32", **OPTIONS, **more}) as gen:
        before = result(gen)
        gen.update_weights(tensors_of(two[1]))
        assert result(gen) == fresh(two[1], **more) != before


def test_targets_that_are_stored_quantised(two: tuple[Path, Path], tmp_path: Path) -> None:
    for place, directory in zip(("old", "new"), two, strict=True):
        quantised.write(directory, tmp_path / place, AWQ, quantised.awq(8))
    with FastSpecGenerator(tmp_path / "old", proposer=NGram(), dtype="float32", **OPTIONS) as gen:
        before = result(gen)
        with pytest.raises(CheckpointError, match=r"is stored as unquantised values, but the generator was made from "):
            gen.update_weights(tensors_of(two[1]))
        assert result(gen) == before
        gen.update_weights(tmp_path / "new")
        assert result(gen) == fresh(tmp_path / "new") != before


@pytest.mark.parametrize("moves", [False, True])
def test_steps_are_captured_again_only_if_codes_have_another_layout(
    moves: bool, gen: FastSpecGenerator, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts, again = iter([{1: ("int8",)}, {1: ("off8" if moves else "int8",)}]), list[Any]()
    monkeypatch.setattr(generator, "code_layouts", lambda roots: next(layouts))
    monkeypatch.setattr(Engine, "capture_again", lambda self, keys: again.append(keys))
    gen.update_weights(two[1])
    assert again == ([[]] if moves else [])


def test_steps_are_captured_again_after_an_update_that_died_behind_a_new_layout(
    gen: FastSpecGenerator, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second update finds the layout that the first one has left, and no step was captured for it."""
    layouts, again, refill = iter([{1: ("int8",)}, *[{1: ("off8",)}] * 2]), list[Any](), Loader.refill
    monkeypatch.setattr(generator, "code_layouts", lambda roots: next(layouts))
    monkeypatch.setattr(Engine, "capture_again", lambda self, keys: again.append(keys))
    monkeypatch.setattr(Loader, "refill", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gen.update_weights(two[1])
    monkeypatch.setattr(Loader, "refill", refill)
    gen.update_weights(two[1])
    assert again == [[]]


def send(directory: Path, device: str, handles: Any, ended: Any) -> None:
    """Holds a checkpoint's tensors in a process of its own, and sends handles of them."""
    held = {name: each.to(device) for name, each in tensors_of(directory).items()}
    handles.put([(name, reduce_tensor(each)) for name, each in held.items()])
    ended.wait(60)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_weights_from_another_process(device: str, two: tuple[Path, Path]) -> None:
    """By shared memory or CUDA IPC, between calls whose steps were captured before."""
    context = torch.multiprocessing.get_context("spawn")
    handles, ended = context.Queue(), context.Event()
    trainer = context.Process(target=send, args=(two[1], device, handles, ended), daemon=True)
    trainer.start()
    more: dict[str, Any] = {"dtype": "float32", "device": device}
    with FastSpecGenerator(two[0], proposer=NGram(), **OPTIONS | more) as gen:
        before, held = result(gen), places(gen)
        gen.update_weights(handles.get(timeout=60), version="sent")
        assert result(gen) == fresh(two[1], **more) != before
        assert places(gen) == held
        assert gen.weight_version == "sent"
    ended.set()
    trainer.join(30)
    assert trainer.exitcode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [False, True], ids=["same form", "other form"])
def test_codes_that_captured_steps_read(symmetric: bool, tmp_path: Path) -> None:
    """Zero points move where only one of two checkpoints has them."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    for place, seed, alike in (("old", 0, False), ("new", 5, symmetric)):
        made = make_checkpoint(tmp_path / f"{place} values", "llama2", seed=seed, **sizes)
        config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": alike}
        quantised.write(made, tmp_path / place, config, quantised.gptq(4, 32, symmetric=alike, v2=False))
    more = {"dtype": "bfloat16", "device": "cuda"}
    with FastSpecGenerator(tmp_path / "old", proposer=NGram(), **OPTIONS | more) as gen:
        before = result(gen)
        for _ in range(2):  # the second time captured steps have run with new values
            gen.update_weights(tmp_path / "new")
            assert result(gen) == fresh(tmp_path / "new", **more) != before
            gen.update_weights(tmp_path / "old")
            assert result(gen) == before


def test_a_draft_model(two: tuple[Path, Path]) -> None:
    """Greedy text stays; sampled text is that of the new pair."""
    with FastSpecGenerator(two[0], two[1], dtype="float32", **OPTIONS) as gen:
        greedy, before = result(gen, do_sample=False), result(gen)
        gen.update_weights(two[0], model="draft")
        assert result(gen, do_sample=False) == greedy
        with FastSpecGenerator(two[0], two[0], dtype="float32", **OPTIONS) as new:
            assert result(gen) == result(new) != before
        out = gen.generate([[5, 6]], max_new_tokens=20, eos_token_id=[], return_dict_in_generate=True)
        assert out.stats.acceptance_rate == 1.0
        assert out.stats.weight_version == 0


def test_a_head_stays_and_shares_the_new_embedding(tmp_path: Path) -> None:
    old, new = (make_checkpoint(tmp_path / str(seed), "llama3", seed=seed, num_hidden_layers=LAYERS) for seed in (0, 1))
    head = write_speculators(tmp_path / "head", eagle3_tensors(std=0.5), boundaries=[2, 4, 5])
    with FastSpecGenerator(old, head, dtype="float32", **OPTIONS) as gen:
        before = result(gen)
        gen.update_weights(new)
        with FastSpecGenerator(new, head, dtype="float32", **OPTIONS) as made:
            assert result(gen) == result(made) != before


def test_a_head_is_updated(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama3", num_hidden_layers=LAYERS)
    tensors = [eagle3_tensors(std=std) for std in (0.5, 0.4)]
    old, new = (
        write_speculators(tmp_path / str(place), each, boundaries=[2, 4, 5]) for place, each in enumerate(tensors)
    )
    with FastSpecGenerator(target, new, dtype="float32", **OPTIONS) as made:
        want = result(made)
    with FastSpecGenerator(target, old, dtype="float32", **OPTIONS) as gen:
        before = result(gen)
        with pytest.raises(CheckpointError, match=r"missing; this .* needs them"):
            gen.update_weights(dict(list(tensors[1].items())[:3]), model="draft")
        assert result(gen) == before
        gen.update_weights(new, model="draft")
        assert result(gen) == want != before
        gen.update_weights(load_file(old / "model.safetensors"), model="draft")
        assert result(gen) == before
        assert gen.weight_version == 0


@pytest.mark.parametrize("case", sorted(RELATIVES))
def test_relatives_of_dflash_are_updated(case: str, tmp_path: Path) -> None:
    """Every tensor of the head changes; nothing made of the old ones is kept, as fp32 copies would be."""
    target = make_checkpoint(tmp_path / "target", "qwen3", vocab_size=11)
    layout, changes, _ = RELATIVES[case]
    old = WRITERS[layout](tmp_path / "old", replace(Head(32, 11, block_size=16, mask_id=10, ids=(0, 2)), **changes))
    new = tmp_path / "new"
    shutil.copytree(old, new)
    stored = load_file(old / "model.safetensors")
    tensors = {name: each.flip(0) if each.is_floating_point() else each for name, each in stored.items()}
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    with FastSpecGenerator(target, new, dtype="bfloat16", **OPTIONS) as made:
        want = result(made, 11)
    with FastSpecGenerator(target, old, dtype="bfloat16", **OPTIONS) as gen:
        before = result(gen, 11)
        gen.update_weights(new, model="draft")
        assert result(gen, 11) == want != before


def test_mtp_layers_are_updated(tmp_path: Path) -> None:
    """From a directory of the target, or its tensors: others are left out."""
    old, new = (write_target(tmp_path / name, "nextn")[0] for name in ("old", "new"))
    state = {}
    for file in sorted(new.glob("*.safetensors")):
        tensors = load_file(file)
        tensors = {name: each.flip(-1) if "layers.3." in name else each for name, each in tensors.items()}
        save_file(tensors, file, {"format": "pt"})
        state |= tensors
    with FastSpecGenerator(old, "mtp", dtype="float32", **OPTIONS) as gen:
        before = result(gen)
        with pytest.raises(CheckpointError, match="has no MTP layers"):
            gen.update_weights({NORM: torch.ones(48)}, model="draft")
        gen.update_weights(state, model="draft")
        changed = result(gen)
        assert changed != before
        gen.update_weights(old, model="draft")
        assert result(gen) == before
        gen.update_weights(new, model="draft")
        assert result(gen) == changed


def test_prompts_of_old_weights_are_forgotten_and_versions_counted(
    gen: FastSpecGenerator, two: tuple[Path, Path]
) -> None:
    prompt = [list(range(3, 90)) * 1]

    def stats() -> Any:
        return gen.generate(prompt, max_new_tokens=2, eos_token_id=[], return_dict_in_generate=True).stats

    stats()
    assert (stats().cached_tokens, stats().weight_version) == (64, 0)
    gen.update_weights(two[1])
    assert (stats().cached_tokens, stats().weight_version) == (0, 1)
    gen.update_weights(two[1], version="step 7")
    handle = gen.submit(prompt[0], max_new_tokens=2)
    assert handle.result().stats.weight_version == "step 7"
    gen.update_weights(two[1])
    assert (handle.result().stats.weight_version, stats().weight_version) == ("step 7", 3)


def places(gen: FastSpecGenerator) -> list[int]:
    found = []
    for part in gen._weights["target"].loader.parts:
        assert part.place is not None
        found.append((part.place.data if isinstance(part.place, Weight) else part.place).data_ptr())
    return found


def test_two_hundred_updates_take_no_more_memory(gen: FastSpecGenerator, two: tuple[Path, Path]) -> None:
    states, held = [tensors_of(each) for each in two], places(gen)

    def tensors() -> int:
        gc.collect()
        return sum(each.numel() * each.element_size() for each in gc.get_objects() if type(each) is Tensor)

    texts, sizes = set(), []
    for turn in range(200):
        gen.update_weights(states[turn % 2])
        if turn % 50 in (0, 1):
            texts.add((turn % 2, str(result(gen))))
            sizes.append(tensors())
    assert len(texts) == 2, "an update gives the same bits each time"
    assert sizes[-1] <= sizes[1]
    assert places(gen) == held


def wrong(two: tuple[Path, Path]) -> dict[str, tuple[Any, type[Exception], str]]:
    new = tensors_of(two[1])
    more = {"model.layers.9.mlp.up_proj.weight": torch.zeros(3, 3)}
    return {
        "name": ({**new, **more}, CheckpointError, r"layers\.9\.mlp\.up_proj\.weight\) unexpected"),
        "shape": (
            {**new, NORM: torch.ones(47)},
            CheckpointError,
            r"model\.norm\.weight has shape \[47\], wanted \[48\]",
        ),
        "dtype": ({**new, NORM: torch.ones(48).int()}, UnsupportedModel, "is of torch.int32, wanted bfloat16"),
        "twice": ([*new.items(), (NORM, new[NORM])], CheckpointError, "comes twice"),
        "meta": ({NORM: torch.ones(48, device="meta")}, CheckpointError, "has no values here"),
        "array": ({NORM: [1.0] * 48}, CheckpointError, "is a list, wanted a plain tensor"),
        "adapter": (
            {**new, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(2, 2)},
            CheckpointError,
            r"is an adapter's; call merge_adapter\(\)",
        ),
        "nothing": ({}, CheckpointError, "holds no tensor"),
        "another model": (make_model("qwen2"), CheckpointError, "its config is not that of the target"),
        "no directory": ("/nowhere/at/all", CheckpointError, "nowhere"),
    }


WRONG = ("name", "shape", "dtype", "twice", "meta", "array", "adapter", "nothing", "another model", "no directory")


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_refused_changes_nothing(kind: str, gen: FastSpecGenerator, two: tuple[Path, Path]) -> None:
    values, error, message = wrong(two)[kind]
    before = result(gen)
    with pytest.raises(error, match=message):
        gen.update_weights(values)
    assert result(gen) == before


def test_parts_of_a_rounded_matrix_come_together(two: tuple[Path, Path]) -> None:
    new = tensors_of(two[1])
    with FastSpecGenerator(two[0], dtype="float32", target_quantization="int8", **OPTIONS) as gen:
        before = result(gen)
        with pytest.raises(CheckpointError, match=r"q_proj\.weight without .*k_proj.*one matrix of fewer bits"):
            gen.update_weights({Q: new[Q]})
        assert result(gen) == before
        gen.update_weights({name: new[name] for name in (Q, K, V)})
        assert result(gen) != before


def test_values_beyond_float16_are_refused_before_a_copy(two: tuple[Path, Path]) -> None:
    new = tensors_of(two[1])
    new[NORM] = torch.full_like(new[NORM], 1e6)
    with FastSpecGenerator(two[0], dtype="float16", **OPTIONS) as gen:
        before = result(gen)
        with pytest.raises(CheckpointError, match="has values beyond float16"):
            gen.update_weights(new)
        assert result(gen) == before


def test_a_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    old, new = (make_checkpoint(tmp_path / str(seed), "llama3", seed=seed) for seed in (0, 1))
    state = make_model("llama3", seed=1).state_dict()
    with FastSpecGenerator(old, proposer=NGram(), dtype="float32", **OPTIONS) as gen:
        before = result(gen)
        with pytest.raises(CheckpointError, match="and this model ties them"):
            gen.update_weights({**state, "lm_head.weight": state["lm_head.weight"] + 1})
        assert result(gen) == before
        gen.update_weights(state)
        assert result(gen) == fresh(new)


@pytest.mark.parametrize("fails_at", [0, 3, 9])
def test_an_update_that_dies_midway(
    fails_at: int, gen: FastSpecGenerator, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator says so until all tensors have come."""
    new, copies, original = tensors_of(two[1]), [0], Loader._fill_tensor

    def dying(self: Loader, *given: Any, **named: Any) -> None:
        copies[0] += 1
        if copies[0] > fails_at:
            raise OSError("the disk is gone")
        original(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "_fill_tensor", dying)
        with pytest.raises(OSError, match="the disk is gone"):
            gen.update_weights(new)
    for refused in (lambda: result(gen), lambda: gen.submit([1, 2]), lambda: gen.score([[1, 2]])):
        with pytest.raises(RuntimeError, match="an update of the target has failed midway"):
            refused()
    with pytest.raises(RuntimeError, match="this update holds a part of them"):
        gen.update_weights({NORM: new[NORM]})
    gen.update_weights(new)
    assert result(gen) == fresh(two[1])


def test_pairs_that_end_in_an_error_change_nothing(gen: FastSpecGenerator, two: tuple[Path, Path]) -> None:
    def pairs() -> Iterator[tuple[str, Tensor]]:
        yield NORM, tensors_of(two[1])[NORM]
        raise ConnectionError("the trainer is gone")

    before = result(gen)
    with pytest.raises(ConnectionError, match="the trainer is gone"):
        gen.update_weights(pairs())
    assert result(gen) == before


def test_a_generator_in_use_is_not_updated(gen: FastSpecGenerator, two: tuple[Path, Path]) -> None:
    before = result(gen)
    stream = gen.stream([[5, 6]], max_new_tokens=30, eos_token_id=[])
    next(stream)
    with pytest.raises(RuntimeError, match="in use"):
        gen.update_weights(two[1])
    stream.close()
    assert result(gen) == before


def test_what_is_not_updated_is_named(two: tuple[Path, Path], gen: FastSpecGenerator) -> None:
    with pytest.raises(ValueError, match="model must be 'target' or 'draft', got 'both'"):
        gen.update_weights(two[1], model="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the generator has no draft model"):
        gen.update_weights(two[1], model="draft")
    with pytest.raises(ValueError, match="version=3 is of the target's weights"):
        gen.update_weights(two[1], model="draft", version=3)
