"""Configs of DSpark and DFlash2 heads as they are published: what they come to, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.kernels.select import ops_for
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.heads import dflash2_spec, dspark_spec
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.weights import allocate_head
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.dflash import WRITERS, Head
from tests.helpers.dflash_definition import RELATIVES

VOCAB = 64
HEAD = Head(32, VOCAB, mask_id=10)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "qwen3", vocab_size=VOCAB)


def found_of(target: Path, path: Path, form: str | None = None) -> HeadCheckpoint:
    _, found = resolve_pair(target, path, (None, None), (None, form))
    assert isinstance(found, HeadCheckpoint)
    return found


def written(path: Path, case: str, **changes: Any) -> Path:
    layout, usual, _ = RELATIVES[case]
    return WRITERS[layout](path, replace(HEAD, **(usual | changes)))


def test_a_dspark_head_drafts_from_the_last_token(target: Path, tmp_path: Path) -> None:
    found = found_of(target, written(tmp_path / "a", "DSpark")).spec
    assert isinstance(found, dspark_spec.DSparkSpec)
    assert (found.rank, found.block_size, found.max_drafts, found.rows(7)) == (8, 7, 7, 7)
    assert found.readings == ((1, 2),)
    assert str(found.found) == "DSpark head (layout of DeepSpec)"
    theirs = found_of(target, written(tmp_path / "b", "DSpark of speculators")).spec
    assert (theirs.max_drafts, theirs.rows(7), theirs.vocab_size) == (7, 8, 6)
    assert str(theirs.found) == "DSpark head (layout of speculators)"
    plain = written(tmp_path / "c", "DSpark", markov=0)
    assert not isinstance(found_of(target, plain).spec, dspark_spec.DSparkSpec), "without a Markov head it is a block"


def test_a_dflash2_head_has_convolutions_and_a_selector(target: Path, tmp_path: Path) -> None:
    for case in ("DFlash2", "DFlash2 of speculators"):
        found = found_of(target, written(tmp_path / case, case)).spec
        assert isinstance(found, dflash2_spec.DFlash2Spec)
        assert (found.taps, found.group, found.rank, found.candidates) == (2, 8, 8, 5)
        assert found.causal == (False, False)
        assert found.max_drafts == 7


@pytest.mark.parametrize("case", RELATIVES)
def test_bytes_are_those_that_are_planned(case: str, target: Path, tmp_path: Path) -> None:
    path, cpu = written(tmp_path, case), torch.device("cpu")
    for form in (None, "int8"):
        found, ops = found_of(target, path, form), ops_for(cpu)
        scored, _ = resolve_pair(target, None, (None, None), (None, None))
        options: dict[str, Any] = {"dtype": torch.float32, "device": cpu, "progress": False}
        shared = load_weights(scored, **options)
        made = allocate_head(found, shared, ops=ops, **options).weights
        held = made.decoder.nbytes() + sum(each.nbytes for each in made.others.values())
        held -= sum(each.nbytes for each in (shared.embed, shared.head) if _is_in(each, made.decoder))
        tables = 0 if found.vocab_map is None else 8 * (len(found.vocab_map) + VOCAB)
        assert found.bytes_loaded(torch.float32, cpu, ops) == held + tables


def _is_in(weight: object, decoder: Any) -> bool:
    return weight is decoder.embed or weight is decoder.head


@pytest.mark.parametrize(
    ("case", "fields", "kind", "match"),
    [
        ("DSpark", {"markov_head_type": "rnn"}, UnsupportedModel, r"markov_head_type='rnn' of a DSpark head"),
        ("DSpark", {"final_logit_softcapping": 30.0}, UnsupportedModel, "final_logit_softcapping=30.0"),
        ("DSpark", {"markov_rank": 4}, CheckpointError, r"markov_w1.weight .* shape \[64, 8\], wanted \[64, 4\]"),
        ("DSpark", {"markov_gate": "gru"}, UnsupportedModel, r"markov_gate='gru' .* of this DSpark head is not known"),
        ("DSpark", {"dflash_config": {"left_shift": True}}, UnsupportedModel, r"dflash_config.left_shift=True"),
        ("DSpark", {"projector_type": "dflash2"}, UnsupportedModel, r"projector_type='dflash2' .* wanted 'dspark'"),
        ("DFlash2 of speculators", {"conv_group_size": 5}, UnsupportedModel, "a divisor of hidden_size=32"),
        ("DFlash2 of speculators", {"conv_kernel_size": 9}, UnsupportedModel, "at most block_size=8"),
        ("DFlash2 of speculators", {"selector_top_k": 65}, UnsupportedModel, "at most the 64 ids"),
        ("DFlash2 of speculators", {"selector_rank": None}, UnsupportedModel, "selector_rank=None of a DFlash2 head"),
        ("DFlash2 of speculators", {"beam_width": 4}, UnsupportedModel, r"beam_width=4 .* is not known"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    case: str, fields: dict[str, Any], kind: type[Exception], match: str, target: Path, tmp_path: Path
) -> None:
    path = written(tmp_path, case)
    edit(path / "config.json", **fields)
    with pytest.raises(kind, match=match):
        found_of(target, path)


def test_fields_of_the_target_and_of_the_trainer_are_left_alone(target: Path, tmp_path: Path) -> None:
    """As in published files, into which the target's config was copied."""
    path = written(tmp_path, "DSpark")
    noise = {"attn_output_gate": True, "linear_conv_kernel_dim": 4, "num_anchors": 64, "mtp_num_hidden_layers": 1}
    noise |= {"norm_topk_prob": True, "conv_bias": True, "block_ff_dim": 64}
    edit(path / "config.json", **noise, confidence_temperatures=[1.5, 0.9], architectures=["DFlashDraftModel"])
    assert isinstance(found_of(target, path).spec, dspark_spec.DSparkSpec)


def test_a_damaged_file_is_refused(target: Path, tmp_path: Path) -> None:
    path = written(tmp_path, "DSpark")
    stored = load_file(path / "model.safetensors")
    stored["markov_head.markov_w1.weight"] = stored["markov_head.markov_w1.weight"][:9].contiguous()
    save_file(stored, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has 9 rows, and .* 64 ids"):
        found_of(target, path)
    del stored["markov_head.markov_w2.weight"]
    stored["markov_head.markov_w1.weight"] = torch.zeros(VOCAB, 8)
    save_file(stored, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"markov_w2.weight.* missing"):
        found_of(target, path)
