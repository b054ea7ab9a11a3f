"""`update_weights` of hosted models: results are those of a new generator, to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from fastspec import CheckpointError, FastSpecGenerator, NGram, UnsupportedModel
from fastspec.models.hosted.info import shell_of
from fastspec.models.hosted.stored_names import load_stored
from fastspec.models.hosted.updates import _Refiller
from fastspec.output import GenerateOutput
from tests.helpers import hosted

OPTIONS: dict[str, Any] = {"max_length": 64, "max_batch_size": 2, "device": "cpu", "progress": False}
DAILY = ("gpt2", "qwen3_moe", "diffllama", "deepseek_v3")


def result(gen: FastSpecGenerator) -> tuple[Any, ...]:
    """Sampled tokens and log-probabilities."""
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 97) for _ in range(length)] for length in (3, 30)]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "seed": 1, "logprobs": 1}
    found = gen.generate(prompts, eos_token_id=[], return_dict_in_generate=True, **options)
    assert isinstance(found, GenerateOutput)
    return found.new_tokens, found.logprobs


def making(source: Any, **more: Any) -> FastSpecGenerator:
    return FastSpecGenerator(source, **{"proposer": NGram(), "dtype": "float32", **OPTIONS, **more})


def fresh(source: Any, **more: Any) -> tuple[Any, ...]:
    with making(source, **more) as gen:
        return result(gen)


def saved(path: Path, name: str, **more: Any) -> tuple[Path, Path]:
    """Two checkpoints of one model."""
    for place, seed in (("old", 0), ("new", 1)):
        hosted.make_model(name, seed=seed, **more).save_pretrained(path / place)
    return path / "old", path / "new"


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in DAILY else pytest.mark.slow) for each in hosted.MODELS]
)
def test_results_are_those_of_a_new_generator(name: str, tmp_path: Path) -> None:
    """Of a state_dict, its parts, a loaded model, a directory, and the tensors of one."""
    old, new = saved(tmp_path, name)
    wanted, model = fresh(new), hosted.make_model(name, seed=1)
    with making(old) as gen:
        before = result(gen)
        assert before != wanted
        for values in (model.state_dict(), model, new, load_file(new / "model.safetensors")):
            gen.update_weights(values)
            assert result(gen) == wanted
            gen.update_weights(old)
            assert result(gen) == before
        state = {key: each for key, each in model.state_dict().items() if not key.endswith("bias_mask")}
        gen.update_weights({key: each for key, each in state.items() if ".1." in key})  # layer 1
        assert result(gen) not in (before, wanted)
        gen.update_weights({key: each for key, each in state.items() if ".1." not in key})
        assert result(gen) == wanted


def test_a_part_by_the_checkpoints_names(tmp_path: Path) -> None:
    """Matrices of experts, which transformers joins, are given one by one. A part of a joined one changes nothing."""
    old, new = saved(tmp_path, "deepseek_v3")
    stored, wanted = load_file(new / "model.safetensors"), fresh(new)
    layer = {key: each for key, each in stored.items() if ".layers.1." in key}
    expert = {key: -each for key, each in layer.items() if "experts.0." in key}
    assert len(expert) == 3
    with making(old) as gen:
        before = result(gen)
        gen.update_weights(layer)
        assert result(gen) not in (before, wanted)
        gen.update_weights({key: each for key, each in stored.items() if key not in layer})
        assert result(gen) == wanted
        other = {"model.layers.1.other": stored["model.norm.weight"]}
        for part, message in ((expert, "give all tensors it is made of"), ({**stored, **other}, "layers.1.other")):
            with pytest.raises(CheckpointError, match=f"is hosted.* names of a checkpoint; as such, .*{message}"):
                gen.update_weights({key: -each for key, each in part.items()})
            assert result(gen) == wanted


def test_a_tied_matrix_by_one_of_its_names(tmp_path: Path) -> None:
    """Where transformers calls the head otherwise than the checkpoint."""
    old, new = saved(tmp_path, "gpt_neox", tie_word_embeddings=True)
    stored = load_file(new / "model.safetensors")
    table = stored.pop("gpt_neox.embed_in.weight")
    assert "embed_out.weight" not in stored
    with making(old) as gen:
        gen.update_weights({**stored, "embed_out.weight": table})
        assert result(gen) == fresh(new)
        with pytest.raises(CheckpointError, match="and this model ties them"):
            gen.update_weights({**stored, "embed_out.weight": table, "gpt_neox.embed_in.weight": -table})
        assert result(gen) == fresh(new)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_renamed_tensors_stay_on_their_device(device: str) -> None:
    """They are not copied, and joined ones are joined there."""
    model = hosted.make_model("deepseek_v3")
    stored = {name: each.to(device) for name, each in revert_weight_conversion(model, model.state_dict()).items()}
    module: Any = shell_of(type(model), model.config)
    load_stored(module, stored, torch.device(device))
    name = "model.layers.1.self_attn.o_proj.weight"
    assert module.get_parameter(name).data_ptr() == stored[name].data_ptr()
    joined = module.model.layers[1].mlp.experts.down_proj
    assert torch.equal(joined[3], stored["model.layers.1.mlp.experts.3.down_proj.weight"])
    assert {each.device.type for each in module.parameters()} == {device}


@pytest.mark.parametrize(
    "more", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"target_quantization": "int8"}], ids=["bf16", "fp16", "int8"]
)
def test_dtypes_and_rounded_matrices(more: dict[str, Any], tmp_path: Path) -> None:
    old, new = saved(tmp_path, "stablelm", hidden_size=128, head_dim=32)
    with making(old, **more) as gen:
        before = result(gen)
        gen.update_weights(hosted.make_model("stablelm", seed=1, hidden_size=128, head_dim=32).state_dict())
        assert result(gen) == fresh(new, **more) != before


def test_a_draft(tmp_path: Path) -> None:
    old, new = saved(tmp_path, "stablelm")
    with FastSpecGenerator(old, new, dtype="float32", **OPTIONS) as gen:
        before = result(gen)
        gen.update_weights(old, model="draft")
        with FastSpecGenerator(old, old, dtype="float32", **OPTIONS) as other:
            assert result(gen) == result(other) != before


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    old, new = saved(tmp_path, "stablelm", tie_word_embeddings=True)
    state = hosted.make_model("stablelm", seed=1, tie_word_embeddings=True).state_dict()
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    refused: list[tuple[Any, Any, str]] = [
        ({"model.other.weight": state[norm]}, CheckpointError, r"\(model\.other\.weight\) unexpected.*is hosted"),
        ({norm: state[norm]}, CheckpointError, "model.norm has a new weight without bias; give them together"),
        ({embedding: state[embedding][:5]}, CheckpointError, r"embed_tokens.weight has shape \[5, 32\], wanted"),
        ({embedding: state[embedding].int()}, UnsupportedModel, "is of torch.int32, wanted bfloat16"),
        ({**state, "lm_head.weight": state[embedding] + 1}, CheckpointError, "and this model ties them"),
        (hosted.make_model("phi"), CheckpointError, r"its config is not that of the target .*\(model_type\)"),
        (hosted.make_model("stablelm", rope_theta=5.0), CheckpointError, r"that of the target .*\(rope_parameters\)"),
    ]
    with making(old) as gen:
        before = result(gen)
        for values, error, message in refused:
            with pytest.raises(error, match=message):
                gen.update_weights(values)
            assert result(gen) == before
        gen.update_weights(state)
        assert result(gen) == fresh(new)
    with making(old, dtype="float16") as gen:
        before = result(gen)
        with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has values beyond float16"):
            gen.update_weights({**state, embedding: state[embedding] * 1e7, "lm_head.weight": state[embedding] * 1e7})
        assert result(gen) == before


def test_an_update_that_dies_midway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = saved(tmp_path, "stablelm")
    product, calls = _Refiller._product, [0]

    def dying(self: Any, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError("the disk is gone")
        return product(self, *given)

    with making(old) as gen:
        monkeypatch.setattr(_Refiller, "_product", dying)
        with pytest.raises(OSError, match="the disk is gone"):
            gen.update_weights(new)
        with pytest.raises(RuntimeError, match="part old, part new"):
            result(gen)
        gen.update_weights(new)
        assert result(gen) == fresh(new)
