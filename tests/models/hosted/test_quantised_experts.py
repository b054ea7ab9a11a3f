"""Quantised experts of hosted mixtures: kept in their codes where ops read them, else dequantised with a warning."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastspec import CheckpointError, FastSpecGenerator, UnsupportedModel
from fastspec.kernels.common.experts import can_stack_codes
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.hosted.codes import ProductCodes
from fastspec.models.hosted.experts import QuantisedExperts, expert_matrices, has_plain_gate
from fastspec.models.hosted.info import HostedInfo, shell_of
from fastspec.models.hosted.load import load_hosted, read_module
from fastspec.models.hosted.model import HostedModel
from fastspec.models.hosted.swaps import expert_layers
from fastspec.models.hosted.updates import HostedWeights, checked_hosted_update
from tests.helpers import quantised
from tests.helpers.hosted import config_of, make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]
CPU = torch.device("cpu")
FILE = "model.safetensors"
KEEPING = TORCH_OPS.replaced(keeps_experts=lambda shape, kind, *_: can_stack_codes(shape, kind))
INT4 = {"bits": 4, "group_size": 32}
FLOAT4 = {"num_bits": 4, "type": "float", "scale_dtype": torch.uint8, "group_size": 32, "strategy": "group"}
FORMS: dict[str, Callable[[], tuple[dict[str, Any], Any]]] = {
    "fp8": lambda: (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        quantised.fp8_blocks,
    ),
    "fp8 rows": lambda: quantised.compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "gptq": lambda: (
        {"quant_method": "gptq", "sym": True, "desc_act": False, **INT4},
        quantised.gptq(4, 32, symmetric=True, v2=False),
    ),
    "awq": lambda: ({"quant_method": "awq", "zero_point": True, "version": "gemm", **INT4}, quantised.awq(32)),
    "int4": lambda: quantised.compressed(
        "pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32
    ),
    "nvfp4": lambda: (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "ignore": []},
        quantised.modelopt_fp4,
    ),
    "mxfp4": lambda: quantised.compressed("mxfp4-pack-quantized", **FLOAT4),
}
KEPT = ("self_attn", "shared_experts", "layers.0.")  # matrices that are stored as they are
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "vocab_size": 128, "n_routed_experts": 12, "n_group": 1}


def save(path: Path, seed: int = 0) -> Path:
    make_model("deepseek_v3", seed=seed, **SIZES).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("mixture") / "model")


def written(plain: Path, path: Path, form: str, keep: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """A copy of a mixture with quantised experts. Returns the values that are meant."""
    settings, pack = FORMS[form]()
    settings |= {"ignore": []} if "ignore" in settings else {}
    return quantised.write(plain, path, settings, pack, keep=(*KEPT, *keep))


def loaded(path: Path, ops: Any = KEEPING) -> HostedModel:
    checkpoint = resolve(path, role="target")
    info = checkpoint.spec
    assert isinstance(info, HostedInfo)
    sizes = {"num_pages": 4, "page_size": 16, "max_positions": 64, "batch": 1, "max_queries": 2}
    model = HostedModel(info, ops, dtype=torch.float32, device=CPU, **sizes)
    load_hosted(checkpoint, model, dtype=torch.float32, device=CPU, release=False, progress=False)
    return model


def experts_of(model: HostedModel) -> QuantisedExperts:
    (found,) = (part for part in model.base.modules() if isinstance(part, QuantisedExperts))
    return found


def stacked(meant: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The values that are meant, as stacks of gate and up and of down."""
    at, count = "model.layers.1.mlp.experts", SIZES["n_routed_experts"]
    gate_up = [torch.cat([meant[f"{at}.{i}.{part}_proj.weight"] for part in ("gate", "up")]) for i in range(count)]
    return torch.stack(gate_up), torch.stack([meant[f"{at}.{i}.down_proj.weight"] for i in range(count)])


@pytest.mark.parametrize("form", FORMS)
def test_experts_stay_in_their_codes_and_mean_their_values(plain: Path, tmp_path: Path, form: str) -> None:
    meant = stacked(written(plain, tmp_path / "q", form))
    model = loaded(tmp_path / "q")
    part = experts_of(model)
    every = torch.arange(SIZES["n_routed_experts"])
    for stack, values in zip(part.stacks, meant, strict=True):
        assert stack.in_codes
        # scales of fp4 are a number of four bits times a factor of the row, to 2^-22
        torch.testing.assert_close(stack.values(every), values, rtol=2**-21, atol=0)
    generator = torch.Generator().manual_seed(3)
    hidden, factors = torch.randn(5, 128, generator=generator), torch.rand(5, 2, generator=generator)
    index = torch.randint(len(every), (5, 2), generator=generator)
    wanted = torch.zeros_like(hidden)
    for row, place in torch.cartesian_prod(torch.arange(5), torch.arange(2)).tolist():
        gate, up = (meant[0][index[row, place]] @ hidden[row]).chunk(2)
        wanted[row] += factors[row, place] * (meant[1][index[row, place]] @ (F.silu(gate) * up))
    torch.testing.assert_close(part(hidden, index, factors), wanted, rtol=1e-4, atol=1e-4)  # another order of sums


