"""Generators on 1, 2 and 4 processes over gloo: the same text, with every proposer, and with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastspec import FastSpecGenerator
from tests.distributed import tasks
from tests.distributed.conftest import SIZES
from tests.helpers import hosted, quantised
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.rank_processes import Processes, Rank

CALLS: list[dict[str, Any]] = [
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 4},
    {"prompts": 1, "num_speculative_tokens": 2},
    {**tasks.SAMPLED, "seed": 7},
    {"repetition_penalty": 1.2, "logprobs": 2},
]
Pair = tuple[str, str]


def one(options: dict[str, Any], calls: list[dict[str, Any]]) -> list[Any]:
    """What one rank gives, in this process."""
    here = Rank(0, 1, None)  # type: ignore[arg-type]  # which waits for nobody
    tasks.open_generator(here, "one", {"tensor_parallel": 1, **options})
    found = tasks.texts(here, "one", calls)
    here.kept["one"].close()
    return found


def test_two_and_four_ranks_give_the_text_of_one(pair: Pair, two: Processes, four: Processes) -> None:
    want = one({"pair": pair}, CALLS)
    assert want[0] == want[1], "drafts change nothing"
    for ranks, processes in ((2, two), (4, four)):
        said = processes.run(tasks.open_generator, "pair", {"pair": pair, "tensor_parallel": ranks})
        assert all("the same text on 1, 2, 4 and 8 ranks; draft whole on every rank" in each for each in said), said
        assert processes.run(tasks.texts, "pair", CALLS) == [want] * ranks


def test_scores_are_those_of_one_rank(pair: Pair, two: Processes) -> None:
    """And those of generation, on every rank."""
    here = Rank(0, 1, None)  # type: ignore[arg-type]  # which waits for nobody
    tasks.open_generator(here, "one", {"pair": pair, "tensor_parallel": 1})
    want = tasks.scored(here, "one")
    here.kept["one"].close()
    two.run(tasks.open_generator, "scored", {"pair": pair, "tensor_parallel": 2})
    assert two.run(tasks.scored, "scored") == [want, want]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> str:
    more = {"vocab_size": 128, "num_hidden_layers": 2, "head_dim": 16, "max_position_embeddings": 256, **SIZES}
    return str(make_checkpoint(tmp_path_factory.mktemp("new") / "target", "llama3", seed=6, **more))


def test_new_weights_are_cut_by_each_rank(pair: Pair, new: str, two: Processes) -> None:
    """A part at a time. What one rank refuses changes nothing on any."""
    before, want = one({"pair": pair}, CALLS[:2]), one({"pair": (new, pair[1])}, CALLS[:2])
    two.run(tasks.open_generator, "updated", {"pair": pair, "tensor_parallel": 2})
    said = two.run(tasks.updated, "updated", new, 1)
    assert "rank 1 refused the arguments: CheckpointError" in said[0], said
    assert "layers.77" in said[1], said
    assert two.run(tasks.texts, "updated", CALLS[:2]) == [before, before]
    assert two.run(tasks.updated, "updated", new) == [None, None]
    assert two.run(tasks.texts, "updated", CALLS[:2]) == [want, want]
    assert want != before


def test_new_weights_of_a_hosted_model_are_cut(two: Processes, tmp_path: Path) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    for seed, path in enumerate((old, new)):
        hosted.make_model("cohere", seed=seed, vocab_size=128).save_pretrained(path)
    options = {"pair": (old, None)}
    before, want = one(options, CALLS[:1]), one({"pair": (new, None)}, CALLS[:1])
    two.run(tasks.open_generator, "hosted", {**options, "tensor_parallel": 2})
    assert two.run(tasks.texts, "hosted", CALLS[:1]) == [before, before]
    two.run(tasks.updated, "hosted", new)
    assert two.run(tasks.texts, "hosted", CALLS[:1]) == [want, want]
    assert want != before


def test_a_trainer_sends_weights_to_another_process(pair: Pair, new: str, two: Processes) -> None:
    options = {"max_new_tokens": 12, "eos_token_id": None}
    with FastSpecGenerator(new, device="cpu", dtype="float32", max_length=128, progress=False) as generator:
        output = generator.generate(tasks.PROMPTS, return_dict_in_generate=True, **options)  # type: ignore[call-overload]
    assert two.run(tasks.trained, (pair[0], new)) == [None, output.new_tokens]


def test_a_quantised_target_is_cut(pair: Pair, two: Processes, tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    quantised.write(Path(pair[0]), tmp_path / "awq", settings, quantised.awq(32))
    options = {"pair": (str(tmp_path / "awq"), pair[1])}
    want = one(options, CALLS)
    assert want != one({"pair": pair}, CALLS)
    two.run(tasks.open_generator, "awq", {**options, "tensor_parallel": 2})
    assert two.run(tasks.texts, "awq", CALLS) == [want, want]


@pytest.mark.parametrize("form", ["fp8", pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_a_target_that_is_rounded_while_it_is_loaded_has_one_text_on_all_ranks(
    form: str, pair: Pair, two: Processes
) -> None:
    """With drafts and without; each rank rounds its slices by themselves, so that text is another than one rank's."""
    said = two.run(tasks.open_generator, form, {"pair": pair, "tensor_parallel": 2, "target_quantization": form})
    assert all("text may differ from that of another number of ranks" in each for each in said), said
    first, second = two.run(tasks.texts, form, CALLS)
    assert first == second
    assert first[0] == first[1], "drafts change nothing"
    assert first != one({"pair": pair}, CALLS), "it was rounded"


