"""MTP layers of checkpoints: found, read and refused; and their passes against the definition and transformers' own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.kernels.ops import TORCH_OPS
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.mtp_names import find_mtp
from fastspec.models.heads.mtp_spec import MtpSpec
from fastspec.models.heads.passes import Mtp
from fastspec.models.heads.weights import allocate_head
from fastspec.models.layer_table import DecoderWeights
from fastspec.shapes import UNTILED
from tests.helpers.chain_passes import CLOSE, ROWS, check_passes, fed
from tests.helpers.checkpoints import make_model
from tests.helpers.hybrid import make_hybrid
from tests.helpers.mtp import (
    LAYERS,
    MtpDefinition,
    add_to,
    mtp_of_transformers,
    random_mtp,
    stored_names,
    write_glm,
    write_layers,
    write_ling,
    write_nemotron,
    write_target,
)

CPU = torch.device("cpu")
LAYOUTS = ("mimo", "nextn", "step", "mtp")


def found_in(target: Any, **options: Any) -> HeadCheckpoint:
    given = {"revisions": (None, None), "quantization": (None, None), **options}
    _, head = resolve_pair(target, "mtp", **given)
    assert isinstance(head, HeadCheckpoint)
    return head


def built(target: Path) -> tuple[Mtp, DecoderWeights]:
    scored, head = resolve_pair(target, "mtp", (None, None), (None, None))
    assert isinstance(head, HeadCheckpoint)
    shared = load_weights(scored, dtype=torch.float32, device=CPU, progress=False)
    pending = allocate_head(head, shared, dtype=torch.float32, device=CPU, ops=TORCH_OPS, progress=False)
    pending.fill()
    spec = head.spec
    assert isinstance(spec, MtpSpec)
    assert pending.weights.decoder.embed is shared.embed, "nothing that is shared is copied"
    assert (pending.weights.decoder.head is shared.head) == (not spec.own_heads)
    heads = [(kv_heads, dim) for _, kv_heads, dim in spec.attention_shapes]
    cache = PagedKVCache.for_heads(heads, 5, 4, dtype=torch.float32, device=CPU)
    return Mtp(spec, pending.weights, cache, TORCH_OPS, max_positions=16, batch=1, max_queries=8), shared


def inputs(hidden: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, hidden, generator=generator), torch.randint(vocab, (ROWS,), generator=generator)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_passes_are_the_definition(layout: str, tmp_path: Path) -> None:
    target, live, tensors = write_target(tmp_path, layout)
    model, _ = built(target)
    definition = MtpDefinition.of(live, tensors, layout)
    g, following = inputs(live.config.hidden_size, live.config.vocab_size)
    assert torch.equal(model.condense(g[None, :, None], UNTILED), g[None])
    whole, _ = check_passes(model, definition, g, following)
    assert torch.equal(model.feature(whole), whole)
    swapped = MtpDefinition.of(live, tensors, "mtp" if layout == "mimo" else "mimo").behind(g, following)
    assert not torch.allclose(whole[0], swapped, **CLOSE), "the order of the two halves is seen"


@pytest.mark.parametrize("layout", ["mimo-v2", "mtp", "nextn", "step"])
@torch.inference_mode()
def test_every_layer_is_the_definition(layout: str, tmp_path: Path) -> None:
    target, live, tensors = write_layers(tmp_path, layout, 3)
    model, _ = built(target)
    g, following = inputs(live.config.hidden_size, live.config.vocab_size)
    for index, each in enumerate(tensors):
        definition = MtpDefinition.of(live, each, layout)
        wanted = definition.behind(g, following)
        found = model.drafted(g[None], fed(following, 0, ROWS), index)
        torch.testing.assert_close(found[0], wanted, **CLOSE)
        logits = model.output(index).logits(found, UNTILED)[0]
        torch.testing.assert_close(logits, definition.logits(wanted), **CLOSE)


@torch.inference_mode()
def test_the_layer_of_a_hybrid_is_that_of_transformers(tmp_path: Path) -> None:
    """Attention with an output gate, norms of 1 + w, heads that are turned in part."""
    kind = mtp_of_transformers()
    live = make_hybrid("qwen3_5")
    live.config.num_mtp_layers, live.config.mtp_layer_types = 1, ["full_attention"]  # as other families' configs have
    live.save_pretrained(tmp_path)
    add_to(tmp_path, stored_names("mtp", random_mtp(live, neutral=0.0), 0))
    main = Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    theirs = kind.from_pretrained(main)
    model, _ = built(tmp_path)
    compare(model, theirs, main.config)


@torch.inference_mode()
def test_the_layer_of_a_mixture_is_that_of_transformers(tmp_path: Path) -> None:
    """GLM-4.5: an MTP layer of experts behind the model's last, under the names of its publisher."""
    target, theirs = write_glm(tmp_path)
    model, _ = built(target)
    assert model.spec.plans[0].experts is not None
    compare(model, theirs, theirs.config)