@pytest.mark.parametrize("form", ["fp8", "gptq"])
def test_drafts_change_no_text_of_codes(
    plain: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []

    def experts(x: Tensor, *given: Any, **options: Any) -> Tensor:
        rows.append(len(x))
        return TORCH_OPS.experts(x, *given, **options)

    monkeypatch.setattr("fastspec.engine.settings.ops_for", lambda device: KEEPING.replaced(experts=experts))
    written(plain, tmp_path / "q", form)
    options: dict[str, Any] = {"device": "cpu", "max_length": 64, "progress": False, "dtype": "float32"}
    prompts, call = [[5, 9, 2, 5, 9], list(range(20, 45))], {"max_new_tokens": 12, "eos_token_id": None}
    with FastSpecGenerator(tmp_path / "q", tmp_path / "q", num_speculative_tokens=3, **options) as made:
        texts = [made.generate(prompts, num_speculative_tokens=k, **call) for k in (0, 3)]
    assert torch.equal(*texts)
    assert len(set(rows)) > 2  # prompts, steps with and without drafts


def test_text_of_dequantised_experts_is_that_of_their_values(plain: Path, tmp_path: Path) -> None:
    meant = written(plain, tmp_path / "q", "fp8")
    shutil.copytree(plain, tmp_path / "meant")
    save_file(meant, tmp_path / "meant" / FILE, metadata={"format": "pt"})
    options: dict[str, Any] = {"device": "cpu", "max_length": 64, "progress": False, "dtype": "float32"}
    texts = []
    elements = sum(each.numel() for each in stacked(meant))
    sizes = rf"1 layer\(s\) are dequantised: {elements / 2**30:.3f} GiB of codes take {elements / 2**28:.3f} GiB"
    with pytest.warns(UserWarning, match=sizes):
        made = FastSpecGenerator(tmp_path / "q", **options)
    for gen, matrices in ((made, True), (FastSpecGenerator(tmp_path / "meant", **options), False)):
        with gen:
            texts.append(gen.generate([[5, 9, 2, 5, 9]], max_new_tokens=12))
            assert ("36 matrices in" in gen.explain()) == matrices
    assert torch.equal(*texts)


@pytest.mark.parametrize("form", ["gptq", "mxfp4"])
def test_codes_are_counted_and_updated_in_place(plain: Path, tmp_path: Path, form: str) -> None:
    written(plain, tmp_path / "q", form)
    new = stacked(written(save(tmp_path / "other", seed=1), tmp_path / "new", form))
    checkpoint, model = resolve(tmp_path / "q", role="target"), loaded(tmp_path / "q")
    part, info = experts_of(model), checkpoint.spec
    assert isinstance(info, HostedInfo)
    saved = sum(4 * values.numel() - stack.nbytes for stack, values in zip(part.stacks, new, strict=True))
    assert saved > 0
    assert checkpoint.bytes_loaded(torch.float32, CPU, KEEPING) == info.weight_bytes(torch.float32) - saved
    assert checkpoint.bytes_loaded(torch.float32, CPU, TORCH_OPS) == info.weight_bytes(torch.float32)
    weights = HostedWeights(checkpoint, model, torch.float32, CPU)
    assert {id(stack) for stack in part.stacks} <= {id(each) for each in weights.weights}
    words = [stack.data.data_ptr() for stack in part.stacks]
    written(plain, tmp_path / "unlike", "fp8")
    for unlike in ("other", "unlike"):
        with pytest.raises(CheckpointError, match="is stored in another format than the target"):
            checked_hosted_update(tmp_path / unlike, weights)
    checked_hosted_update(tmp_path / "new", weights).copy()
    assert words == [stack.data.data_ptr() for stack in part.stacks]
    for stack, values in zip(part.stacks, new, strict=True):
        assert torch.equal(stack.values(torch.arange(len(values))), values)


def test_experts_that_stay_in_codes_take_no_host_memory(plain: Path, tmp_path: Path) -> None:
    meant = written(plain, tmp_path / "q", "fp8")
    checkpoint = resolve(tmp_path / "q", role="target")
    info = checkpoint.spec
    assert isinstance(info, HostedInfo)
    codes = ProductCodes(checkpoint, info)
    values = codes.values(torch.float32, CPU, KEEPING)
    source = read_module(values, info, torch.float32, checkpoint.name)
    (layer,) = expert_layers(source)
    for stack in source.get_submodule(layer).parameters():
        assert stack.dim() == 3
        assert stack.untyped_storage().nbytes() == 4
        assert bool(stack.isnan().all())  # seen at once if it were ever read
    assert values.keys() - {f"{layer}.gate_up_proj", f"{layer}.down_proj"} == {
        name for name in meant if not name.startswith(f"{layer}.")
    }
    assert codes.values(torch.float32, CPU, TORCH_OPS).keys() == meant.keys()


def test_layers_that_transformers_leaves_out_are_not_read(plain: Path, tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: layer 61 drafts, and is no part of transformers' model."""
    meant = stacked(written(plain, tmp_path / "q", "fp8"))
    stored = load_file(tmp_path / "q" / FILE)
    more = {name.replace(".1.", ".61.", 1): each.clone() for name, each in stored.items() if "layers.1." in name}
    save_file({**stored, **more}, tmp_path / "q" / FILE, metadata={"format": "pt"})
    checkpoint = resolve(tmp_path / "q", role="target")
    assert isinstance(checkpoint.spec, HostedInfo)
    read = ProductCodes(checkpoint, checkpoint.spec).values(torch.float32, CPU, KEEPING)
    assert not any("layers.61." in name for name in read)
    for stack, values in zip(experts_of(loaded(tmp_path / "q")).stacks, meant, strict=True):
        assert torch.equal(stack.values(torch.arange(len(values))), values)


def test_a_layer_with_an_expert_that_is_not_quantised_is_dequantised(plain: Path, tmp_path: Path) -> None:
    meant = stacked(written(plain, tmp_path / "q", "gptq", keep=("experts.3.",)))
    with pytest.warns(UserWarning, match=r"1 layer\(s\) are dequantised"):
        model = loaded(tmp_path / "q")
    parameters = {name: each for name, each in model.base.named_parameters() if ".experts." in name}
    for name, values in zip(("gate_up_proj", "down_proj"), meant, strict=True):
        assert torch.equal(parameters[f"layers.1.mlp.experts.{name}"], values)


def test_experts_in_one_tensor_are_refused(plain: Path, tmp_path: Path) -> None:
    written(plain, tmp_path / "q", "fp8")
    stored = load_file(tmp_path / "q" / FILE)
    at = "model.layers.1.mlp.experts"
    found = {name: each for name, each in stored.items() if ".experts." not in name or "down" in name}
    found[f"{at}.gate_up_proj"] = torch.zeros(12, 128, 128).to(torch.float8_e4m3fn)
    found[f"{at}.gate_up_proj_scale_inv"] = torch.ones(12, 1, 1)
    save_file(found, tmp_path / "q" / FILE, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="gate_up_proj_scale_inv belongs to quantised experts in a layout"):
        resolve(tmp_path / "q", role="target")


def test_names_of_mixtral_are_known() -> None:
    """transformers renames modules of these families, and joins w1 and w3."""
    shell = shell_of(*kind_of("minimax_m2"))
    (layer, *_) = expert_layers(shell)
    given = [
        f"model.layers.0.block_sparse_moe.experts.{i}.{part}.weight_scale" for i in (0, 11) for part in ("w1", "w3")
    ]
    found = expert_matrices(shell, given)
    places = sorted((each.stack, each.expert, each.order) for each in found.values())
    assert places == [(f"{layer}.gate_up_proj", expert, order) for expert in (0, 11) for order in (0, 1)]


def kind_of(model_type: str) -> tuple[Any, Any]:
    import transformers

    names = ("num_local_experts", "num_experts_per_tok", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = transformers.MiniMaxM2Config(**dict(zip(names, (12, 2, 64, 32, 1), strict=True)), vocab_size=64)
    assert config.model_type == model_type
    return transformers.MiniMaxM2ForCausalLM, config


def test_other_gates_are_told_apart() -> None:
    kinds: list[tuple[Any, bool]] = []
    for activation, known in (("silu", True), ("gelu", False)):
        shell = shell_of(type(make_model("qwen3_moe")), config_of("qwen3_moe", hidden_act=activation))
        kinds.append((shell.get_submodule(expert_layers(shell)[0]), known))
    shell = shell_of(type(make_model("gpt_oss")), config_of("gpt_oss"))
    kinds.append((shell.get_submodule(expert_layers(shell)[0]), False))
    part = kinds[0][0]
    assert isinstance(part, nn.Module)
    assert [has_plain_gate(each) for each, _ in kinds] == [known for _, known in kinds]
    part._apply_gate = lambda x: F.silu(x.chunk(2, -1)[0].clamp(max=500)) * x.chunk(2, -1)[1]
    assert not has_plain_gate(part)  # a clamp, far beyond usual values
