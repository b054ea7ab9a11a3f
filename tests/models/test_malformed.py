"""Damaged and hostile checkpoint directories, through the public class: our error, in bounded time and memory."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastspec import CheckpointError, FastSpecGenerator, InvalidLogits, UnsupportedModel
from tests.helpers.checkpoints import edit, make_checkpoint, write_tokenizer
from tests.helpers.damage import (
    CONFIG,
    GENERATION,
    INDEX,
    JSON_FILES,
    SINGLE,
    TOKENIZER,
    Damage,
    as_directory,
    cut,
    damaged_bytes,
    damaged_value,
    header,
    ignore,
    in_two_shards,
    linked,
    map_entry,
    outside,
    remove,
    renamed,
    set_fields,
    tensors,
    write,
)
from tests.helpers.fuzzing import CI, NIGHTLY, SMALL, raised_by_us

HEADROOM = 2**30  # bytes of address space that refusing a checkpoint may take; what each of them claims is far more

pytestmark = pytest.mark.usefixtures("bounded")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pristine")
    small = {**SMALL, "num_hidden_layers": 1}
    made = {
        "single": make_checkpoint(root / "single", "llama3", **small),
        "sharded": make_checkpoint(root / "sharded", "llama3", max_shard_size="10KB", **small),
    }
    for directory in made.values():
        write_tokenizer(directory, [f"w{i}" for i in range(SMALL["vocab_size"])])
    return made


@pytest.fixture
def bounded() -> Iterator[None]:
    """Limits the address space, so that a file that asks for all of the memory gets a MemoryError instead."""
    if sys.platform != "linux":
        yield
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + HEADROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def made(directory: Path, draft: Path | None = None, **options: Any) -> FastSpecGenerator:
    fixed: dict[str, Any] = {"max_batch_size": 1, "max_length": 16, "page_size": 8, "device": "cpu", "progress": False}
    return FastSpecGenerator(directory, draft, **{**fixed, **options})


def works(gen: FastSpecGenerator) -> None:
    out = gen.generate([[1, 2]], max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (1, 5)
    assert bool(((out >= 0) & (out < gen.vocab_size)).all())
    gen.close()


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
DEEP = b"[" * 100_000
CORPUS: dict[str, tuple[str, Damage, type[ValueError], str]] = {
    # weights
    **{
        f"weights-cut-{keep}": ("single", cut(SINGLE, keep), CheckpointError, "not a whole safetensors file")
        for keep in (0, 1, 7, 8, 9, 100, 0.3, 0.9, -1)
    },
    "weights-header-huge": ("single", write(SINGLE, b"\xff" * 7 + b"\x7f{}"), CheckpointError, "not a whole safe"),
    "weights-header-no-json": ("single", write(SINGLE, b"\4" + b"\0" * 7 + b"nope"), CheckpointError, "not a whole"),
    "weights-header-deep": (
        "single",
        write(SINGLE, len(DEEP).to_bytes(8, "little") + DEEP),
        CheckpointError,
        "not a whole safetensors file",
    ),
    "weights-header-shape": (
        "single",
        header(lambda h: h[EMBED].update(shape=[2**40, 2**40])),
        CheckpointError,
        "not a whole safetensors file",
    ),
    "weights-header-dtype": (
        "single",
        header(lambda h: h[NORM].update(dtype="X9")),
        CheckpointError,
        "not a whole safetensors file",
    ),
    "weights-header-offsets": (
        "single",
        header(lambda h: h[NORM].update(data_offsets=[0, 2**63])),
        CheckpointError,
        "not a whole safetensors file",
    ),
    "tensor-float64": ("single", tensors(lambda t: t.update({NORM: t[NORM].double()})), UnsupportedModel, "as F64"),
    "tensor-int8": ("single", tensors(lambda t: t.update({NORM: t[NORM].char()})), UnsupportedModel, "stored as I8"),
    "tensor-shape": ("single", tensors(lambda t: t.update({NORM: t[NORM][:-1]})), CheckpointError, "has shape [31]"),
    "tensor-scalar": ("single", tensors(lambda t: t.update({NORM: t[NORM][0]})), CheckpointError, "has shape []"),
    "tensor-missing": ("single", tensors(lambda t: t.pop(NORM)), CheckpointError, f"({NORM}) missing"),
    "tensor-twice": (
        "single",
        tensors(lambda t: t.update({NORM.removeprefix("model."): t[NORM].clone()})),
        CheckpointError,
        "are both the parameter model.norm.weight; keep one",
    ),
    "tensor-none": ("single", tensors(lambda t: t.clear()), CheckpointError, "missing"),
    "weights-missing": ("single", remove(SINGLE), CheckpointError, "has no safetensors weights"),
    "weights-pickled": ("single", renamed(SINGLE, "pytorch_model.bin"), CheckpointError, "pickled weights"),
    "weights-directory": ("single", as_directory(SINGLE), CheckpointError, "no model.safetensors.index.json"),
    "weights-link-nowhere": ("single", linked(SINGLE, "nowhere"), CheckpointError, "no model.safetensors.index.json"),
    "weights-link-loop": ("single", linked(SINGLE, SINGLE), CheckpointError, "no model.safetensors.index.json"),
    "weights-link-device": ("single", linked(SINGLE, "/dev/zero"), CheckpointError, "no model.safetensors.index.json"),
    # index
    "shard-duplicate": ("sharded", in_two_shards, CheckpointError, "is in both"),
    "index-outside": ("sharded", outside, CheckpointError, "wanted the plain name of a .safetensors file"),
    **{
        f"index-name-{value!r}": ("sharded", map_entry(value), CheckpointError, "wanted the plain name")
        for value in (
            "../x",
            "/etc/passwd",
            "/x.safetensors",
            "..\\x.safetensors",
            "http://host/x.safetensors",
            "C:\\x.safetensors",
            "",
            ".",
            "tokenizer.json",
            "x\0.safetensors",
            7,
            None,
            True,
            ["x.safetensors"],
            {},
        )
    },
    "index-name-absent": ("sharded", map_entry("x.safetensors"), CheckpointError, "is not a file"),
    "index-name-surrogate": ("sharded", map_entry("\ud800.safetensors"), CheckpointError, "is not a file"),
    "index-ghost": ("sharded", map_entry("x.safetensors", "ghost"), CheckpointError, "is not a file"),
    "index-missing": ("sharded", remove(INDEX), CheckpointError, f"no {INDEX}"),
    "index-no-json": ("sharded", write(INDEX, b"weights"), CheckpointError, "not a readable JSON file"),
    "index-deep": ("sharded", write(INDEX, b'{"weight_map":' + DEEP), CheckpointError, "not a readable JSON file"),
    "index-huge": (
        "sharded",
        lambda directory: os.truncate(directory / INDEX, 2**36),  # sparse: 64 GiB of holes
        CheckpointError,
        "larger than",
    ),
    "index-list": ("sharded", set_fields(INDEX, weight_map=[NORM]), CheckpointError, "wanted a non-empty object"),
    # config
    "config-missing": ("single", remove(CONFIG), CheckpointError, f"has no {CONFIG}"),
    "config-directory": ("single", as_directory(CONFIG), CheckpointError, f"has no {CONFIG}"),
    "config-link-device": ("single", linked(CONFIG, "/dev/zero"), CheckpointError, f"has no {CONFIG}"),
    "config-huge": ("single", lambda d: os.truncate(d / CONFIG, 2**36), CheckpointError, "larger than"),
    "config-cut": ("single", cut(CONFIG, 0.5), CheckpointError, "not a readable JSON file"),
    "config-list": ("single", write(CONFIG, b"[]"), CheckpointError, "got a JSON list, wanted an object"),
    "config-null": ("single", write(CONFIG, b"null"), CheckpointError, "got a JSON NoneType"),
    "config-nan": ("single", set_fields(CONFIG, rms_norm_eps=float("nan")), CheckpointError, "NaN is not a JSON"),
    "config-bytes": ("single", write(CONFIG, b'{"model_type": "\xff\xfe"}'), CheckpointError, "not a readable JSON"),
    "config-deep": ("single", write(CONFIG, DEEP), CheckpointError, "not a readable JSON file"),
    **{
        f"config-{field}-{value!r}": (
            "single",
            set_fields(CONFIG, **{field: value}),
            CheckpointError,
            f"{field}={value!r}, wanted a whole number from 1 to",
        )
        for field, value in (
            ("hidden_size", 0),
            ("hidden_size", -1),
            ("hidden_size", 1e18),
            ("hidden_size", True),
            ("hidden_size", "8"),
            ("hidden_size", None),
            ("vocab_size", 2**60),
            ("num_hidden_layers", 10**9),
            ("num_key_value_heads", 0),
            ("max_position_embeddings", 2**80),
        )
    },
    "config-as-large-as-may-be": (
        "single",
        set_fields(CONFIG, vocab_size=2**24, hidden_size=2**20, intermediate_size=2**22, num_hidden_layers=2**12),
        CheckpointError,
        "missing",
    ),
    "config-model-type": ("single", set_fields(CONFIG, model_type=None), UnsupportedModel, "model_type=None"),
    "config-auto-map": ("single", set_fields(CONFIG, auto_map={"AutoConfig": "x.X"}), UnsupportedModel, "auto_map"),
    "config-quantised": (
        "single",
        set_fields(CONFIG, quantization_config={"quant_method": "gptq", "bits": 2}),
        UnsupportedModel,
        "quantization_config.bits=2",
    ),
    "config-architectures": ("single", set_fields(CONFIG, architectures=True), UnsupportedModel, "architectures=True"),
    "config-dtype": ("single", set_fields(CONFIG, dtype=1e18), CheckpointError, "not a valid llama config"),
    "config-theta-huge": (
        "single",
        set_fields(CONFIG, rope_parameters={"rope_type": "default", "rope_theta": 10**400}),
        UnsupportedModel,
        "rope_theta",
    ),
    "config-theta-tiny": (
        "single",
        set_fields(CONFIG, rope_parameters={"rope_type": "default", "rope_theta": 1e-300}),
        UnsupportedModel,
        "finite in float32",
    ),
    # generation config
    "generation-no-json": ("single", write(GENERATION, b"{"), CheckpointError, "not a readable JSON file"),
    "generation-list": ("single", write(GENERATION, b"[]"), CheckpointError, "wanted an object"),
}


@pytest.mark.parametrize(("base", "damage", "kind", "message"), CORPUS.values(), ids=CORPUS)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_malformed_checkpoint_is_refused_by_name(
    pristine: dict[str, Path],
    tmp_path: Path,
    role: str,
    base: str,
    damage: Damage,
    kind: type[ValueError],
    message: str,
) -> None:
    damaged = tmp_path / "model"
    shutil.copytree(pristine[base], damaged)
    damage(damaged)
    with pytest.raises(kind) as caught:
        made(damaged) if role == "target" else made(pristine[base], damaged)
    assert type(caught.value) is kind
    assert message in str(caught.value)
    assert raised_by_us(caught.value)
    assert str(caught.value).startswith(f"{role}: ")


def test_a_context_below_the_length_asked_for(pristine: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(pristine["single"], tmp_path / "model"))
    edit(directory / CONFIG, max_position_embeddings=8)
    with pytest.raises(ValueError, match="max_length must be a whole number between 2 and 8, got 16"):
        made(directory)


HARMLESS: dict[str, tuple[str, Damage]] = {
    "nothing": ("single", lambda directory: None),
    "shards": ("sharded", lambda directory: None),
    "link-to-outside": (  # as the Hub's cache lays files out
        "single",
        lambda d: ignore(((d / SINGLE).rename(d.parent / "blob"), (d / SINGLE).symlink_to("../blob"))),
    ),
    "pickle-beside": ("single", write("pytorch_model.bin", b"\x80\4cos\nabort\n(tR.")),
    "code-beside": ("single", write("modeling_llama.py", b"raise SystemExit")),
    "labels": ("single", set_fields(CONFIG, num_labels=10**9, id2label=None)),  # a table of as many names
    "labels-no-table": ("single", set_fields(CONFIG, id2label=3, label2id=[1])),
    "unknown-fields": ("single", set_fields(CONFIG, configuration_files=["x"], text_config={}, a=[1])),
    "index-beside-single": ("single", write(INDEX, b"{")),
    "no-generation-config": ("single", remove(GENERATION)),
}


def test_weights_that_are_not_numbers_are_named_at_the_first_token(pristine: dict[str, Path], tmp_path: Path) -> None:
    """They load, as they do elsewhere; what they lead to is an error and not a text."""
    directory = tmp_path / "model"
    shutil.copytree(pristine["single"], directory)
    tensors(lambda t: t[NORM].fill_(float("nan")))(directory)
    with pytest.raises(InvalidLogits, match="NaN or infinite"):
        works(made(directory))


@pytest.mark.parametrize(("base", "change"), HARMLESS.values(), ids=HARMLESS)
def test_what_looks_bad_and_is_not_loads(pristine: dict[str, Path], tmp_path: Path, base: str, change: Damage) -> None:
    directory = tmp_path / "model"
    shutil.copytree(pristine[base], directory)
    change(directory)
    gen = made(directory)
    assert gen.tokenizer is not None
    works(gen)


@pytest.mark.parametrize("what", ["empty directory", "file", "absent"])
def test_what_is_no_checkpoint(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "empty directory":
        path.mkdir()
    elif what == "file":
        path.write_bytes(b"{}")
    wanted = "a GGUF file, or a checkpoint directory" if what == "file" else "a checkpoint directory"
    with pytest.raises(CheckpointError, match=rf"^target: .*wanted {wanted}"):
        made(path)


BAD_TOKENIZERS = [b"", b"[]", b"{}", b"\xff\xfe", DEEP, b'{"added_tokens": 3}', b'{"model": {"type": "BPE"}}']


@pytest.mark.parametrize("content", BAD_TOKENIZERS, ids=lambda content: repr(content[:20]))
def test_a_bad_tokenizer_is_refused_where_it_is_needed(
    pristine: dict[str, Path], tmp_path: Path, content: bytes
) -> None:
    """Decoding ids needs none; a draft is compared with it, and `tokenizer` loads it."""
    directory = tmp_path / "model"
    shutil.copytree(pristine["single"], directory)
    (directory / TOKENIZER).write_bytes(content)
    gen = made(directory)
    with pytest.raises(CheckpointError, match="tokenizer"):
        _ = gen.tokenizer
    works(gen)
    for pair in ((directory, pristine["sharded"]), (pristine["sharded"], directory)):
        with pytest.raises(CheckpointError, match="tokenizer"):
            made(*pair)


def test_a_bomb_beside_the_tokenizer_is_not_read_again(pristine: dict[str, Path], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(pristine["single"], directory)
    (directory / "tokenizer_config.json").unlink()  # so that its class comes from the config
    edit(directory / CONFIG, num_labels=10**9)
    assert made(directory).tokenizer is not None


def test_a_failure_half_way_keeps_nothing(pristine: dict[str, Path], tmp_path: Path) -> None:
    """The draft's values are found bad while they are copied, when the whole target is in memory."""
    draft = tmp_path / "draft"
    shutil.copytree(pristine["single"], draft)
    tensors(lambda t: t[NORM].fill_(1e30))(draft)
    kept: list[weakref.ref[FastSpecGenerator]] = []

    class Watched(FastSpecGenerator):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            kept.append(weakref.ref(self))
            super().__init__(*arguments, **options)

    gc.collect()
    before = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
    with pytest.raises(CheckpointError, match="beyond float16"):
        Watched(pristine["sharded"], draft, max_length=16, dtype="float16", device="cpu", progress=False)
    gc.collect()
    assert kept[0]() is None
    assert sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()) <= before


