"""`draft_quantization="auto"`: the estimate, what it leaves as it is, and that the text stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastspec import FastSpecGenerator
from fastspec.config import Config
from fastspec.engine import draft_format
from fastspec.engine.draft_format import SHARES, best_of, share, with_format
from fastspec.errors import UnsupportedOption
from fastspec.kernels.common.code_packing import can_pack_codes
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.pair import AS_STORED, resolve_pair
from fastspec.models.checkpoints.quantised.write import write_quantised
from tests.helpers.checkpoints import make_checkpoint

LARGE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "tie_word_embeddings": False}
MIB = {None: 1000, "fp8": 520, "int8": 520, "int4": 280}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("auto") / "model", "llama3", **LARGE)


def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chooses as where products read codes."""
    keeps = TORCH_OPS.replaced(keeps_codes=lambda shape, kind, *_: can_pack_codes(shape, kind))
    monkeypatch.setattr(draft_format, "ops_for", lambda device: keeps)


def test_fewer_rows_want_fewer_bits() -> None:
    """By the measured shares: codes for as many rows as a pass has, 16 bits where conversion costs more than bytes."""
    assert [best_of(MIB, rows) for rows in (1, 4, 8, 16, 64, 500)] == ["int4", "int4", "int4", "int4", "int4", None]


def test_where_all_are_alike_it_stays_as_stored() -> None:
    """Also where a format is not the slower one: only fewer bytes are a reason."""
    assert best_of(dict.fromkeys(MIB, 1000), 1) is None


def test_shares_are_by_rows() -> None:
    assert share("int4", 1) == 0.71
    assert share("int4", 5) == 0.67
    assert share("int4", 1000) == 0.18
    assert all(0 < value < 1 for rows in SHARES.values() for _, value in rows)


def test_the_format_is_chosen_where_codes_are_kept(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeping(monkeypatch)
    monkeypatch.setattr(draft_format, "LEAST", 0)
    target, draft = resolve_pair(plain, plain, (None, None), (None, None))
    options = {"device": "cpu", "dtype": torch.bfloat16}
    few, many = (with_format(target, draft, Config(max_batch_size=rows, **options)) for rows in (1, 500))
    assert few is not None
    assert many is not None
    assert (few.rounded, many.rounded) == ("int4", None)
    assert isinstance(few, Checkpoint)
    assert isinstance(many, Checkpoint)
    assert (few.chosen, many.chosen) == (True, False)
    assert 'chosen by "auto"' in few.stored
    assert many.stored.startswith(AS_STORED)
    assert "at 500 rows it is fastest" in many.stored


def test_on_a_cpu_it_stays_and_says_so(plain: Path, tmp_path: Path) -> None:
    ids = torch.arange(5, 25)[None] % 97
    options = {"device": "cpu", "max_length": 64, "progress": False}
    with FastSpecGenerator(plain, **options) as generator:
        text = generator.generate(ids, max_new_tokens=30)
    with FastSpecGenerator(plain, plain, draft_quantization="auto", **options) as generator:
        assert torch.equal(generator.generate(ids, max_new_tokens=30), text)
        assert f"format     {AS_STORED}" in generator.explain()
        assert "no format is read with fewer bytes here" in generator.explain()
    write_quantised(str(plain), tmp_path / "q", "int8")
    with FastSpecGenerator(plain, tmp_path / "q", draft_quantization="auto", **options) as generator:
        assert "quantised  " in generator.explain()
        assert '"auto"' not in generator.explain()


def test_a_format_without_a_draft_is_refused(plain: Path) -> None:
    """ "auto", which is the default, chooses nothing then."""
    with pytest.raises(UnsupportedOption, match="draft_quantization='int4', and there is no draft"):
        FastSpecGenerator.plan(plain, draft_quantization="int4", device="cpu")
    assert FastSpecGenerator.plan(plain, draft_quantization="auto", device="cpu").draft_weights == 0


def test_a_draft_that_cannot_be_tried_stays(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes are read from the cache of the GPU, whatever their format; torch.compile and ranks have no codes."""
    keeping(monkeypatch)
    target, draft = resolve_pair(plain, plain, (None, None), (None, None))
    options = {"device": "cpu", "dtype": torch.bfloat16, "max_batch_size": 1}
    small = with_format(target, draft, Config(**options))
    assert small is not None
    assert "reading so few bytes takes almost no time" in small.stored
    monkeypatch.setattr(draft_format, "LEAST", 0)
    shared = with_format(target, draft, Config(**options), alone=False)
    assert shared is not None
    assert '"auto" leaves a draft that is compiled by torch, or beside a target that ranks share' in shared.stored