OTHER_WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a draft that is split": ({"draft_tensor_parallel": "split"}, {}),
    "lookup alone": ({"lookup": True, "plain": True}, {}),
    "lookup before the draft": ({"lookup": True}, {}),
    "a proposer of one's own that reads hidden states": ({"own": True, "plain": True}, {}),
    "coupled": ({"verification": "coupled"}, {**tasks.SAMPLED, "seed": 3}),
    "rejection": ({"verification": "rejection"}, {**tasks.SAMPLED, "seed": 3}),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_two_ranks_give_the_text_of_one_in_every_other_way(way: str, pair: Pair, two: Processes) -> None:
    options, call = OTHER_WAYS[way]
    (want,) = one({"pair": pair, **{k: v for k, v in options.items() if k != "draft_tensor_parallel"}}, [call])
    two.run(tasks.open_generator, way, {"pair": pair, "tensor_parallel": "auto", **options})
    assert two.run(tasks.text, way, call) == [want, want]


def test_ranks_draw_alike_without_a_seed_and_choose_k_alike(pair: Pair, two: Processes) -> None:
    two.run(tasks.open_generator, "auto", {"pair": pair, "tensor_parallel": 2, "num_speculative_tokens": "auto"})
    first, second = two.run(tasks.text, "auto", {})
    assert first == second, "k is chosen by the times of rank 0"
    first, second = two.run(tasks.texts, "auto", [{**tasks.SAMPLED, "max_new_tokens": 30}] * 2)
    assert first == second, "seeds are those of rank 0"
    assert first[0] != first[1], "which draws others for every call"


def test_a_stream_that_all_ranks_leave_at_the_same_place_leaves_the_generator_usable(
    pair: Pair, two: Processes
) -> None:
    two.run(tasks.open_generator, "streams", {"pair": pair, "tensor_parallel": 2})
    first, second = two.run(tasks.streamed, "streams", 3)
    assert first == second
    assert len(first) == 3
    assert two.run(tasks.text, "streams", {}) == one({"pair": pair}, [{}]) * 2


def test_an_argument_that_differs_on_one_rank_is_named_before_anything_is_launched(pair: Pair, two: Processes) -> None:
    two.run(tasks.open_generator, "differs", {"pair": pair, "tensor_parallel": 2})
    for options, named in (
        ([{"prompts": 1}, {"prompts": 2}], "rank 1 got another prompts"),
        ([{"top_k": 4, **tasks.SAMPLED}, tasks.SAMPLED], "rank 1 got another option top_k than rank 0"),
        ([{}, {"prompts": 1, "logprobs": 2}], "another prompts and option logprobs than rank 0"),
        ([{}, {"eos_token_id": [3]}], "another option eos_token_id than rank 0"),
    ):
        for found in two.run(tasks.call_with, "differs", options):
            assert named in found, found
    first, second = two.run(tasks.call_with, "differs", [{}, {"top_p": 7.0}])
    assert "rank 1 refused the arguments: ValueError" in first
    assert second.startswith("ValueError: top_p")
    for found in two.run(tasks.warm_up_with, "differs", [(1,), (2,)]):
        assert "rank 1 got another warm-up than rank 0" in found, found
    first, second = two.run(tasks.warm_up_with, "differs", [(1,), (99,)])
    assert "rank 1 refused the arguments: ValueError: num_speculative_tokens=99" in first
    assert second.startswith("ValueError: num_speculative_tokens=99")
    assert two.run(tasks.warm_up_with, "differs", [("auto",), ("auto",)]) == ["ready"] * 2
    assert two.run(tasks.text, "differs", {}) == one({"pair": pair}, [{}]) * 2, "it stays usable"


def test_a_generator_that_differs_on_one_rank_is_refused_by_all(pair: Pair, two: Processes) -> None:
    same = {"pair": pair, "tensor_parallel": 2}
    for options, named in (
        ([same, {**same, "pair": (pair[1], pair[1])}], "another checkpoint"),
        ([same, {**same, "max_batch_size": 3}], "another option max_batch_size than"),
        ([same, {**same, "prefill_budget": 64}], "another option prefill_budget than"),
        ([same, {**same, "draft_tensor_parallel": "split"}], "another draft_tensor_parallel"),
    ):
        for found in two.run(tasks.open_with, options):
            assert named in found, found
    first, second = two.run(tasks.open_with, [same, {**same, "pair": ("/nowhere/at/all", None)}])
    assert "rank 1 refused" in first
    assert second.startswith("CheckpointError")
    for wrong, error in (
        ({"exact": None}, "ValueError: exact must be True or False"),
        ({"draft_tensor_parallel": "halved"}, "UnsupportedOption: draft_tensor_parallel='halved' is not supported"),
        ({"tensor_parallel": 4}, "UnsupportedOption: tensor_parallel=4, and there are 2 processes"),
        ({"tensor_parallel": 3}, "UnsupportedOption: tensor_parallel=3 is not supported"),
        ({"proposer": "draft"}, "ValueError: proposer str has no propose"),
    ):  # what a rank can tell from its own arguments ends the others' wait, too
        first, second = two.run(tasks.open_with, [same, {**same, **wrong}])
        assert second.startswith(error), second
        assert "rank 1 refused the arguments" in first, first
    # the shorter rows of one rank are those of all
    two.run(tasks.open_generator, "short", same)
