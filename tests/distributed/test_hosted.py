"""Hosted models that ranks share by transformers' plan: the bits of one rank, and by name what cannot be cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from fastspec.distributed import rank_settings
from fastspec.distributed.exchange import Alone, Exchange
from fastspec.distributed.ranks import Ranks
from fastspec.distributed.slices import RankShare, check_divides, share_of
from fastspec.errors import UnsupportedModel, UnsupportedOption
from fastspec.kernels.common.code_packing import can_pack_codes
from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.hosted.admission import admit
from fastspec.models.hosted.codes import hosted_bytes
from fastspec.models.hosted.cuts import PLAN, share_info, sizes_to_cut
from fastspec.models.hosted.info import HostedInfo, hosted_info
from fastspec.models.hosted.load import load_hosted
from fastspec.models.hosted.model import HostedModel, trial_ids
from fastspec.models.hosted.swaps import PartProduct
from fastspec.shapes import ForwardBatch, Tiling
from tests.distributed import tasks
from tests.distributed.test_generator import CALLS, one
from tests.helpers import quantised
from tests.helpers.heads import eagle3_tensors, write_eagle3
from tests.helpers.hosted import fill, make_model
from tests.helpers.model_table import PAGE, tiny_config
from tests.helpers.rank_processes import Processes
from tests.helpers.ranks import on_each

CPU = torch.device("cpu")
TILING = Tiling(8, 8)
# fused q, k, v of each head; experts alone, and their biases, gate and up by turns; sinks, and experts with a shared
# one; stacks the other way round; latent attention with its heads, and experts; q, k, v that are gathered at once
QUICK = ("gpt_neox", "gpt_oss", "granitemoe_swa", "aria_text", "deepseek_v2")
CUT = [
    *QUICK,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi", "minimax_m2", "gemma4_unified_text", "beam")),
]
pytestmark = pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning")


def live(name: str, **changes: Any) -> Checkpoint:
    """A tiny model of a type, with random weights."""
    config = tiny_config(name)
    for field, value in changes.items():
        setattr(config, field, value)
    info = hosted_info(config)
    model: PreTrainedModel = fill(info.kind(info.config)).eval()
    return Checkpoint(name, "target", info, None, model, None, count=hosted_bytes)


def info_of(checkpoint: Checkpoint) -> HostedInfo:
    assert isinstance(checkpoint.spec, HostedInfo)
    return checkpoint.spec


def part_of(checkpoint: Checkpoint, share: RankShare | None, exchange: Exchange, ops: Ops = TORCH_OPS) -> HostedModel:
    """One rank's model, admitted; without a share all of it."""
    info = info_of(checkpoint)
    own = replace(checkpoint, spec=info if share is None else share_info(info, share))
    sizes = {"num_pages": 4, "page_size": 16, "max_positions": 64, "batch": 1, "max_queries": 2}
    model = HostedModel(info_of(own), ops, dtype=torch.float32, device=CPU, exchange=exchange, **sizes)
    load_hosted(own, model, dtype=torch.float32, device=CPU, release=False)
    admit(model, checkpoint.name, TILING, 2)
    return model


@torch.inference_mode()
def logits_of(model: HostedModel) -> Tensor:
    """Logits of a prompt, and of steps of one token and of three behind it."""
    ids, table = trial_ids(20, model.info, CPU), torch.arange(1, 4)[None]
    places = torch.arange(20)[None]

    def feed(ids: Tensor, first: int, tiling: Tiling) -> Tensor:
        positions, counts = places[:, : ids.shape[1]] + first, torch.ones_like(ids, dtype=torch.bool)
        return model.hidden(ForwardBatch(ids, positions, counts, table, 1, tiling))

    hidden = [feed(ids, 0, Tiling(20, 20)), feed(ids[:, 4:5], 20, TILING), feed(ids[:, 2:5], 21, TILING)]
    return model.logits(torch.cat(hidden, dim=1), TILING)


