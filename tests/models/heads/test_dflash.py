"""The passes of a DFlash head against the straight definition, for every setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.kernels.reference import AttendCall
from fastspec.kernels.select import ops_for
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.dflash_spec import DFlashSpec
from fastspec.models.heads.passes import DFlash, mask_embedding
from fastspec.models.heads.weights import allocate_head
from fastspec.shapes import KEY_BLOCK, ForwardBatch, Tiling
from tests.helpers import dflash_definition as definition
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.devices import devices
from tests.helpers.dflash import WRITERS, Head
from tests.helpers.dflash_definition import CASES

VOCAB = 40
HEAD = Head(32, VOCAB, block_size=16, mask_id=10, ids=(0, 2))
WIDE = Head(256, 512, heads=4, kv_heads=2, dim=64, inner=512, block_size=16, mask_id=10, ids=(0, 2), std=0.06)
# sums of fp32 products in another order, through two layers; logits are numbers of some units
TOLERANCE = 1e-4
PAGE = 16


def built(
    target: Path,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[int],
    n: int,
    ops: Ops | None = None,
) -> DFlash:
    """The head of a checkpoint, over a cache of NaN with room for these rows."""
    scored, found = resolve_pair(target, path, (None, None), (None, None))
    assert isinstance(found, HeadCheckpoint)
    assert isinstance(found.spec, DFlashSpec)
    ops, options = ops or ops_for(device), {"dtype": dtype, "device": device, "progress": False}
    shared = load_weights(scored, ops=ops, **options)
    pending = allocate_head(found, shared, ops=ops, **options)
    pending.fill()
    spec, pages = found.spec, max(lengths) // PAGE + 3
    sizes = (spec.num_layers, 1 + len(lengths) * pages, PAGE, spec.num_kv_heads, spec.head_dim)
    cache = PagedKVCache.allocate(*sizes, dtype=dtype, device=device)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    most = pages * PAGE
    return DFlash(spec, pending.weights, cache, ops, max_positions=most, batch=len(lengths), max_queries=n)


def logits_of(head: DFlash, features: Tensor, lengths: list[int], last: list[int], n: int) -> Tensor:
    """Logits [B, n, ids] of blocks behind contexts of these lengths, that were stored in pieces of a few sizes."""
    device, pages = features.device, max(lengths) // PAGE + 3
    order = torch.randperm(len(lengths) * pages, generator=torch.Generator().manual_seed(5))
    table = (1 + order).view(len(lengths), pages).to(device)
    blocks = max(lengths) // KEY_BLOCK + 1
    start = 0
    for size in (17, 1, 5, max(lengths)):
        at = torch.arange(start, min(start + size, max(lengths)), device=device).expand(len(lengths), -1)
        known = at < torch.tensor(lengths, device=device)[:, None]
        rows = ForwardBatch(at, torch.where(known, at, 0), known, table, blocks, Tiling(64, 64))
        head.store_context(features[:, start : start + size], rows)
        start += size
    ids = torch.tensor([[each, *[head.head.mask_id] * (n - 1)] for each in last], device=device)
    positions = torch.tensor(lengths, device=device)[:, None] + torch.arange(n, device=device)
    blocks = (max(lengths) + n) // KEY_BLOCK + 1
    written = torch.ones_like(positions, dtype=torch.bool)
    x = head.block(ForwardBatch(ids, positions, written, table, blocks, Tiling(64, 64)))
    return head.logits(x, Tiling(64, 64))


def expected(
    target: Path, path: Path, head: Head, rules: definition.Rules, features: Tensor, last: int, dtype: torch.dtype
) -> Tensor:
    """The same of one row by the definition in fp64, of weights as they are loaded."""
    tensors = {
        name: tensor.to(dtype).double() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    shared = {name: tensor.to(dtype).double() for name, tensor in load_file(target / "model.safetensors").items()}
    embed = tensors.get("embed_tokens.weight", shared["model.embed_tokens.weight"])
    lm_head = tensors.get("lm_head.weight", shared.get("lm_head.weight"))
    assert lm_head is not None
    return definition.logits(head, rules, tensors, features.double(), embed[[last, *[10] * 6]], lm_head)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "qwen3", vocab_size=VOCAB)


def error(
    target: Path, path: Path, head: Head, rules: definition.Rules, device: str, ops: Ops | None = None, most: int = 253
) -> float:
    """The largest difference of a logit; with 253 tokens of context a block lies in two blocks of keys."""
    lengths, last, n = [most, 30], [3, 7], 7
    features = torch.randn(2, most, 2, head.hidden, generator=torch.Generator().manual_seed(1))
    on = torch.device(device, 0) if device == "cuda" else torch.device(device)
    made = built(target, path, on, torch.float32, lengths, n, ops)
    with torch.inference_mode():
        found = logits_of(made, features.to(on), lengths, last, n).cpu()
    worst = 0.0
    for row, length in enumerate(lengths):
        wanted = expected(target, path, head, rules, features[row, :length], last[row], torch.float32)
        worst = max(worst, float((found[row] - wanted).abs().max()))
    return worst


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_definitions(case: str, device: str, target: Path, tmp_path: Path) -> None:
    layout, changes, rules = CASES[case]
    head = replace(HEAD, **changes)
    path = WRITERS[layout](tmp_path, head)
    assert error(target, path, head, replace(definition.full(head), **rules), device) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("whole vocabulary", {"causal": (True, True)}),
        ("a window", {"windows": (8, None)}),
        ("a window", {"causal": (False, False)}),
        ("a window, and no causality", {"anchored": False}),
        ("sinks and scales", {"value_scale": 1.0}),
        ("sinks and scales", {"softcap": None}),
    ],
)
def test_the_definition_with_another_rule_is_another(
    case: str, other: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    layout, changes, rules = CASES[case]
    head = replace(HEAD, **changes)
    path = WRITERS[layout](tmp_path, head)
    assert error(target, path, head, replace(definition.full(head), **rules | other), "cpu") > 10 * TOLERANCE


def test_kernels_agree_in_the_interpreter(target: Path, tmp_path: Path) -> None:
    """The kernels that store heads and attend, with the torch definitions of all else."""
    triton_ops = pytest.importorskip("fastspec.kernels.triton_ops")
    if torch.cuda.is_available():
        pytest.skip("kernels run for real there")

    def attend(call: AttendCall, work: Any) -> Tensor:
        out: Tensor = triton_ops.attend_paged(call, work.attend)
        return out

    ops = TORCH_OPS.replaced(
        workspace=triton_ops.TRITON_OPS.workspace, attend=attend, store_heads=triton_ops.store_heads
    )
    layout, changes, rules = CASES["a window, and no causality"]  # and a layer without a window
    head = replace(HEAD, **changes)
    path = WRITERS[layout](tmp_path, head)
    assert error(target, path, head, replace(definition.full(head), **rules), "cpu", ops, most=45) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["whole vocabulary", "a window", "a window, and no causality"])
@pytest.mark.parametrize("length", [40, 700, 4700])
def test_kernels_agree_in_bfloat16(case: str, length: int, tmp_path: Path) -> None:
    """By every kernel of decoding: of few keys, of many splits, and of rows far behind."""
    target = make_checkpoint(
        tmp_path / "target", "qwen3", hidden_size=256, head_dim=64, vocab_size=512, dtype=torch.bfloat16, std=0.06
    )
    layout, changes, rules = CASES[case]
    head = replace(WIDE, **changes)
    path = WRITERS[layout](tmp_path / "head", head, torch.bfloat16)
    features = torch.randn(1, length, 2, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    made = built(target, path, torch.device("cuda", 0), torch.bfloat16, [length], 7)
    with torch.inference_mode():
        found = logits_of(made, features.cuda(), [length], [3], 7).cpu()[0].double()
    wanted = expected(target, path, head, replace(definition.full(head), **rules), features[0], 3, torch.bfloat16)
    # activations are rounded to 8 bits some ten times on their way
    assert float((found - wanted).norm() / wanted.norm()) < 0.03


def test_bytes_are_those_that_are_planned(target: Path, tmp_path: Path) -> None:
    """What is shared with the target is not counted; keys and values of the context are there twice."""
    changes = {"draft_vocab": 9, "bias": True, "sinks": True, "more": {"attention_sink_bias": True}}
    for number, (layout, change) in enumerate({"z-lab": {}, "speculators": changes}.items()):
        path = WRITERS[layout](tmp_path / str(number), replace(HEAD, **change))
        scored, found = resolve_pair(target, path, (None, None), (None, None))
        assert isinstance(found, HeadCheckpoint)
        cpu = torch.device("cpu")
        options = {"dtype": torch.float32, "device": cpu, "progress": False}
        shared, ops = load_weights(scored, **options), ops_for(cpu)
        made = allocate_head(found, shared, ops=ops, **options).weights
        held = made.decoder.nbytes() - shared.embed.nbytes - (0 if change else shared.head.nbytes)
        held += sum(each.nbytes for each in made.others.values())
        assert found.spec.weight_bytes(torch.float32) == held


def test_a_damaged_embedding_of_the_mask_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mask_embedding.safetensors"
    file.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="cannot read mask_embedding"):
        mask_embedding(file, 32, torch.float32, torch.device("cpu"))
