"""Hosted models of quantised checkpoints: their text is that of the values that are meant, and codes are kept."""

from __future__ import annotations

import copy
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fastspec import FastSpecGenerator
from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.kernels.common.code_packing import can_pack_codes
from fastspec.kernels.common.rounding import kind_for, rounded
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints import resolve as resolve_module
from fastspec.models.checkpoints.pair import rounded_to
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.hosted.info import HostedInfo, hosted_info
from fastspec.models.hosted.load import load_hosted
from fastspec.models.hosted.model import HostedModel
from fastspec.models.hosted.swaps import Product, is_product
from fastspec.models.hosted.updates import HostedWeights, checked_hosted_update
from tests.helpers import checkpoints, quantised
from tests.helpers.hosted import config_of, make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]
CPU = torch.device("cpu")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
KINDS = {
    "gptq": (GPTQ, quantised.gptq(4, 64, symmetric=True, v2=False)),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, quantised.fp8_tensor),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hosted") / "model"
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "max_position_embeddings": 128}
    make_model("stablelm", **sizes).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_the_values_that_are_meant(plain: Path, tmp_path: Path, kind: str) -> None:
    settings, pack = KINDS[kind]
    meant = quantised.write(plain, tmp_path / "q", settings, pack, keep=("down_proj",))
    shutil.copytree(plain, tmp_path / "meant")
    save_file(meant, tmp_path / "meant" / "model.safetensors", metadata={"format": "pt"})
    ids, texts = torch.arange(5, 25)[None] % 97, []
    options: dict[str, Any] = {"device": "cpu", "max_length": 64, "progress": False, "dtype": "float32"}
    for name in ("q", "meant"):
        with FastSpecGenerator(tmp_path / name, tmp_path / "q", num_speculative_tokens=2, **options) as made:
            texts.append(made.generate(ids, max_new_tokens=12))
            assert ("12 matrices in" in made.explain().split("draft  ")[0]) == (name == "q")
    assert torch.equal(*texts)


def test_codes_are_kept_where_the_products_read_them(plain: Path, tmp_path: Path) -> None:
    """As on a GPU: matrices stay quantised, the plan counts their bytes, and their values are those meant."""
    ops = TORCH_OPS.replaced(keeps_codes=lambda shape, kind, *_: can_pack_codes(shape, kind))
    settings, pack = KINDS["gptq"]
    meant = quantised.write(plain, tmp_path / "q", settings, pack)
    checkpoint = resolve(tmp_path / "q", role="target")
    info = checkpoint.spec
    assert isinstance(info, HostedInfo)
    sizes = {"num_pages": 4, "page_size": 16, "max_positions": 64, "batch": 1, "max_queries": 2}
    model = HostedModel(info, ops, dtype=torch.float32, device=CPU, **sizes)
    load_hosted(checkpoint, model, dtype=torch.float32, device=CPU, release=False)
    parts = model.base.named_modules(prefix="model")
    products = {name: part for name, part in parts if isinstance(part, Product)}
    codes = {name for name, part in products.items() if part.weight.format == "codes"}
    assert codes == {name.removesuffix(".weight") for name in meant if "proj" in name}
    for name in codes:
        assert torch.equal(products[name].weight.unpack(), meant[f"{name}.weight"]), name
    kept = sum(products[name].weight.nbytes for name in codes)
    whole = sum(4 * meant[f"{name}.weight"].numel() for name in codes)
    assert checkpoint.bytes_loaded(torch.float32, CPU, ops) == info.weight_bytes(torch.float32) - whole + kept
    assert checkpoint.bytes_loaded(torch.float32, CPU, TORCH_OPS) == info.weight_bytes(torch.float32)

    other = make_model("stablelm", seed=1, hidden_size=128, intermediate_size=128, head_dim=32)
    other.config.max_position_embeddings = 128
    other.save_pretrained(tmp_path / "other")
    new = quantised.write(tmp_path / "other", tmp_path / "new", settings, pack)
    weights = HostedWeights(checkpoint, model, torch.float32, CPU)
    with pytest.raises(UnsupportedOption, match="is hosted and stored quantised, and is updated from a directory"):
        checked_hosted_update(new, weights)
    with pytest.raises(CheckpointError, match="is stored in another format than the target"):
        checked_hosted_update(tmp_path / "other", weights)
    update = checked_hosted_update(tmp_path / "new", weights)
    assert update.whole
    update.copy()
    for name in codes:
        assert torch.equal(products[name].weight.unpack(), new[f"{name}.weight"]), name
        assert not torch.equal(meant[f"{name}.weight"], new[f"{name}.weight"])


