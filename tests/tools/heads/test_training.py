"""Training lowers the loss on real families, and writes what published heads hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.tiny_targets import VOCAB, tiny_model
from tools.heads.export import load, save
from tools.heads.head import Eagle3Head
from tools.heads.recipe import Recipe
from tools.heads.rows import Chunks, Rows
from tools.heads.target import Target, default_boundaries
from tools.heads.train import History, choose_drafted, make_head, train

RECIPE = Recipe(steps=60, batch_tokens=256, lr=5e-3, warmup=5, ema=0.9, unroll=3, intermediate=40)
MOST_FREQUENT = 20


def trained(family: str, keep: Path | torch.device) -> tuple[Target, Eagle3Head, History]:
    """A head after RECIPE on what a random target wrote, and how it went."""
    torch.manual_seed(2)
    target, generator = Target(tiny_model(family), default_boundaries(7)), torch.Generator().manual_seed(2)
    ids, lengths = target.write(torch.randint(VOCAB, (32, 4), generator=generator), 28, 1.0)
    rows = Rows(ids, lengths)
    drafted = choose_drafted([rows], VOCAB, MOST_FREQUENT)
    head = make_head(target, drafted, RECIPE)
    history = train(head, target, Chunks(target, [rows], keep, generator).batches(RECIPE.batch_tokens), RECIPE)
    return target, head, history


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_loss_falls_and_the_chance_of_acceptance_rises(family: str) -> None:
    _, _, history = trained(family, torch.device("cpu"))
    assert len(history.losses) == RECIPE.steps
    assert sum(history.losses[-5:]) < 0.85 * sum(history.losses[:5])
    assert history.accepted[-1][1][0] > 1.5 * history.accepted[0][1][0]


def test_features_in_files_train_the_same_head_as_features_in_memory(tmp_path: Path) -> None:
    _, inside, _ = trained("llama", torch.device("cpu"))
    _, outside, _ = trained("llama", tmp_path)
    assert list(tmp_path.glob("*.safetensors"))
    for name, tensor in inside.state_dict().items():
        assert torch.equal(tensor, outside.state_dict()[name]), name


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Target, Eagle3Head]:
    folder = tmp_path_factory.mktemp("head")
    target, head, _ = trained("qwen3", torch.device("cpu"))
    save(head, target.model.config, target.boundaries, folder)
    return folder, target, head


def test_tensors_are_the_published_ones(written: tuple[Path, Target, Eagle3Head]) -> None:
    tensors = load_file(written[0] / "model.safetensors")
    assert {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()} == {
        "fc.weight": ("torch.bfloat16", [32, 96]),
        "midlayer.input_layernorm.weight": ("torch.bfloat16", [32]),
        "midlayer.hidden_norm.weight": ("torch.bfloat16", [32]),
        "midlayer.self_attn.q_proj.weight": ("torch.bfloat16", [32, 64]),
        "midlayer.self_attn.k_proj.weight": ("torch.bfloat16", [16, 64]),
        "midlayer.self_attn.v_proj.weight": ("torch.bfloat16", [16, 64]),
        "midlayer.self_attn.o_proj.weight": ("torch.bfloat16", [32, 32]),
        "midlayer.post_attention_layernorm.weight": ("torch.bfloat16", [32]),
        "midlayer.mlp.gate_proj.weight": ("torch.bfloat16", [40, 32]),
        "midlayer.mlp.up_proj.weight": ("torch.bfloat16", [40, 32]),
        "midlayer.mlp.down_proj.weight": ("torch.bfloat16", [32, 40]),
        "norm.weight": ("torch.bfloat16", [32]),
        "lm_head.weight": ("torch.bfloat16", [MOST_FREQUENT, 32]),
        "d2t": ("torch.int64", [MOST_FREQUENT]),
        "t2d": ("torch.bool", [VOCAB]),
    }


def test_the_two_maps_of_the_vocabulary_agree(written: tuple[Path, Target, Eagle3Head]) -> None:
    tensors = load_file(written[0] / "model.safetensors")
    ids = torch.arange(MOST_FREQUENT) + tensors["d2t"]  # offsets, not ids
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])
    assert torch.equal(ids, written[2].drafted)
    assert tensors["t2d"].sum() == MOST_FREQUENT


def test_the_config_is_the_published_one(written: tuple[Path, Target, Eagle3Head]) -> None:
    assert json.loads((written[0] / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "max_position_embeddings": 32768,
        "vocab_size": VOCAB,
        "draft_vocab_size": MOST_FREQUENT,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],  # outputs of these layers: boundaries 2, 3, 4
            "layer_ids": [2, 3, 4],
        },
    }


def test_what_is_read_back_is_what_was_written(written: tuple[Path, Target, Eagle3Head]) -> None:
    folder, target, head = written
    again, boundaries = load(folder)
    assert boundaries == target.boundaries == (2, 3, 4)
    for name, tensor in again.state_dict().items():
        kept = head.state_dict()[name]
        assert torch.equal(tensor, kept.bfloat16().float() if kept.is_floating_point() else kept), name


def test_the_most_frequent_tokens_of_the_text_are_drafted() -> None:
    rows = Rows(torch.tensor([[5, 5, 1, 1, 1, 3], [7, 7, 2, 2, 2, 2]]), torch.tensor([6, 2]))
    assert choose_drafted([rows], 10, 3).tolist() == [1, 5, 7]
    assert choose_drafted([rows], 10, None).tolist() == list(range(10))


@pytest.mark.parametrize("boundaries", [(), (0, 2, 4), (2, 2, 4), (4, 2, 3), (2, 3, 7)])
def test_boundaries_outside_the_target_are_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each from 1 to 6"):
        Target(tiny_model("llama"), boundaries)


def test_a_target_with_few_layers_has_no_default_boundaries() -> None:
    assert default_boundaries(8) == (2, 4, 5)
    assert default_boundaries(36) == (2, 18, 33)
    with pytest.raises(ValueError, match="--boundaries 1 2 3"):
        default_boundaries(6)


def test_a_target_whose_logits_are_not_a_product_is_refused() -> None:
    model = tiny_model("llama")
    plain = model.forward

    def capped(**given: object) -> object:
        output = plain(**given)
        output.logits = 2 * torch.tanh(output.logits / 2)
        return output

    model.forward = capped
    with pytest.raises(ValueError, match="another law"):
        Target(model, (1, 2, 3))


def test_text_that_ends_is_counted_up_to_its_end() -> None:
    model = tiny_model("llama")
    target = Target(model, (1, 2, 3))
    prompts = torch.randint(VOCAB, (16, 4), generator=torch.Generator().manual_seed(3))
    whole, lengths = target.write(prompts, 20, 0.0)
    assert lengths.tolist() == [24] * 16
    end = int(whole[0, 9])
    model.generation_config.eos_token_id = end
    texts, lengths = target.write(prompts, 20, 0.0)
    for row in range(16):
        new = whole[row, 4:].tolist()
        wanted = 4 + (new.index(end) + 1 if end in new else 20)
        assert lengths[row] == wanted
        assert torch.equal(texts[row, :wanted], whole[row, :wanted])
