"""Hosted models: greedy text is transformers', bits are a row's own, and what cannot be hosted is refused by name."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils import logging

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.generator import FastSpecGenerator
from fastspec.kernels.common.rounding import FORMATS
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.config import MAKING
from fastspec.models.families import FAMILIES
from fastspec.models.hosted import swaps
from fastspec.models.hosted.info import HostedInfo, hosted_info
from fastspec.models.hosted.model import HostedModel
from fastspec.output import GenerateOutput
from tests.helpers import checkpoints
from tests.helpers.hosted import LONG, REFUSED, config_of, make_model, refused_config

# GPT-2's Conv1D and learned positions; parallel residuals; shared K/V and two head sizes; experts; sinks and biases;
# partial rotation; layer norms of heads; values narrower than keys; two values for the same keys; a head that calls a
# part of its base model
QUICK = [
    "gpt2",
    "gpt_neox",
    "gemma4_unified_text",
    "qwen3_moe",
    "gpt_oss",
    "phi",
    "stablelm",
    "deepseek_v3",
    "diffllama",
    "opt",
]
WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
PROMPTS = [[3, 5, 7, 9, 11], [8], [4, 90] * 12]
NEW = 20

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]


def oracle(model: PreTrainedModel) -> list[list[int]]:
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **options)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def generator(target: Any, draft: Any = None, **options: Any) -> FastSpecGenerator:
    given = {"max_batch_size": 4, "max_length": 96, "page_size": 16, "device": "cpu", "progress": False}
    return FastSpecGenerator(target, draft, **{**given, "dtype": "float32", **options})


def texts_of(gen: FastSpecGenerator, prompts: list[list[int]] = PROMPTS, **options: Any) -> GenerateOutput:
    out = gen.generate(prompts, max_new_tokens=NEW, eos_token_id=None, return_dict_in_generate=True, **options)
    assert isinstance(out, GenerateOutput)
    return out


@pytest.mark.parametrize("name", QUICK)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    model = make_model(name)
    wanted = oracle(model)
    with generator(model, model) as gen:
        for k in (0, 1, 4):
            out = texts_of(gen, num_speculative_tokens=k)
            assert out.new_tokens == wanted
            assert not k or out.stats.acceptance_rate == 1.0
        assert texts_of(gen, PROMPTS[2:]).new_tokens == wanted[2:]
        assert "hosted: transformers' " in gen.explain()
    assert oracle(model) == wanted  # the caller's module is as it was


def test_a_directory_is_hosted_as_the_live_module_and_drafts_for_native_models(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path / "hosted")
    native = checkpoints.make_checkpoint(tmp_path / "native", "llama3", vocab_size=101, head_dim=16)
    with generator(tmp_path / "hosted", native) as gen:
        assert texts_of(gen).new_tokens == oracle(model)
    with generator(native) as plain, generator(native, tmp_path / "hosted") as gen:
        assert texts_of(gen).new_tokens == texts_of(plain).new_tokens


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic"},
        {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 48},
        {"rope_type": "longrope", **LONG, "long_factor": LONG["short_factor"], "original_max_position_embeddings": 8},
    ],
    ids=["dynamic", "short factors alone", "both the same"],
)
def test_frequencies_that_change_beyond_the_context_alone_are_those_within_it(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    rope = {"rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.5, **rope}
    model = make_model("stablelm", rope_parameters=rope, max_position_embeddings=48)
    model.save_pretrained(tmp_path)
    wanted = oracle(model)
    for source in (model, tmp_path):
        with generator(source, max_length=48) as gen:
            assert texts_of(gen).new_tokens == wanted
        with pytest.raises(ValueError, match="max_length"):
            generator(source, max_length=49)


def test_a_native_family_has_the_same_text_when_it_is_hosted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoints.make_model("llama3")
    with generator(model) as native:
        wanted = texts_of(native).new_tokens
    monkeypatch.delitem(FAMILIES, "llama")
    with generator(model, model) as hosted:
        assert texts_of(hosted).new_tokens == wanted
        assert "hosted" in hosted.explain()


def test_models_are_made_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers ties no weights of any model while it reads one, and a second reading would make that last."""
    model = make_model("gpt_neox")
    model.save_pretrained(tmp_path)
    read, elsewhere = PreTrainedModel.from_pretrained.__func__, list[str]()

    def look() -> None:
        if free := MAKING.acquire(blocking=False):
            MAKING.release()
        elsewhere.append("free" if free else "held")

    def reading(kind: Any, *given: Any, **options: Any) -> Any:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return read(kind, *given, **options)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(reading))
    FastSpecGenerator(tmp_path, device="cpu", max_length=32, progress=False).close()
    assert elsewhere == ["held"]


