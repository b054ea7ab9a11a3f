"""`fastspec quantize --calibrate`: int4 that is rounded for the activations of a text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from fastspec.cli.app import app
from fastspec.demo import demo_pair
from fastspec.errors import UnsupportedOption
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.rounding import rounded
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.checkpoints.quantised import activations
from fastspec.models.checkpoints.quantised.feedback import rounded_with_feedback
from fastspec.models.checkpoints.quantised.write import write_quantised

TARGET = demo_pair()[0]
TEXT = Path(activations.__file__).read_text(encoding="utf-8")


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "WINDOW", 32)
    monkeypatch.setattr(activations, "WINDOWS", 8)


def loss(of: Tensor, values: Tensor, moment: Tensor) -> float:
    error = (of - values).double()
    return float(((error @ moment.double()) * error).sum())


def test_products_with_inputs_like_those_measured_change_less() -> None:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=made) @ torch.randn(16, 128, generator=made)
    values = torch.randn(24, 128, generator=made).bfloat16()
    kind, moment = CodesKind("int4", (1, 64)), x.T @ x
    found = rounded_with_feedback(values, kind, moment)
    plain = rounded(values, kind)
    assert found.kind == kind
    assert torch.equal(found.scales.bfloat16().float(), found.scales), "stored without a change"
    less = loss(found.dequantise(torch.float32), values, moment) / loss(plain.dequantise(torch.float32), values, moment)
    assert less < 0.1  # inputs have 16 directions of 128: most of an error can be moved to the others


def test_inputs_that_do_not_depend_on_each_other_leave_nothing_to_make_up_for() -> None:
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    kind = CodesKind("int4", (1, 32))
    for moment in (torch.eye(64), torch.zeros(64, 64)):
        found, plain = rounded_with_feedback(values, kind, moment), rounded(values, kind)
        differ = (found.dequantise(torch.float32) - values).square().sum() / (
            plain.dequantise(torch.float32) - values
        ).square().sum()
        assert abs(float(differ) - 1) < 1e-3  # the same search; two forms of an error may differ in the last bit


def test_moments_are_those_of_the_model_s_own_inputs(short_windows: None) -> None:
    ids = list(range(300))
    found = activations.Activations(TARGET, ids, torch.device("cpu")).moments(
        ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.9.mlp.up_proj"]
    )
    model = AutoModelForCausalLM.from_pretrained(TARGET)
    with torch.no_grad():
        first = (
            model.model.layers[0]
            .input_layernorm(model.model.embed_tokens(torch.tensor(ids[:288]).view(9, 32)[::2]))
            .float()
            .flatten(0, 1)
        )
    wanted = first.T @ first
    torch.testing.assert_close(found["model.layers.0.self_attn.q_proj"], wanted, rtol=1e-4, atol=1e-3)  # order of sums
    assert found["model.layers.0.self_attn.v_proj"] is found["model.layers.0.self_attn.q_proj"]
    assert "model.layers.9.mlp.up_proj" not in found, "there is no such layer"


def with_bos(folder: Path) -> None:
    """Lets the tokenizer of a folder put "z" before every text, as others put a BOS token."""
    backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    first = ("z", backend.token_to_id("z"))
    backend.post_processor = TemplateProcessing(single="z $A", special_tokens=[first])
    backend.save(str(folder / "tokenizer.json"))


def test_every_window_begins_as_the_model_s_texts_do(
    short_windows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(TARGET, source)
    assert activations.beginning(AutoTokenizer.from_pretrained(source)) == []
    with_bos(source)
    tokenizer, seen = AutoTokenizer.from_pretrained(source), list[Tensor]()
    begin = activations.beginning(tokenizer)
    assert begin == tokenizer("z", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(activations.Activations, "moments", lambda self, *_: seen.append(self._windows) or {})
    write_quantised(str(source), tmp_path / "q", "int4", calibration=TEXT)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert seen[0].shape[1] == 32
    assert seen[0][:, :1].unique().tolist() == begin
    assert seen[0][0, 1:].tolist() == ids[:31], "the text goes on from window to window"


def test_a_calibrated_checkpoint_loads_and_is_nearer_where_it_matters(short_windows: None, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    source, tokenizer = tmp_path / "source", AutoTokenizer.from_pretrained(TARGET)
    AutoModelForCausalLM.from_pretrained(TARGET, num_hidden_layers=1).save_pretrained(source)
    tokenizer.save_pretrained(source)
    command = ["quantize", str(source), str(tmp_path / "q"), "--calibrate", str(tmp_path / "text")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "rounded to nearest" not in result.output, "every matrix met activations"
    assert result.stderr == "", "transformers shows no bar of its own"

    def layers(source: Path, form: str | None) -> Callable[[int], Tensor]:
        checkpoint = resolve_pair(source, None, (None, None), (form, None))[0]
        weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
        return lambda index: weights.layers[index].mlp[1].unpack()

    calibrated, plain, own = layers(tmp_path / "q", None), layers(source, "int4"), layers(source, None)
    name = "model.layers.0.mlp.down_proj"
    moment = activations.Activations(source, tokenizer(TEXT)["input_ids"], torch.device("cpu")).moments([name])[name]
    assert loss(calibrated(0), own(0), moment) < 0.8 * loss(plain(0), own(0), moment)


def test_every_stage_of_a_calibration_is_told(short_windows: None, tmp_path: Path) -> None:
    """It takes minutes, so a user must see that it goes on."""
    source, stages = tmp_path / "source", list[str]()
    AutoModelForCausalLM.from_pretrained(TARGET, num_hidden_layers=1).save_pretrained(source)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(source)
    write_quantised(str(source), tmp_path / "q", "int4", calibration=TEXT, tell=stages.append)
    windows = [stage for stage in stages if stage.startswith("running window")]
    assert stages[0] == "loading the model that the text runs through"
    assert windows[0] == f"running window 1 of {len(windows)} of the text"
    assert len(windows) == activations._LEAST
    rounding = [stage for stage in stages if stage.startswith("rounding tensor")]
    assert len(rounding) == 7
    assert stages[-1] == "writing model.safetensors"


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="a calibration changes int4 only, got int8"):
        write_quantised(str(TARGET), tmp_path / "q", "int8", calibration=TEXT)
    with pytest.raises(UnsupportedOption, match=r"has \d+ tokens, wanted at least 2048; give a longer one"):
        write_quantised(str(TARGET), tmp_path / "q", "int4", calibration="too short")
    bare = tmp_path / "bare"
    shutil.copytree(TARGET, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(UnsupportedOption, match="has no tokenizer, which a calibration text needs"):
        write_quantised(str(bare), tmp_path / "q", "int4", calibration=TEXT)
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]