def logits_on(checkpoint: Checkpoint, ranks: int) -> list[Tensor]:
    sizes = sizes_to_cut(info_of(checkpoint))
    check_divides(sizes, ranks, checkpoint.name)
    if ranks == 1:
        return [logits_of(part_of(checkpoint, share_of(sizes, 0, 1, one_tree=True), Alone()))]

    def of_rank(rank: int, between: Any) -> Tensor:
        return logits_of(part_of(checkpoint, share_of(sizes, rank, ranks, one_tree=True), between))

    return on_each(ranks, of_rank)


# transformers' own cuts nothing of gpt-oss
PLANS = {
    "gpt_oss": {
        **{f"layers.*.self_attn.{part}_proj": "colwise" for part in "qkv"},
        **{"layers.*.self_attn.o_proj": "rowwise", "layers.*.self_attn.sinks": "colwise"},
        "layers.*.mlp.experts": "moe_tp_experts",
    }
}


@pytest.mark.parametrize("name", CUT)
def test_every_rank_has_the_bits_of_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = live(name)
    if name in PLANS:
        monkeypatch.setattr(type(info_of(checkpoint).config), PLAN, PLANS[name])
    plain = logits_of(part_of(checkpoint, None, Alone()))
    (alone,) = logits_on(checkpoint, 1)
    torch.testing.assert_close(alone, plain, rtol=1e-4, atol=1e-4)  # sums over K in parts: another order
    for ranks in (2, 4) if name == "gpt_neox" else (2,):
        for found in logits_on(checkpoint, ranks):
            assert torch.equal(found, alone), (found - alone).abs().max()


def opened(name: str, path: Path) -> dict[str, Any]:
    """Options of a generator whose draft is its target."""
    config = tiny_config(name)
    fill(hosted_info(config).kind(config)).save_pretrained(path)
    return {"pair": (str(path), str(path)), "dtype": "float32"}


@pytest.mark.slow
def test_as_many_types_are_cut_as_the_guide_says() -> None:
    rows = [row.split("|")[1:3] for row in PAGE.read_text().splitlines() if row.startswith("| `")]
    hosted = [name.strip(" `") for name, how in rows if how.strip().startswith("hosted")]
    fine = []
    for name in hosted:
        checkpoint = live(name)
        try:
            sizes_to_cut(info_of(checkpoint))
        except UnsupportedModel:
            continue
        (alone,) = logits_on(checkpoint, 1)
        assert all(torch.equal(found, alone) for found in logits_on(checkpoint, 2)), name
        fine.append(name)
    guide = (PAGE.parent / "guides" / "several-gpus.md").read_text()
    assert f"{len(fine)} of the {len(hosted)} hosted types in [the list](../models.md) can be split" in guide, fine


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "deepseek_v2"])
def test_four_ranks_give_the_text_of_one(name: str, four: Processes, tmp_path: Path) -> None:
    config = tiny_config(name)
    fill(hosted_info(config).kind(config)).save_pretrained(tmp_path)
    options = {"pair": (str(tmp_path), None), "lookup": True, "dtype": "float32"}
    want = one(dict(options), CALLS)
    said = four.run(tasks.open_generator, name, {**options, "tensor_parallel": 4})
    assert all("the same text on 1, 2" in each for each in said), said
    assert all("every rank has the whole head, because it is hosted" in each for each in said), said
    assert four.run(tasks.texts, name, CALLS) == [want] * 4


def test_what_ranks_do_not_compute_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = "2 ranks together compute something else than the whole module"
    checkpoint = live("gpt_neox")
    with pytest.raises(UnsupportedModel, match=apart):
        part_of(checkpoint, RankShare(0, 2, 2), Alone())  # nobody's sums are added
    # which elements are kept depends on all of a layer's
    sparse = live("gemma3n_text", activation_sparsity_pattern=[0.5] * 4)
    with pytest.raises(UnsupportedModel, match=apart):
        on_each(2, lambda rank, between: part_of(sparse, RankShare(rank, 2, 2), between))