def test_what_is_not_read_is_refused_before_weights_are(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("stablelm")
    raw, part = {**config.to_dict(), "quantization_config": GPTQ}, replace(hosted_info(config), whole="A larger one")
    monkeypatch.setattr(resolve_module, "hosted_info", lambda config: part)
    with pytest.raises(UnsupportedModel, match="quantised text parts are read for native families alone"):
        resolve_module._hosted_info(tmp_path, raw, config)
    monkeypatch.undo()
    shutil.copytree(plain, tmp_path / "unlike")
    checkpoints.edit(tmp_path / "unlike" / "config.json", quantization_config=GPTQ)
    with pytest.raises(CheckpointError, match="says 'gptq', and no matrix is stored so"):
        resolve(tmp_path / "unlike", role="target")


@pytest.mark.parametrize(("name", "form"), [("stablelm", "int4"), ("gpt2", "fp8"), ("opt", "int8")])
def test_products_are_rounded_while_they_are_loaded(name: str, form: str) -> None:
    """Their values are those of a module whose products were rounded before, and a draft changes no text."""
    sizes = {"gpt2": {"n_embd": 64}, "opt": {"hidden_size": 64, "ffn_dim": 64, "word_embed_proj_dim": 64}}
    model = make_model(name, **sizes.get(name, {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}))
    meant = copy.deepcopy(model)
    head = meant.get_output_embeddings()
    for part in (part for part in meant.modules() if is_product(part) and part is not head):
        flat = part.weight.data if isinstance(part, nn.Linear) else part.weight.data.t()
        kind = kind_for(form, tuple(flat.shape))  # type: ignore[arg-type]
        assert kind is not None
        flat.copy_(rounded(flat.contiguous(), kind).dequantise(torch.float32))
    options: dict[str, Any] = {"device": "cpu", "max_length": 64, "progress": False, "dtype": "float32"}
    call: dict[str, Any] = {"max_new_tokens": 10, "logprobs": 1, "eos_token_id": [], "return_dict_in_generate": True}
    found: list[Any] = []
    for given, rounds in ((model, {"target_quantization": form}), (meant, {}), (model, {})):
        with FastSpecGenerator(given, model, draft_quantization=form, **rounds, **options) as made:
            plain, drafted = (made.generate([list(range(5, 25))], num_speculative_tokens=k, **call) for k in (0, 3))
            assert plain.new_tokens == drafted.new_tokens  # type: ignore[union-attr]
            assert (f"rounded to {form}" in made.explain().split("draft  ")[0]) == bool(rounds)
            found.append((plain.new_tokens, plain.logprobs))  # type: ignore[union-attr]
    assert found[0] == found[1] != found[2]


def test_rounded_products_stay_in_codes_where_kernels_read_them() -> None:
    ops = TORCH_OPS.replaced(keeps_codes=lambda shape, kind, *_: can_pack_codes(shape, kind))
    live = make_model("stablelm", hidden_size=128, intermediate_size=128, head_dim=32, vocab_size=128)
    for role in ("target", "draft"):
        checkpoint = rounded_to(resolve(live, role=role), "fp8")
        info = checkpoint.spec
        assert isinstance(info, HostedInfo)
        sizes = {"num_pages": 4, "page_size": 16, "max_positions": 64, "batch": 1, "max_queries": 2}
        model = HostedModel(info, ops, dtype=torch.float32, device=CPU, **sizes)
        load_hosted(checkpoint, model, dtype=torch.float32, device=CPU, release=False)
        held = {name: part.weight for name, part in model.module.named_modules() if isinstance(part, Product)}
        held |= {name: part.weight for name, part in model.base.named_modules() if isinstance(part, Product)}
        codes = {name for name, weight in held.items() if weight.format == "codes"}
        assert codes == {name for name in held if name != "lm_head" or role == "draft"}
        kept = sum(held[name].nbytes - 4 * math.prod(held[name].shape) for name in codes)
        assert checkpoint.bytes_loaded(torch.float32, CPU, ops) == info.weight_bytes(torch.float32) + kept