# Fuzz: any change of the files' bytes or values


def outcome(action: Callable[[], Any]) -> Any:
    """What `action` returns, or the error of ours that it raises."""
    try:
        return action()
    except ValueError as error:
        if raised_by_us(error):
            return error
        raise


def survives(directory: Path) -> None:
    """Loading, tokenizing and decoding each works, or raises an error of ours."""
    gen = outcome(lambda: made(directory))
    if isinstance(gen, ValueError):
        assert isinstance(gen, CheckpointError | UnsupportedModel) or "max_length" in str(gen)
        return
    tokenizer = outcome(lambda: gen.tokenizer)
    assert not isinstance(tokenizer, ValueError) or isinstance(tokenizer, CheckpointError | UnsupportedModel)
    # may refuse the generation settings of the file
    outcome(lambda: gen.generate([[1, 2]], max_new_tokens=3, do_sample=False, top_k=0))


def fuzz(directory: Path, draw: Callable[[Any], Any]) -> None:
    file = draw(st.sampled_from([*JSON_FILES, "model-00001-of-*.safetensors"]))
    (path,) = directory.glob(file)
    whole = path.read_bytes()
    head = len(whole) if file in JSON_FILES else 8 + int.from_bytes(whole[:8], "little")
    strategy = damaged_bytes(whole, head)
    if file in JSON_FILES:
        strategy = st.one_of(damaged_value(whole), strategy)
    try:
        path.write_bytes(draw(strategy))
        survives(directory)
    finally:
        path.write_bytes(whole)


@pytest.fixture(scope="module")
def damaged(pristine: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(pristine["sharded"], tmp_path_factory.mktemp("fuzz") / "model"))


@settings(CI, max_examples=300)
@given(data=st.data())
def test_any_change_of_a_file_is_survived(damaged: Path, data: st.DataObject) -> None:
    fuzz(damaged, data.draw)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(NIGHTLY)
@given(data=st.data())
def test_any_change_of_a_file_is_survived_all_night(damaged: Path, data: st.DataObject) -> None:
    fuzz(damaged, data.draw)