@torch.inference_mode()
def test_the_layer_of_nemotron_is_that_of_transformers(tmp_path: Path) -> None:
    """Attention and experts, which are two stored layers. In another order they are refused."""
    target, theirs = write_nemotron(tmp_path)
    model, _ = built(target)
    assert model.spec.plans[0].experts is not None
    assert model.spec.num_layers == 1
    compare(model, theirs, theirs.config)
    turned = {name.replace("layers.0.mixer", "layers.1.mixer"): each for name, each in theirs.stored().items()}
    add_to(target, turned)
    file = target / "model.safetensors"
    kept = {name: each for name, each in load_file(file).items() if "mtp.layers.0.mixer." not in name}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"mixer\.q_proj"):
        built(target)


@pytest.mark.parametrize("sizes", [{}, {"q_lora_rank": None}])
@torch.inference_mode()
def test_the_layer_of_ling_is_that_of_transformers(sizes: dict[str, Any], tmp_path: Path) -> None:
    """Latent attention with a gate for each head, and experts."""
    target, theirs = write_ling(tmp_path, **sizes)
    model, _ = built(target)
    plan = model.spec.plans[0]
    assert plan.latent is not None
    assert plan.head_gate
    assert plan.experts is not None
    compare(model, theirs, theirs.config)
    g, following = inputs(theirs.config.hidden_size, theirs.config.vocab_size)
    made = model.absorb(g[None], fed(following, 0, ROWS))
    assert made.shape[-1] == model.head.attention_inputs
    whole = model.drafted(g[None], fed(following, 0, ROWS))
    last = model.resumed(made[:, -1:].contiguous(), fed(following, ROWS - 1, ROWS))
    torch.testing.assert_close(last, whole[:, -1:], **CLOSE)