def test_progress_is_shown_where_it_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_model("gpt_neox").save_pretrained(tmp_path)
    for progress in (False, True):
        capfd.readouterr()
        generator(tmp_path, progress=progress).close()
        assert ("Loading weights" in capfd.readouterr().err) == progress
        assert logging.is_progress_bar_enabled()


def test_norms_are_counted_and_said() -> None:
    info = hosted_info(config_of("deepseek_v3"))
    assert info.norms == 2 * 2 + 2 * 2 + 1  # before each part, of latent queries and keys, before the head
    assert ", 9 norms" in info.hosting
    assert info.weight_bytes(torch.bfloat16) == 2 * info.parameters + info.kept_bytes
    assert hosted_info(config_of("gpt2")).norms == 0


@pytest.mark.parametrize(
    ("name", "dtype"), [("gemma4_unified_text", "float32"), ("gemma4_unified_text", "bfloat16"), ("gpt2", "float32")]
)
def test_weights_are_held_once_and_counted_right(name: str, dtype: str) -> None:
    model = make_model(name, dtype=getattr(torch, dtype))
    with generator(model, release_source=True, dtype=dtype) as gen:
        target = gen._open().engine.modules.target
        assert isinstance(target, HostedModel)
        held: dict[int, int] = {}
        for part in (*target.module.modules(), *target.base.modules()):
            tensors = [*part._parameters.values(), *part._buffers.values()]
            if isinstance(part, swaps.Product | swaps.Embedding):
                tensors.append(part.weight.data)
            held |= {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor is not None}
        assert gen.memory_plan.target_weights == sum(held.values())
        assert gen.memory_plan.target_cache == sum(pages.nbytes for pages in (*target.keys, *target.values))
        # two layers of Gemma 4 share the K/V of the others
        assert (len(target.keys) == 2 < target.info.num_layers) == (name == "gemma4_unified_text")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_depends_on_neighbours_is_refused_by_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last elements of a tensor are rounded in another way only for some values: some models show it."""
    monkeypatch.setattr(swaps, "_CURVED", ())
    refused: dict[int, str] = {}
    for seed in range(8):
        try:
            generator(make_model("stablelm", seed=seed)).close()
        except UnsupportedModel as error:
            refused[seed] = str(error)
            break
    ((seed, message),) = refused.items()
    assert re.search(r"layer 'layers\.\d\.mlp\.act_fn': a token's bits depend on how many", message)
    model = make_model("stablelm", seed=seed)
    with generator(model, exact=False) as gen:
        assert texts_of(gen).new_tokens == oracle(model)


def test_attention_that_differs_from_the_modules_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gpt_neox")
    attend = HostedModel.attend

    def wrong(self: HostedModel, *args: Any) -> torch.Tensor:
        return attend(self, args[0], args[1] * 1.1, *args[2:])

    monkeypatch.setattr(HostedModel, "attend", wrong)
    with pytest.raises(UnsupportedModel, match="a whole pass over K/V in pages differs from transformers' own"):
        generator(model)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_hosted_is_refused_by_name(name: str) -> None:
    config, reason = refused_config(name)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        hosted_info(config)
    assert f"model_type {config.model_type!r}" in str(caught.value)


def test_damaged_quantised_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    make_model("gpt_neox").save_pretrained(tmp_path)
    assert isinstance(resolve(tmp_path, role="target").spec, HostedInfo)
    checkpoints.edit(tmp_path / "config.json", architectures=["GPTNeoXForTokenClassification"])
    assert "GPTNeoXForTokenClassification" in checkpoints.refusal(tmp_path, UnsupportedModel)
    checkpoints.edit(tmp_path / "config.json", architectures=["GPTNeoXForCausalLM"], auto_map={"AutoModel": "x.Y"})
    assert "auto_map" in checkpoints.refusal(tmp_path, UnsupportedModel)
    checkpoints.edit(tmp_path / "config.json", auto_map=None)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing_keys: gpt_neox\.layers\.1\.mlp\.dense_h_to_4h\.weight"):
        generator(tmp_path)
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    checkpoints.edit(tmp_path / "config.json", quantization_config=quantised)
    assert "no matrix is stored so" in checkpoints.refusal(tmp_path, CheckpointError)


def test_a_changed_live_module_is_refused() -> None:
    model = make_model("gpt_neox")
    model.gpt_neox.layers[1].use_parallel_residual = False
    with pytest.raises(UnsupportedModel, match=r"submodule 'gpt_neox.layers.1' has use_parallel_residual=False"):
        generator(model)
    model = make_model("gpt_neox")
    model.gpt_neox.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModel, match="forward hook"):
        generator(model)


def test_compilation_and_rounding_of_hosted_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="compile=True is for native families alone"):
        generator(make_model("gpt_neox"), compile=True, exact=False)
    with pytest.raises(UnsupportedOption, match=r"target_quantization=.* experts are not rounded while loading"):
        resolve_pair(make_model("deepseek_v3"), None, (None, None), (next(iter(FORMATS)), None))


def test_reductions_and_functions_in_fixed_shapes_give_what_torch_gives() -> None:
    x = torch.randn(2, 3, 5, 40, generator=torch.Generator().manual_seed(0))
    calls: list[tuple[Any, Any, Any]] = [
        *[(torch.Tensor.mean, (-1,), {"keepdim": True}), (torch.mean, (), {"dim": 3}), (torch.sum, ((-1,),), {})],
        (torch.Tensor.var, (), {"dim": -1, "unbiased": False, "keepdim": True}),
    ]
    for func, args, kwargs in calls:
        assert swaps._over_last((x, *args), kwargs)
        torch.testing.assert_close(swaps.padded_reduction(func, x, *args, **kwargs), func(x, *args, **kwargs))
    assert not swaps._over_last((x,), {})
    assert not swaps._over_last((x, 1), {})
    torch.testing.assert_close(swaps.padded_elements(torch.tanh, x), torch.tanh(x))


def test_numbers_that_modules_put_on_a_device_are_not_copied_there() -> None:
    """A captured step cannot copy from host memory. "meta" stands for a GPU, and has no copy either."""

    class Running:
        inside, tiling, queries, ops = False, swaps.Tiling(8, 8), 1, None
        constants: ClassVar[dict[Any, torch.Tensor]] = {}

    x = torch.tensor(1e-5, dtype=torch.float32)
    with swaps.FixedShapes(Running()):  # type: ignore[arg-type]
        moved = [x.to("meta"), x.to(torch.device("meta"), torch.bfloat16), torch.tensor(3, device="meta")]
        here = [x.to(torch.bfloat16), x.to("cpu"), torch.tensor([1.0, 2.0], device="meta"), torch.tensor(0.5)]
    assert [(each.device.type, each.dtype) for each in moved] == [
        *(("meta", torch.float32), ("meta", torch.bfloat16), ("meta", torch.int64))
    ]
    assert [each.device.type for each in here] == ["cpu", "cpu", "meta", "cpu"]
    assert swaps.number_on_device(2.5, device="meta") is not None
    assert [each.shape for each in Running.constants.values()] == [(2,)]
    kept = dict[Any, torch.Tensor]()
    values = torch.arange(6, dtype=torch.float64)
    for dtype in (None, torch.float32, torch.float32):
        found = swaps.constant_on_device(kept, torch.Tensor.to, values.view(2, 3), *([dtype] if dtype else []), "meta")
        assert found is not None
        assert (found.shape, found.dtype) == ((2, 3), dtype or torch.float64)
    assert len(kept) == 2, "the same values are put there once"
    for other in (values, values.to("meta"), torch.zeros(1 << 16)):
        device = "cpu" if other is values else "meta"
        assert swaps.constant_on_device(kept, torch.Tensor.to, other, device) is None
    assert swaps.number_on_device(x, torch.bfloat16) is None


def test_a_config_is_left_as_it_was() -> None:
    config = config_of("gpt_neox")
    before = config.to_dict()
    hosted_info(config)
    assert config.to_dict() == before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt_neox", "qwen3_moe", "gpt_oss", "stablelm", "deepseek_v3", "gemma3n_text"])
def test_on_a_gpu_steps_are_captured_and_drafts_change_nothing(name: str) -> None:
    # with widths that tensor cores take, where a family's own sizes do not hang on them
    sizes = {} if name in ("deepseek_v3", "gemma3n_text") else WIDE
    model = make_model(name, dtype=torch.bfloat16, **sizes).cuda()
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
    with generator(model, **options) as plain:  # construction compares bits of one token with those among k + 1
        wanted = texts_of(plain).new_tokens
    with generator(model, model, **options) as gen:
        assert texts_of(gen).new_tokens == wanted
        assert texts_of(gen, PROMPTS[:1]).new_tokens == wanted[:1]
        assert "captured" in gen.explain()
