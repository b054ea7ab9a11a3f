"""What resolve finds, and what it refuses before a weight is read: damaged, foreign or dangerous checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoTokenizer, GenerationConfig

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import load_tokenizer, resolve
from fastspec.models.checkpoints.safetensors_files import MAX_JSON_BYTES
from tests.helpers.checkpoints import edit, make_checkpoint, make_model, refusal, write_tokenizer
from tests.helpers.damage import INDEX, SINGLE
from tests.helpers.tokenizers import byte_tokenizer


def test_a_directory_as_path_or_str(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = resolve(directory, role="target")
    assert (checkpoint.name, checkpoint.role) == (str(directory), "target")
    assert checkpoint.module is None
    monkeypatch.chdir(directory.parent)
    relative = resolve("model", role="target")
    assert relative.spec == checkpoint.spec
    monkeypatch.chdir("/")
    assert relative.directory is not None
    assert (relative.directory / SINGLE).is_file(), "a relative path must outlive a change of directory"


def test_a_live_model_is_a_source_with_its_own_generation_config() -> None:
    model = make_model("qwen3")
    model.generation_config.temperature = 0.5
    checkpoint = resolve(model, role="draft")
    assert (checkpoint.name, checkpoint.directory) == ("Qwen3ForCausalLM", None)
    assert checkpoint.module is model
    assert checkpoint.generation_config is not None
    assert checkpoint.generation_config.temperature == 0.5
    assert checkpoint.generation_config is not model.generation_config
    assert load_tokenizer(checkpoint) is None


def test_old_configs_are_read(directory: Path) -> None:
    new = resolve(directory, role="target").spec
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
    raw["torch_dtype"] = raw.pop("dtype")
    raw["rope_scaling"] = None
    del raw["head_dim"]
    path.write_text(json.dumps(raw))
    assert resolve(directory, role="target").spec == new
    raw["rope_theta"] = 77.0
    path.write_text(json.dumps(raw))
    assert resolve(directory, role="target").spec.rope != new.rope


def test_without_a_declared_dtype_the_stored_one_counts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2", dtype=torch.bfloat16)
    edit(tmp_path / "config.json", dtype=None)
    assert resolve(tmp_path, role="target").spec.dtype is torch.bfloat16
    model = make_model("llama2", dtype=torch.float16)
    model.config.dtype = None
    assert resolve(model, role="target").spec.dtype is torch.float16


def test_generation_config_from_its_file_else_from_the_config(directory: Path) -> None:
    GenerationConfig(eos_token_id=[5, 6], temperature=0.25, do_sample=True).save_pretrained(directory)
    found = resolve(directory, role="target").generation_config
    assert found is not None
    assert (found.eos_token_id, found.temperature, found.do_sample) == ([5, 6], 0.25, True)
    (directory / "generation_config.json").unlink()
    edit(directory / "config.json", eos_token_id=17)
    found = resolve(directory, role="target").generation_config
    assert found is not None
    assert found.eos_token_id == 17
    (directory / "generation_config.json").write_text("{")
    assert "generation_config.json: not a readable JSON" in refusal(directory)


# Raw JSON


@pytest.mark.parametrize("value", [-1, 0, 2**40, 64.0, 64.5, "64", True, [64], {}], ids=repr)
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "num_key_value_heads", "head_dim"])
def test_sizes_that_are_no_sizes_name_file_and_field(directory: Path, field: str, value: Any) -> None:
    edit(directory / "config.json", **{field: value})
    message = refusal(directory)
    assert f"{directory / 'config.json'}: {field}={value!r}, wanted a whole number from 1 to" in message


def test_null_sizes_in_a_config_take_their_default_or_are_refused(directory: Path) -> None:
    edit(directory / "config.json", num_key_value_heads=None, head_dim=None, sliding_window=None)
    assert resolve(directory, role="target").spec.num_kv_heads == 4
    edit(directory / "config.json", hidden_size=None)
    assert "hidden_size=None, wanted a whole number" in refusal(directory)


BAD_JSON = {
    "empty": b"",
    "cut": b'{"model_type": "llama"',
    "array": b"[1, 2]",
    "utf16": '{"model_type": "llama"}'.encode("utf-16"),
    "nan": b'{"model_type": "llama", "rms_norm_eps": NaN}',
    "twice": b'{"model_type": "llama", "vocab_size": 97, "vocab_size": 98}',
    "deep": b"[" * 200_000,
    "huge": b" " * (MAX_JSON_BYTES + 1),
    "long_int": b'{"vocab_size": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", BAD_JSON.values(), ids=BAD_JSON.keys())
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_bad_json_names_the_file(sharded: Path, file: str, content: bytes) -> None:
    (sharded / file).write_bytes(content)
    assert str(sharded / file) in refusal(sharded)


def test_the_repeated_name_is_told(directory: Path) -> None:
    (directory / "config.json").write_bytes(BAD_JSON["twice"])
    assert "'vocab_size' occurs twice" in refusal(directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map asks for code from the checkpoint"),
        ({"quantization_config": {"quant_method": "quanto"}}, "quantization_config.quant_method='quanto'"),
        ({"model_type": "mamba"}, "model_type 'mamba' has no decoder of its own"),
        ({"model_type": "recurrent_gemma"}, "model_type 'recurrent_gemma' has no decoder of its own"),
        ({"model_type": None}, "model_type=None"),
        ({"model_type": ["llama"]}, "model_type=['llama']"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures=['LlamaForTokenClassification']"),
        ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope_type='proportional'"),
        ({"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types='linear_attention'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_configs_are_refused_by_name(directory: Path, fields: dict[str, Any], message: str) -> None:
    edit(directory / "config.json", **fields)
    refused = refusal(directory, UnsupportedModel)
    assert message in refused
    assert str(directory / "config.json") in refused


@pytest.mark.parametrize(
    "fields",
    [{"rms_norm_eps": "tiny"}, {"tie_word_embeddings": "no"}, {"rope_scaling": "llama3"}, {"num_attention_heads": 7}],
    ids=repr,
)
def test_configs_that_transformers_rejects_name_the_file(directory: Path, fields: dict[str, Any]) -> None:
    edit(directory / "config.json", **fields)
    with pytest.raises((CheckpointError, UnsupportedModel), match=r"config\.json|rope_parameters"):
        resolve(directory, role="target")


def test_a_second_config_is_never_followed(directory: Path) -> None:
    other = json.loads((directory / "config.json").read_text())
    (directory / "config.5.0.0.json").write_text(json.dumps({**other, "rms_norm_eps": 0.5}))
    edit(directory / "config.json", configuration_files=["config.5.0.0.json"])
    assert resolve(directory, role="target").spec.rms_eps == 1e-5


def test_weights_that_the_config_names_elsewhere_are_refused(directory: Path) -> None:
    edit(directory / "config.json", transformers_weights="other.safetensors")
    assert "transformers_weights='other.safetensors' names other weights than model.safetensors" in refusal(
        directory, UnsupportedModel
    )
    for named in (None, SINGLE):
        edit(directory / "config.json", transformers_weights=named)
        resolve(directory, role="target")


def test_the_index_is_named_where_it_is_what_is_read(sharded: Path) -> None:
    edit(sharded / "config.json", transformers_weights=INDEX)
    resolve(sharded, role="target")
    edit(sharded / "config.json", transformers_weights=SINGLE)
    assert f"names other weights than {INDEX}" in refusal(sharded, UnsupportedModel)


def test_an_adapter_beside_the_weights_is_refused(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")
    resolve(directory, role="target")  # a leftover without weights
    (directory / "adapter_model.safetensors").write_bytes(b"")
    message = refusal(directory, UnsupportedModel)
    assert "puts the adapter on top" in message
    assert "merge_and_unload()" in message


# Hub ids


def hub_cache(root: Path, repo: str, source: Path, commit: str = "a" * 40) -> Path:
    """Lays a checkpoint out as the Hub client caches it: blobs, and a snapshot of symlinks to them."""
    folder = root / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    for index, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, folder / "blobs" / str(index))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(index))
    return snapshot


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_cached_hub_id_loads_offline_through_symlinks(sharded: Path, offline: Path) -> None:
    snapshot = hub_cache(offline, "owner/tiny", sharded)
    for revision in (None, "main", "a" * 40):
        checkpoint = resolve("owner/tiny", role="target", revision=revision)
        assert checkpoint.name == "owner/tiny"
        assert checkpoint.directory == snapshot
    assert checkpoint.spec == resolve(sharded, role="target").spec
    load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)


def asks_the_hub_about_commits(error: Exception) -> Callable[..., str]:
    """The client as huggingface_hub 1.33 has it where nobody answers: it looks there for what a commit holds, first."""
    snapshot_download = huggingface_hub.snapshot_download

    def asks(repo: str, *, revision: str | None = None, local_files_only: bool = False, **options: Any) -> str:
        if revision is not None and len(revision) == 40 and not local_files_only:
            raise error
        return str(snapshot_download(repo, revision=revision, local_files_only=local_files_only, **options))

    return asks


def test_what_is_cached_of_a_commit_needs_no_answer_from_the_hub(
    sharded: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_cache(offline, "owner/tiny", sharded)
    no_answer = huggingface_hub.errors.HfHubHTTPError.__mro__[1]("no route")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asks_the_hub_about_commits(no_answer))
    for revision in (None, "a" * 40):
        assert resolve("owner/tiny", role="target", revision=revision).directory == snapshot
    edit(snapshot / "config.json", model_type="mamba")
    assert "model_type 'mamba'" in refusal("owner/tiny", UnsupportedModel, revision="a" * 40)


def test_a_download_that_breaks_off_says_so_and_not_what_is_missing(
    sharded: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_cache(offline, "owner/tiny", sharded)
    next(snapshot.glob("*.safetensors")).unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asks_the_hub_about_commits(OSError("No space left")))
    for revision in (None, "a" * 40):
        assert "could not be downloaded from the Hub: No space left" in refusal("owner/tiny", revision=revision)


def test_offline_without_the_files_says_what_to_do(sharded: Path, offline: Path) -> None:
    message = refusal("owner/absent")
    assert "no local directory 'owner/absent'" in message
    assert "HF_HUB_OFFLINE" in message
    hub_cache(offline, "owner/tiny", sharded)
    assert "at revision 'v2' could not be downloaded" in refusal("owner/tiny", revision="v2")


def test_a_download_is_checked_before_its_weights_and_pinned_to_one_commit(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def fake(repo: str, **options: Any) -> str:
        calls.append({"repo": repo, **options})
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    resolve("owner/tiny", role="target", revision="v1")
    assert [call["revision"] for call in calls] == ["v1", directory.name, directory.name]

    def fetched(call: dict[str, Any], file: str) -> bool:
        allowed = any(fnmatch(file, pattern) for pattern in call["allow_patterns"])
        return allowed and not any(fnmatch(file, pattern) for pattern in call["ignore_patterns"])

    assert fetched(calls[0], "config.json")
    assert not fetched(calls[0], SINGLE)
    wanted = ["config.json", SINGLE, INDEX, "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    assert all(fetched(calls[1], file) for file in wanted)
    never = ["pytorch_model.bin", "model.pth", "modeling_x.py", "original/model.safetensors", "onnx/config.json"]
    assert not any(fetched(calls[1], file) for file in [*never, "consolidated.safetensors", "model.gguf", "x.pkl"])
    assert fetched(calls[2], "additional_chat_templates/tool_use.jinja")
    assert not any(fetched(calls[2], file) for file in [*wanted, *never, "additional_chat_templates/x.py"])

    calls.clear()
    edit(directory / "config.json", model_type="mamba")
    assert "model_type 'mamba'" in refusal("owner/tiny", UnsupportedModel)
    assert len(calls) == 1, "the weights of an unsupported model must not be downloaded"


@pytest.mark.parametrize(
    "error", [huggingface_hub.errors.HfHubHTTPError.__mro__[1], OSError, ValueError], ids=lambda kind: kind.__name__
)
def test_every_kind_of_network_failure_is_a_checkpoint_error(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "could not be downloaded from the Hub: no route" in refusal("owner/tiny")


def test_a_file_is_answered_with_its_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    for source in (directory / SINGLE, str(directory / SINGLE), "owner/model.safetensors"):
        assert "names a file; wanted a GGUF file, or a checkpoint directory" in refusal(source)


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [
        ("GatedRepoError", "ask for access at https://huggingface.co/owner/tiny and log in (hf auth login), or pass"),
        ("RepositoryNotFoundError", "check the name, or log in (hf auth login) where it is private, or pass"),
        ("RevisionNotFoundError", "see https://huggingface.co/owner/tiny/tree/main for the branches and tags"),
    ],
)
def test_what_the_hub_refuses_names_the_way_out(kind: str, way_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(getattr(huggingface_hub.errors, kind)):  # type: ignore[misc]
        def __init__(self) -> None:
            Exception.__init__(self, "No\n access.")  # its own wants an answer of the HTTP library

        def __str__(self) -> str:
            return str(self.args[0])

    def fail(*_: Any, **__: Any) -> str:
        raise Refused

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert f"could not be downloaded from the Hub: No access; {way_out}" in refusal("owner/tiny")


@pytest.mark.parametrize("source", ["./missing", "/missing/model", "a/b/c", "~/missing", "", "..", "x" * 300, "a b"])
def test_what_cannot_be_a_hub_id_never_reaches_the_network(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    message = refusal(source)
    assert "Hub id" in message or "config.json" in message


def test_a_path_object_or_a_file_is_not_a_hub_id(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    assert "not a directory" in refusal(Path("owner/tiny"))
    assert "names a file" in refusal(str(directory / SINGLE))


def test_a_revision_goes_with_a_hub_id_only(directory: Path) -> None:
    for source in (directory, make_model("llama2")):
        with pytest.raises(UnsupportedOption, match="revision='v1' was given with"):
            resolve(source, role="target", revision="v1")


@pytest.mark.parametrize("source", [None, 7, b"model", ["model"]], ids=repr)
def test_other_types_are_a_type_error(source: Any) -> None:
    with pytest.raises(TypeError, match="wanted a directory, a GGUF file, a Hub id or a loaded transformers model"):
        resolve(source, role="target")


# Tokenizers


def test_the_tokenizer_beside_the_weights(directory: Path) -> None:
    checkpoint = resolve(directory, role="target")
    assert load_tokenizer(checkpoint) is None
    write_tokenizer(directory, ["a", "b", "c"])
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    assert tokenizer("c b").input_ids == [2, 1]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_or_foreign_tokenizers_are_refused(directory: Path, file: str) -> None:
    write_tokenizer(directory, ["a", "b", "c"])
    checkpoint = resolve(directory, role="draft")
    edit(directory / file, auto_map={"AutoTokenizer": ["tokenization_x.X", None]})
    with pytest.raises(UnsupportedModel, match="auto_map asks for code"):
        load_tokenizer(checkpoint)
    (directory / file).write_text((directory / file).read_text()[:-20])
    with pytest.raises(CheckpointError, match=file):
        load_tokenizer(checkpoint)


def test_a_template_of_a_processor_and_templates_beside_the_default(tmp_path: Path, directory: Path) -> None:
    shutil.copytree(directory, tmp_path / "processor")
    byte_tokenizer().save_pretrained(tmp_path / "processor")
    (tmp_path / "processor/chat_template.json").write_text(json.dumps({"chat_template": "a processor's"}))
    loaded: Any = load_tokenizer(resolve(tmp_path / "processor", role="target"))
    assert loaded.chat_template == "a processor's"

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}  # type: ignore[assignment]
    tokenizer.save_pretrained(tmp_path / "processor", save_jinja_files=True)
    assert (tmp_path / "processor/additional_chat_templates/tool_use.jinja").is_file()
    loaded = load_tokenizer(resolve(tmp_path / "processor", role="target"))
    own: Any = AutoTokenizer.from_pretrained(tmp_path / "processor")
    for tools in (None, [{}]):
        assert loaded.get_chat_template(tools=tools) == own.get_chat_template(tools=tools)


def test_a_long_text_gives_no_advice(tmp_path: Path, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(directory, tmp_path / "short")
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 4
    tokenizer.save_pretrained(tmp_path / "short")
    loaded: Any = load_tokenizer(resolve(tmp_path / "short", role="target"))
    with caplog.at_level("WARNING", logger="transformers"):
        assert len(loaded("a" * 20)["input_ids"]) == 20
    assert caplog.records == []