def compare(model: Mtp, theirs: Any, config: Any) -> None:
    """Whole, and piece by piece."""
    g, following = inputs(config.hidden_size, config.vocab_size)
    places = torch.arange(ROWS)[None]
    wanted = theirs.forward_layer(0, g[None], places, None, input_ids=following[None])
    whole = model.drafted(g[None], fed(following, 0, ROWS))
    torch.testing.assert_close(whole, wanted, **CLOSE)
    torch.testing.assert_close(model.logits(whole, UNTILED), theirs._project_to_logits(wanted), **CLOSE)

    model.cache.keys.fill_(torch.nan)
    model.absorb(g[None, :7], fed(following, 0, 7))
    one = model.drafted(g[None, 7:], fed(following, 7, ROWS))
    torch.testing.assert_close(one, wanted[:, 7:], **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_target_with_one_warns_of_nothing(layout: str, tmp_path: Path) -> None:
    target, _, _ = write_target(tmp_path, layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone, none = resolve_pair(target, None, (None, None), (None, None))
        head = found_in(target)
    assert alone.mtp
    assert none is None
    assert "MTP head" in head.spec.family
    assert head.spec.weight_bytes(torch.bfloat16) == 2 * sum(
        tensor.numel() for name, tensor in load_file(target / "model.safetensors").items() if _of_layer(name)
    )


def _of_layer(name: str) -> bool:
    shared = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    return not shared and ("mtp" in name or f"layers.{LAYERS}." in name)


def test_where_it_may_lie() -> None:
    """Below the text part of a model that sees, too; and a model's own layers are none."""
    nested = ["language_model.mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.1.mlp.up_proj.weight"]
    found = find_mtp(nested, 3)
    assert found is not None
    assert (found.layout, found.depth, len(found.stored)) == ("mtp", 2, 3)
    assert set(found.names) == {"fc.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"}
    assert find_mtp(["model.layers.2.eh_proj.weight", "model.layers.3.mlp.up_proj.weight"], 3) is None
    assert find_mtp(["model.layers.3.eh_proj.weight"], 3) is not None
    assert find_mtp(["fc.weight", "norm.weight"], 3) is None


def test_options_that_do_not_go_with_an_mtp_layer_are_refused(tmp_path: Path) -> None:
    target, live, tensors = write_target(tmp_path / "whole", "mtp")
    for name, options in (
        ("draft_revision", {"revisions": (None, "main")}),
        ("feature_layers", {"feature_layers": (1,)}),
    ):
        with pytest.raises(UnsupportedOption, match=f"{name}=.* does not go with draft='mtp'"):
            found_in(target, **options)
    for wrong in ([], [1, 1], [-1], [128], [True], ["a"]):
        with pytest.raises(ValueError, match=r"draft_vocab has .* wanted different ids of the target"):
            found_in(target, draft_vocab=wrong)
    with pytest.raises(UnsupportedOption, match="draft_vocab is for learned drafters and draft='mtp'"):
        resolve_pair(target, None, (None, None), (None, None), draft_vocab=[1])
    with pytest.raises(UnsupportedOption, match="live module"):
        found_in(make_model("qwen3"))
    live.save_pretrained(tmp_path / "none")
    with pytest.raises(CheckpointError, match="has no MTP layer"):
        found_in(tmp_path / "none")

    def changed(name: str, **others: Tensor) -> Path:
        live.save_pretrained(tmp_path / name)
        kept = {key: value for key, value in {**tensors, **others}.items() if value is not None}
        return add_to(tmp_path / name, stored_names("mtp", kept, LAYERS))

    with pytest.raises(CheckpointError, match=r"draft='mtp': .*layernorm.weight.* missing"):
        found_in(changed("missing", **{"layers.0.input_layernorm.weight": None}))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"has shape \[3\], wanted \[32\]"):
        found_in(changed("shape", **{"norm.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"extra.weight.* unexpected"):
        found_in(changed("extra", **{"layers.0.extra.weight": torch.ones(3)}))
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        found_in(changed("experts", **{"layers.0.mlp.experts.0.up_proj.weight": torch.ones(3, 3)}))
    with pytest.raises(CheckpointError, match=r"layers.1.*missing"):
        found_in(changed("deep", **{"layers.1.input_layernorm.weight": torch.ones(32)}))


def test_remote_code_of_mimo_is_left_alone(tmp_path: Path) -> None:
    """Its config is read as a Qwen2's; another family's code is refused as ever."""
    target, live, _ = write_target(tmp_path / "mimo", "mimo")
    scored, _ = resolve_pair(target, None, (None, None), (None, None))
    assert scored.native.family == "mimo"
    assert scored.native.qkv_bias
    live.save_pretrained(tmp_path / "qwen2")
    add_to(tmp_path / "qwen2", {}, auto_map={"AutoConfig": "x.Y"})
    with pytest.raises(UnsupportedModel, match="auto_map"):
        resolve_pair(tmp_path / "qwen2", None, (None, None), (None, None))


@torch.inference_mode()
def test_an_mtp_layer_is_quantised_as_its_target_or_not(tmp_path: Path) -> None:
    """Blocks of 8-bit codes, as in Qwen's FP8 checkpoints."""
    target, live, tensors = write_target(tmp_path, "mtp", hidden_size=128, intermediate_size=128, head_dim=32)
    stored = load_file(target / "model.safetensors")
    coded: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_proj.weight"):
            blocks = -(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)
            scale = torch.full(blocks, float(tensor.abs().max()) / 448)
            coded[name] = (tensor / scale[0, 0]).to(torch.float8_e4m3fn)
            coded[f"{name}_scale_inv"] = scale
        else:
            coded[name] = tensor
    save_file(coded, target / "model.safetensors", {"format": "pt"})
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config |= {"modules_to_not_convert": ["lm_head", "mtp.fc"]}
    add_to(target, {}, quantization_config=config)
    model, _ = built(target)
    rounded = dict(tensors)
    for name in tensors:
        if name.endswith("_proj.weight"):
            at = f"mtp.{name}"
            rounded[name] = coded[at].float() * coded[f"{at}_scale_inv"][0, 0]
    definition = MtpDefinition.of(live, rounded, "mtp")
    g, following = inputs(128, live.config.vocab_size)
    whole = model.drafted(g[None], fed(following, 0, ROWS))
    torch.testing.assert_close(whole[0], definition.behind(g, following), rtol=1e-4, atol=1e-4)
    others = {name: tensor for name, tensor in coded.items() if not name.startswith("mtp.")}
    plain = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    save_file({**others, **plain}, target / "model.safetensors", {"format": "pt"})
    model, _ = built(target)
    whole = model.drafted(g[None], fed(following, 0, ROWS))
    wanted = MtpDefinition.of(live, tensors, "mtp").behind(g, following)
    torch.testing.assert_close(whole[0], wanted, **CLOSE)
