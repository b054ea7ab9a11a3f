"""The passes of an EAGLE-3 head against its definition, for every variant and in both layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec.kernels.ops import TORCH_OPS
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.eagle3_spec import Eagle3Spec, PEagleSpec
from fastspec.models.heads.passes import Eagle3, PEagle
from fastspec.models.heads.weights import allocate_head
from fastspec.models.layer_table import DecoderWeights
from fastspec.shapes import UNTILED
from tests.helpers.chain_passes import CLOSE, ROWS, check_passes, fed
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.heads import HIDDEN, LAYERS, VOCAB, eagle3_tensors, peagle_tensors, write_eagle3, write_speculators
from tests.helpers.heads_definition import Definition, ParallelDefinition

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama3", num_hidden_layers=LAYERS)


def resolved(target: Path, head: Path) -> tuple[HeadCheckpoint, DecoderWeights]:
    scored, found = resolve_pair(target, head, (None, None), (None, None))
    assert isinstance(found, HeadCheckpoint)
    return found, load_weights(scored, dtype=torch.float32, device=CPU, progress=False)


def built(target: Path, head: Path) -> tuple[Eagle3, DecoderWeights]:
    found, shared = resolved(target, head)
    pending = allocate_head(found, shared, dtype=torch.float32, device=CPU, ops=TORCH_OPS, progress=False)
    pending.fill()
    spec = found.spec
    assert isinstance(spec, Eagle3Spec)
    sizes = spec.num_kv_heads, spec.head_dim
    cache = PagedKVCache.allocate(spec.num_layers, 5, 4, *sizes, dtype=torch.float32, device=CPU)
    return Eagle3(spec, pending.weights, cache, TORCH_OPS, max_positions=16, batch=1, max_queries=8), shared


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # how tensors are made, and what the config says
    "plain": ({}, {}),
    "norm_before_residual": ({}, {"norm_before_residual": True}),
    "norm_output": ({}, {"norm_output": True}),
    "norm_before_fc": ({"norm_before_fc": True}, {"norm_before_fc": True}),
    "fc_norm": ({"fc_norm": True}, {"fc_norm": True}),
    "EAGLE-3.1": ({"fc_norm": True}, {"fc_norm": True, "norm_output": True}),
    "tied": ({"drafted": VOCAB, "own_head": False}, {"tie_word_embeddings": True}),
    "qwen3": ({"qk_norm": True, "dim": 8}, {}),
    "biases": ({"attention_bias": True, "fc_bias": True}, {}),
    "two layers": ({"layers": 2, "qk_norm": True, "dim": 16}, {"norm_before_residual": True, "norm_output": True}),
    "whole vocabulary": ({"drafted": VOCAB}, {}),
    "shared": ({"hidden": HIDDEN, "drafted": VOCAB, "own_embed": False, "own_head": False}, {}),
    "logit_scale": ({}, {"logit_scale": 0.25}),
}


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_passes_are_the_definition(variant: str, layout: str, target: Path, tmp_path: Path) -> None:
    made, fields = VARIANTS[variant]
    tensors = eagle3_tensors(**made)
    if layout == "speculators":
        inner = {name: value for name, value in fields.items() if name == "logit_scale"}
        rest = {name: value for name, value in fields.items() if name not in inner}
        write_speculators(tmp_path, tensors, inner=inner, **rest)
    else:
        write_eagle3(tmp_path, tensors, **fields)
    model, shared = built(target, tmp_path)
    flags = {name: value for name, value in fields.items() if name in ("norm_before_residual", "norm_output")}
    definition = Definition(
        tensors,
        dim=made.get("dim", 16),
        scale=fields.get("logit_scale", 1.0),
        embed=shared.embed.unpack(),
        lm_head=tensors["embed_tokens.weight"] if "tie_word_embeddings" in fields else shared.head.unpack(),
        **flags,
    )
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(ROWS, 3, HIDDEN, generator=generator)
    following = torch.randint(VOCAB, (ROWS,), generator=generator)
    g = definition.condense(features)
    torch.testing.assert_close(model.condense(features[None], UNTILED)[0], g, **CLOSE)
    whole, x = check_passes(model, definition, g, following)
    torch.testing.assert_close(model.feature(whole), definition.feature(x), **CLOSE)


@pytest.mark.parametrize(
    ("made", "fields"), [({}, {}), ({"fc_norm": True, "layers": 3}, {"fc_norm": True, "norm_before_residual": True})]
)
@torch.inference_mode()
def test_masks_in_parallel_are_the_definition(
    made: dict[str, Any], fields: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    """P-EAGLE: the rows of a text were absorbed; the last one and masks behind it go through in one pass."""
    tensors, places = peagle_tensors(**made), 4
    head = write_speculators(tmp_path, tensors, speculators_model_type="peagle", mask_token_id=9, **fields)
    found, shared = resolved(target, head)
    pending = allocate_head(found, shared, dtype=torch.float32, device=CPU, ops=TORCH_OPS, progress=False)
    pending.fill()
    assert isinstance(found.spec, PEagleSpec)
    sizes = found.spec.num_layers, 5, 4, found.spec.num_kv_heads, found.spec.head_dim
    cache = PagedKVCache.allocate(*sizes, dtype=torch.float32, device=CPU)
    cache.keys.fill_(torch.nan)
    model = PEagle(found.spec, pending.weights, cache, TORCH_OPS, max_positions=16, batch=1, max_queries=8)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(ROWS, 3, HIDDEN, generator=generator)
    text = torch.randint(VOCAB, (ROWS + 1,), generator=generator)
    g = model.condense(features[None], UNTILED)
    model.absorb(g, fed(text[1:], 0, ROWS))
    ids = torch.cat((torch.zeros(ROWS - 1, dtype=torch.int64), text[-1:], torch.full((places - 1,), 9)))
    x = model.block(g[:, -1:], fed(ids, ROWS - 1, ROWS + places - 1))
    flags = {name: value for name, value in fields.items() if name == "norm_before_residual"}
    definition = ParallelDefinition(tensors, mask_id=9, **flags)
    torch.testing.assert_close(model.logits(x, UNTILED)[0], definition.laws(features, text, places), **CLOSE)


@torch.inference_mode()
def test_scaled_positions_of_the_head_are_its_own(target: Path, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    tensors = eagle3_tensors()
    model, _ = built(target, write_eagle3(tmp_path, tensors, rope_scaling=scaling, rope_theta=500.0))
    inv_freq = 1.0 / 500.0 ** (torch.arange(0, 16, 2) / 16) / 4
    definition = Definition(tensors, inv_freq=inv_freq)
    g, following = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(2)), torch.arange(ROWS)
    found = model.drafted(g[None], fed(following, 0, ROWS))[0]
    torch.testing.assert_close(found, definition.behind(g, following), **CLOSE)


@torch.inference_mode()
def test_sliding_layers_have_their_window(target: Path, tmp_path: Path) -> None:
    tensors = eagle3_tensors(qk_norm=True)
    inner = {"layer_types": ["sliding_attention"], "sliding_window": 4}
    model, _ = built(target, write_speculators(tmp_path, tensors, inner=inner))
    g, following = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(2)), torch.arange(ROWS)
    found = model.drafted(g[None], fed(following, 0, ROWS))[0]
    torch.testing.assert_close(found, Definition(tensors, window=4).behind(g, following), **CLOSE)
    assert not torch.allclose(found, Definition(tensors).behind(g, following), **CLOSE)


def test_what_is_shared_is_not_copied(target: Path, tmp_path: Path) -> None:
    tensors = eagle3_tensors(hidden=HIDDEN, own_embed=False)
    found, shared = resolved(target, write_eagle3(tmp_path, tensors))
    pending = allocate_head(found, shared, dtype=torch.float32, device=CPU, ops=TORCH_OPS, progress=False)
    assert pending.weights.decoder.embed is shared.embed
    assert pending.weights.decoder.head is not shared.head
    stored = sum(tensor.numel() for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    assert found.spec.weight_bytes(torch.float32) == 4 * stored
    tables = 8 * (len(tensors["d2t"]) + VOCAB)
    assert found.bytes_loaded(torch.float32, CPU, TORCH_OPS) == 4 * stored + tables
