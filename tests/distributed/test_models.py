"""Learned heads, targets whose layers are not Llama's, and hosted ones, on two processes: the text of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastspec.models.hosted.info import hosted_info
from tests.distributed import tasks
from tests.distributed.conftest import SIZES
from tests.distributed.test_generator import one
from tests.helpers import dflash, heads, hybrid, mtp
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.families import make_family
from tests.helpers.hosted import fill
from tests.helpers.model_table import tiny_config
from tests.helpers.rank_processes import Processes

Options = dict[str, Any]
CALLS: list[Options] = [
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 3},
    {**tasks.SAMPLED, "seed": 7, "num_speculative_tokens": 3},
]
HEAD = {"vocab": 128, "target_hidden": 64}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of four layers, with a head of its own, whose rows are cut."""
    more = {"vocab_size": 128, "num_hidden_layers": 4, "head_dim": 16, "tie_word_embeddings": False, **SIZES}
    return str(make_checkpoint(tmp_path_factory.mktemp("target") / "t", "llama3", seed=1, **more))


def eagle3(path: Path, target: str, **more: Any) -> Options:
    head = heads.write_eagle3(path, heads.eagle3_tensors(**{**HEAD, **more}), vocab=128)
    return {"pair": (target, str(head)), "feature_layers": (1, 2, 3)}


def eagle3_shared(path: Path, target: str) -> Options:
    more = {"hidden": 64, "inner": 96, "own_head": False, "own_embed": False, "drafted": 128}
    return eagle3(path, target, **more)


def dflash_shared(path: Path, target: str) -> Options:
    head = dflash.write_z_lab(path, dflash.Head(64, 128, target_layers=4))
    return {"pair": (target, str(head))}


def mtp_layer(path: Path, target: str) -> Options:
    mtp.write_target(path, "mtp", vocab_size=128, num_attention_heads=8, num_key_value_heads=2)
    return {"pair": (str(path), "mtp")}


def mtp_in_8_bits(path: Path, target: str) -> Options:
    mtp.write_target(path, "nextn", vocab_size=128, num_attention_heads=8, num_key_value_heads=2, hidden_size=128)
    return {"pair": (str(path), "mtp"), "draft_quantization": "int8", "draft_vocab": tuple(range(40, 100))}


def mixture_with_mtp(path: Path, target: str) -> Options:
    mtp.write_glm(path)
    return {"pair": (str(path), "mtp")}


def mixture(path: Path, target: str) -> Options:
    make_family("gpt_oss").save_pretrained(path)
    return {"pair": (str(path), None), "lookup": True}


def hybrid_experts(path: Path, target: str) -> Options:
    hybrid.make_hybrid("next").save_pretrained(path)
    return {"pair": (str(path), None), "lookup": True}


def hybrid_with(head: Callable[..., Options]) -> Callable[..., Options]:
    """A way in which a target with recurrent layers and experts has a head."""

    def way(path: Path, target: str) -> Options:
        made = hybrid_experts(path / "hybrid", target)
        return head(path / "head", made["pair"][0])

    return way


def hosted(path: Path, target: str, name: str = "gpt_neox") -> Options:
    config = tiny_config(name)
    fill(hosted_info(config).kind(config)).save_pretrained(path)
    return {"pair": (str(path), str(path)), "draft_tensor_parallel": "split"}


def hosted_experts(path: Path, target: str) -> Options:
    return hosted(path, target, "ernie4_5_moe")


WAYS: dict[str, Callable[..., Options]] = {
    "EAGLE-3": eagle3,
    "EAGLE-3 with the target's matrices": eagle3_shared,
    "DFlash with the target's matrices": dflash_shared,
    "MTP layer": mtp_layer,
    "MTP layer in 8 bits, of few ids": mtp_in_8_bits,
    "experts, and an MTP layer of experts": mixture_with_mtp,
    "experts with biases": mixture,
    "recurrent layers and experts": hybrid_experts,
    "recurrent layers, and EAGLE-3": hybrid_with(eagle3),
    "recurrent layers, and DFlash": hybrid_with(dflash_shared),
    "hosted, and its own draft": hosted,
    "hosted experts": hosted_experts,
}


SLOW = (
    *("EAGLE-3", "MTP layer", "experts with biases", "hosted experts"),
    *("recurrent layers, and EAGLE-3", "recurrent layers, and DFlash"),
)
QUICK = [way for way in WAYS if way not in SLOW]


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_two_ranks_give_the_text_of_one(way: str, target: str, two: Processes, tmp_path: Path) -> None:
    options = WAYS[way](tmp_path / "made", target)
    want = one(dict(options), CALLS)
    assert want[0] == want[1], "drafts change nothing"
    assert want[0] != want[2]
    said = two.run(tasks.open_generator, way, {**options, "tensor_parallel": 2})
    assert all("the same text on 1" in each for each in said), said
    assert two.run(tasks.texts, way, CALLS) == [want, want]


def test_a_head_is_not_cut(target: str, two: Processes, tmp_path: Path) -> None:
    options = {**eagle3(tmp_path / "head", target), "tensor_parallel": 2, "draft_tensor_parallel": "split"}
    for said in two.run(tasks.open_generator, "cut", options):
        assert "is a head, which is never split" in said, said