@pytest.mark.slow
def test_ranks_refuse_alike_behind_loading_and_go_on(two: Processes, tmp_path: Path) -> None:
    for name, changes in (("gemma3n_text", {"activation_sparsity_pattern": [0.5] * 4}), ("gpt_neox", {})):
        module = live(name, **changes).module
        assert isinstance(module, PreTrainedModel)
        module.save_pretrained(tmp_path / name)
        options = {"pair": (str(tmp_path / name), None), "lookup": True, "tensor_parallel": 2}
        for said in two.run(tasks.open_generator, name, options):
            assert ("2 ranks together compute something else" in said) == bool(changes), said
    plain = one({**options, "tensor_parallel": 1}, CALLS[:1])
    assert two.run(tasks.texts, "gpt_neox", CALLS[:1]) == [plain] * 2
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1], "layer_ids": [1, 2]}
    shared = {"hidden": 32, "target_hidden": 32, "read": 2, "vocab": 101, "drafted": 101, "own_head": False}
    head = write_eagle3(tmp_path / "head", eagle3_tensors(**shared), eagle_config=ids)
    options = {"pair": (str(tmp_path / "gpt_neox"), str(head)), "tensor_parallel": 2, "num_speculative_tokens": 3}
    two.run(tasks.open_generator, "head", options)
    assert two.run(tasks.texts, "head", CALLS[:1]) == [plain] * 2


