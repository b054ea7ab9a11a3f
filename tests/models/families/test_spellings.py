"""Every family's checkpoint as it was published before transformers 5 and as it is saved since is one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from tests.helpers.families import FAMILIES, YARN, decoder, logits_of, make_family

# transformers gives the rope_theta of an old file to full layers alone, and the others the one that all published have
OLMO3 = {
    "full_attention": {**YARN, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
TOP = ("rope_theta", "partial_rotary_factor")  # what stood beside rope_scaling


def old_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config of transformers 5 as versions before it had them."""
    new = config.pop("rope_parameters")
    if "full_attention" not in new:
        top = {name: new[name] for name in TOP if name in new}
        rest = {name: value for name, value in new.items() if name not in TOP}
        kind = rest.pop("rope_type")
        # the oldest files say `type`
        return {**top, "rope_scaling": None if kind == "default" else {"type": kind, **rest}}
    full, sliding = new["full_attention"], new["sliding_attention"]
    scaling = {name: value for name, value in full.items() if name != "rope_theta"}
    found = {"rope_theta": full["rope_theta"], "rope_scaling": scaling}
    if config["model_type"] == "gemma3_text":
        found["rope_local_base_freq"] = sliding["rope_theta"]
    else:
        assert sliding == {"rope_type": "default", "rope_theta": full["rope_theta"]}
    return found


def old_names(tensors: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """As a base model saves them, without `model.`; a tied head is stored, too."""
    named = {name.removeprefix("model."): value for name, value in tensors.items()}
    if tied:
        named["lm_head.weight"] = named["embed_tokens.weight"].clone()
    return named


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "gemma4"])  # which has no old files
def test_old_and_new_files_are_one_model(family: str, tmp_path: Path) -> None:
    changes = {"rope_parameters": OLMO3} if family == "olmo3" else {}
    make_family(family, **changes).save_pretrained(tmp_path)
    ids, found = torch.arange(5, 35)[None], []
    for old in (False, True):
        if old:
            config = json.loads((tmp_path / "config.json").read_text())
            config |= {**old_rope(config), "torch_dtype": config.pop("dtype")}
            assert "rope_parameters" not in config
            (tmp_path / "config.json").write_text(json.dumps(config))
            path = tmp_path / "model.safetensors"
            save_file(old_names(load_file(path), "lm_head.weight" not in load_file(path)), path, {"format": "pt"})
        checkpoint = resolve(tmp_path, role="target")
        weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
        found.append((checkpoint.native, logits_of(decoder(checkpoint.native, weights), ids)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