STYLES = {"layers.*.self_attn.q_proj": "by_turns"}
REFUSED = {
    "no plan": ({}, "transformers publishes no plan for it"),
    "nothing is cut": ({"embed_tokens": "embedding_rowwise"}, "splits no layer"),
    "a style": (STYLES, r"cuts layers\.0\.self_attn\.q_proj by 'by_turns', which is not known here"),
    "a module": ({"layers.*.mlp": "rowwise"}, r"cuts layers\.0\.mlp by 'rowwise', and that PhiMLP is not known here"),
    "a parameter": ({"layers.*.mlp.fc1.bias": "rowwise"}, r"cuts layers\.0\.mlp\.fc1\.bias by 'rowwise'"),
    "heads alone": (
        {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.dense": "rowwise"},
        r"attends with 2 heads over 2 key heads of width 8, wanted 2, 1 and 8",
    ),
    "no sum": (
        {"layers.*.mlp.fc1": "colwise", "layers.*.self_attn.dense": "rowwise"},
        r"its module cannot run: layer 'model\.layers\.0\.self_attn\.dense'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_before_a_weight_is_read(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, named = REFUSED[case]
    checkpoint = live("phi")
    monkeypatch.setattr(type(info_of(checkpoint).config), PLAN, plan)
    with pytest.raises(
        UnsupportedOption, match=rf"target: phi is hosted, and .* cannot cut it: .*{named}.*; leave tens"
    ):
        rank_settings._own(checkpoint, ranks_of(2), on_cpu=True)
    if case == "no plan":
        assert rank_settings._own(checkpoint, ranks_of(1), on_cpu=True) is checkpoint, "one rank has all of it"


def ranks_of(size: int) -> Ranks:
    return Ranks(SimpleNamespace(size=size, rank=0), True, False)  # type: ignore[arg-type]


def test_sizes_that_do_not_divide_are_refused_by_name() -> None:
    checkpoint = live("phi")
    with pytest.raises(UnsupportedOption, match=r"does not divide phi: 4 heads, 2 key heads, .*; use one of 1, 2$"):
        rank_settings._own(checkpoint, ranks_of(4), on_cpu=True)
    experts = live("granitemoe", intermediate_size=20)
    with pytest.raises(
        UnsupportedOption, match=r"granitemoe: width of model\.layers\.\*\S+experts 20; use one of 1, 2, 4$"
    ):
        rank_settings._own(experts, ranks_of(8), on_cpu=True)
    draft = replace(checkpoint, role="draft")
    assert rank_settings._own(draft, ranks_of(4), on_cpu=True) is draft, "every rank has all of it"


def test_a_rank_holds_its_part_alone_and_the_plan_counts_it() -> None:
    checkpoint = live("granitemoe_swa")
    whole, share = info_of(checkpoint), RankShare(1, 2, 2)
    own = share_info(whole, share)
    assert own.parameters < whole.parameters
    assert [shape[:2] for shape in own.slots] == [(2, 1)] * len(whole.slots)
    assert (
        "split by transformers' plan: 6 products by rows, 2 by columns, and columns of 2 expert layers" in own.hosting
    )
    assert "every rank has the other modules whole, including the head" in own.hosting

    def held(rank: int, between: Any) -> int:
        model = part_of(checkpoint, RankShare(rank, 2, 2), between)
        tensors: list[Tensor] = [*model.module.parameters(), *model.base.parameters()]
        for part in (*model.module.modules(), *model.base.modules()):
            tensors += [part.weight.data] if hasattr(part, "weight") and hasattr(part.weight, "format") else []
            tensors += part.buffers(recurse=False)
            tensors += [piece.data for piece in part.weights] if isinstance(part, PartProduct) else []
        return sum({each.data_ptr(): each.nbytes for each in tensors}.values())

    for found in on_each(2, held):
        assert found == own.weight_bytes(torch.float32)


def test_codes_are_cut_with_their_scales(tmp_path: Path) -> None:
    """As on a GPU, where ranks multiply by codes: of each product a rank keeps those of its rows or columns."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64}
    plain = live("arcee", **sizes).module
    assert isinstance(plain, PreTrainedModel)
    plain.save_pretrained(tmp_path / "plain")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
    kind = quantised.gptq(4, 64, symmetric=True, v2=False)
    meant = quantised.write(tmp_path / "plain", tmp_path / "q", settings, kind, keep=("v_proj",))
    ops = TORCH_OPS.replaced(keeps_codes=lambda shape, kind, *_: can_pack_codes(shape, kind))
    checkpoint = resolve(tmp_path / "q", role="target")

    def seen(rank: int, between: Any) -> int:
        model, kept = part_of(checkpoint, RankShare(rank, 2, 2), between, ops), 0
        for name, part in model.base.named_modules(prefix="model"):
            if not isinstance(part, PartProduct):
                continue
            (weight,) = part.weights
            whole = meant.get(f"{name}.weight")
            if weight.codes is not None and whole is not None:
                half = whole.chunk(2, dim=int(name.endswith(("o_proj", "down_proj"))))[rank]
                assert torch.equal(weight.unpack(), half), name
                kept += 1
        return kept

    assert on_each(2, seen) == [10, 10]  # of two layers all but v
    own = replace(checkpoint, spec=share_info(info_of(checkpoint), RankShare(0, 2, 2)))
    assert own.bytes_loaded(torch.float32, CPU, ops) < own.bytes_loaded(torch.float32, CPU, TORCH_OPS)


def test_quantised_experts_are_dequantised_and_cut(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 3, "n_group": 1, "topk_group": 1}
    make_model("deepseek_v3", **sizes).save_pretrained(tmp_path / "meant")
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    keep = ("self_attn", "shared_experts", "layers.0.")
    meant = quantised.write(tmp_path / "meant", tmp_path / "q", settings, quantised.fp8_blocks, keep=keep)
    save_file(meant, tmp_path / "meant" / "model.safetensors", metadata={"format": "pt"})
    ops = TORCH_OPS.replaced(keeps_experts=lambda *_: True)
    checkpoint, plain = (resolve(tmp_path / name, role="target") for name in ("q", "meant"))

    def of_rank(checkpoint: Checkpoint) -> list[Tensor]:
        return on_each(2, lambda rank, between: logits_of(part_of(checkpoint, RankShare(rank, 2, 2), between, ops)))

    with pytest.warns(UserWarning, match=r"quantised experts of 1 layer\(s\) are dequantised"):
        found = of_rank(checkpoint)
    assert all(map(torch.equal, found, of_rank(plain)))
    own = replace(checkpoint, spec=share_info(info_of(checkpoint), RankShare(0, 2, 2)))
    assert own.bytes_loaded(torch.float32, CPU, ops) == info_of(own).weight_bytes(torch.float32)


def test_products_that_are_rounded_are_cut(tmp_path: Path) -> None:
    checkpoint = replace(live("phi", hidden_size=64, intermediate_size=128), rounded="int8")
    found = on_each(
        2, lambda rank, between: logits_of(part_of(checkpoint, RankShare(rank, 2, 4, one_tree=True), between))
    )
    assert torch.equal(*found)
