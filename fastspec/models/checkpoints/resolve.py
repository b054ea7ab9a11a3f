"""Finds and checks a checkpoint: a local directory, a Hub id, or a live transformers model.

`resolve` checks everything that can be checked without loading the weights. First it checks the raw JSON, then the
config object that transformers makes of it, then names, shapes and dtypes in the safetensors headers. No code of a
checkpoint ever runs, and no pickle is ever opened.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from fastspec.errors import CheckpointError, UnsupportedModel, UnsupportedOption
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.decoder_weights import planned_bytes
from fastspec.models.checkpoints.expert_tensors import by_expert, check_mxfp4
from fastspec.models.checkpoints.generation import (
    CONFIG,
    settings_of_directory,
    settings_of_gguf,
    settings_of_module,
)
from fastspec.models.checkpoints.gguf.config import config_of_gguf
from fastspec.models.checkpoints.gguf.header import read_gguf_header
from fastspec.models.checkpoints.gguf.tensors import GgufTensors, find_gguf, tokenizer_of_gguf
from fastspec.models.checkpoints.hub import download, download_file, hub_gguf
from fastspec.models.checkpoints.live_module import ModuleTensors, as_built, check_as_built
from fastspec.models.checkpoints.parameter_names import (
    NamedTensors,
    check_copies,
    has_own_head,
    named,
    with_found_names,
    with_usual_names,
)
from fastspec.models.checkpoints.quantised.configs import Quantisation, quantisation_of
from fastspec.models.checkpoints.quantised.tensors import CacheScales, QuantisedShards, read_cache_scales
from fastspec.models.checkpoints.safetensors_files import INDEX, SINGLE, ShardTensors, read_json
from fastspec.models.checkpoints.tensor_checks import check_no_others, check_tensors, name_others, warn_of_other_parts
from fastspec.models.checkpoints.tensor_source import TensorSource
from fastspec.models.config import (
    ModelSpec,
    refuse_other_architectures,
    spec_from_config,
    supported_models,
)
from fastspec.models.families import FAMILIES, runs_natively
from fastspec.models.fields import check_sizes, with_floats
from fastspec.models.hosted.codes import hosted_bytes, quantised_products
from fastspec.models.hosted.info import HostedInfo, check_hosted_module, hosted_info, is_hostable, known_type
from fastspec.models.layer_table import EMBED, HEAD, tensor_shapes
from fastspec.models.remote_code import AUTO_MAP, names_causal_model, refuse_remote_code, with_known_type
from fastspec.models.text_parts import native_text_part

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from fastspec.models.checkpoints.tensor_source import TensorInfo

MODELOPT: Final = "hf_quant_config.json"
QUANTISED_FIELDS: Final = ("quantization_config", "compression_config")
PROCESSOR_TEMPLATE: Final = "chat_template.json"  # file of chat templates of models with images, until 2025
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TEXT_CONFIG: Final = "text_config"
ADAPTER: Final = "adapter_config.json"
# Fields of classifiers, which are not read: transformers would make a table of as many labels as a file asks for.
UNREAD_FIELDS: Final = ("num_labels", "id2label", "label2id")


def resolve(
    source: str | os.PathLike[str] | PreTrainedModel,
    *,
    role: str,
    revision: str | None = None,
    fetched: Path | None = None,
) -> Checkpoint:
    """Finds a checkpoint and checks its config and the names, shapes and dtypes of its tensors.

    Values of matrices are read in one case: if the config ties the output matrix (LM head) to the embedding and both
    are stored, the two are compared.

    Args:
        source: a local directory, a GGUF file, a Hub id ("owner/name"), a GGUF file of the Hub
            ("owner/name:file.gguf"), or a loaded transformers model. Files of the Hub that are not in the cache are
            downloaded. If a str is a directory and also a Hub id, the directory is used.
        role: "target" or "draft", for messages.
        revision: branch, tag or commit of a Hub id. Must be None for other sources.
        fetched: local directory to which the files of this Hub id were downloaded already. None: not downloaded yet.

    Returns:
        The checkpoint. No memory for weights is allocated.

    Raises:
        CheckpointError: the checkpoint is not found, cannot be downloaded, or is damaged. The message names the file
            and the field.
        UnsupportedModel: a model that cannot be run.
        UnsupportedOption: `revision` is given, and `source` is not a Hub id.
        TypeError: `source` is of another type.
    """
    if not isinstance(source, str | os.PathLike | nn.Module):
        raise TypeError(
            f"{role}: got {type(source).__name__}, wanted a directory, a GGUF file, a Hub id or a loaded "
            "transformers model"
        )
    with _naming(role):
        if isinstance(source, nn.Module):
            _refuse_revision(revision, "a loaded model")
            return _from_module(source, role)
        file = find_gguf(source)
        if file is not None:
            _refuse_revision(revision, f"the file {file}")
            return _from_gguf(file, str(source), role)
        on_hub = hub_gguf(source)
        if on_hub is not None:
            return _from_gguf(download_file(*on_hub, revision), str(source), role)
        # os.path, not Path: for a name that is too long it gives False, and not an OSError
        directory = Path(os.path.abspath(os.path.expanduser(source)))
        if os.path.isdir(directory):
            _refuse_revision(revision, f"the directory {directory}")
            return _from_directory(directory, str(source), role)
        return _from_directory(fetched or download(source, revision, check_before_download), str(source), role)


@contextmanager
def _naming(what: object) -> Iterator[None]:
    """Context manager that puts `what`, a role or a file, in front of the message of an error that is raised inside."""
    try:
        yield
    except (CheckpointError, UnsupportedModel) as error:
        raise type(error)(f"{what}: {error}") from error


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer in the directory or the GGUF file of a checkpoint.

    Returns:
        The tokenizer. None for a live module, and if there is no tokenizer.

    Raises:
        CheckpointError: there are tokenizer files, but they cannot be read.
        UnsupportedModel: the tokenizer needs code from the checkpoint.
    """
    if checkpoint.gguf_header is not None:
        tokenizer = tokenizer_of_gguf(checkpoint.gguf_header, checkpoint.role)
    elif checkpoint.directory is not None and _has_tokenizer(checkpoint.directory):
        tokenizer = _tokenizer_of_directory(checkpoint.directory, checkpoint.role)
    else:
        return None
    if tokenizer is not None:
        # the generator checks lengths itself, by its own max_length: a text beyond model_max_length needs no warning
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _tokenizer_of_directory(directory: Path, role: str) -> PreTrainedTokenizerBase:
    read = {}
    for file in (TOKENIZER_CONFIG, "tokenizer.json"):
        if (directory / file).is_file():
            read[file] = read_json(directory / file)
            refuse_remote_code(directory / file, read[file])
    from fastspec.models.config_classes import load_as_named

    config = _build_config(directory / CONFIG, check_config_file(directory))
    try:
        tokenizer: PreTrainedTokenizerBase = load_as_named(directory, config, read.get(TOKENIZER_CONFIG, {}))
    except Exception as error:  # the tokenizers library raises nothing narrower for a damaged file
        raise CheckpointError(
            f"{role}: {directory}: cannot load its tokenizer: {error}; save it again with save_pretrained"
        ) from error
    if not tokenizer.chat_template and (directory / PROCESSOR_TEMPLATE).is_file():
        tokenizer.chat_template = read_json(directory / PROCESSOR_TEMPLATE).get("chat_template")
    return tokenizer


def _has_tokenizer(directory: Path) -> bool:
    alone = ("tokenizer.json", "tokenizer.model")
    pair = ("vocab.json", "merges.txt")
    there = {file for file in (*alone, *pair) if (directory / file).is_file()}
    return bool(there.intersection(alone)) or there.issuperset(pair)


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise UnsupportedOption(f"revision={revision!r} was given with {what}; it goes with a Hub id only")


def _from_module(module: nn.Module, role: str) -> Checkpoint:
    if is_hostable(module):
        name = type(module).__name__
        check_hosted_module(module)
        info = hosted_info(module.config, type(module))  # type: ignore[arg-type]
        return Checkpoint(
            name, role, info, None, module, settings_of_module(module, info.vocab_size), count=hosted_bytes
        )
    held = ModuleTensors(module)
    name = type(module).__name__
    config: Any = copy.deepcopy(module.config)
    spec = spec_from_config(config)
    tensors = with_usual_names(by_expert(held, spec, name), spec)
    spec = with_found_names(spec, tensors)
    spec = _with_stored_dtype(spec, tensors.infos())
    check_tensors(tensors.infos(), spec, name)
    check_no_others(tensors.infos(), spec, name)
    check_copies(held, spec, name)
    check_as_built(module, spec)
    spec = as_built(module, spec)
    if spec.tied and has_own_head(tensors):
        spec = replace(spec, tied=False)
    return Checkpoint(name, role, spec, None, module, settings_of_module(module, spec.vocab_size), count=planned_bytes)


def _from_directory(directory: Path, name: str, role: str) -> Checkpoint:
    raw = check_config_file(directory)
    config = _build_config(directory / CONFIG, raw)
    _refuse_other_weights(directory, raw)
    with _naming(directory / CONFIG):
        text = native_text_part(config)
    if not runs_natively(config) and text is None:
        return _hosted(directory, name, role, raw, config)
    with _naming(directory / CONFIG):
        spec = spec_from_config(text or config)
    with _naming(directory):
        quantisation = _quantisation(directory, raw)
    shards: TensorSource = by_expert(ShardTensors(directory), spec, name)
    check_mxfp4(shards, quantisation, name)
    check_copies(shards, spec, name)
    spec = with_found_names(spec, with_usual_names(shards, spec))
    stored, scales = "", {}
    if quantisation is not None:
        scales = _cache_scales(shards, quantisation, spec, f"{role}: {name}")
        shards = quantised = QuantisedShards(shards, quantisation, tensor_shapes(spec), spec)
        stored = quantised.describe() or f"experts in {quantisation.method}"
    tensors = named(shards, spec)
    if raw.get("dtype", raw.get("torch_dtype")) is None:
        spec = _with_stored_dtype(spec, tensors.infos())
    check_tensors(tensors.infos(), spec, name)
    spec = _with_own_head(spec, tensors, f"{role}: {name}")
    is_part = text is not None or FAMILIES[spec.family].text_part
    mtp = name_others(tensors, spec, f"{role}: {name}", is_part=is_part)
    settings = settings_of_directory(directory, raw, spec.vocab_size)
    return Checkpoint(
        name, role, spec, directory, None, settings, quantisation, stored, scales, mtp=mtp, count=planned_bytes
    )


def _from_gguf(file: Path, name: str, role: str) -> Checkpoint:
    header = read_gguf_header(file)
    raw = config_of_gguf(header)
    check_sizes(raw, str(file), native=True)
    with _naming(file):
        spec = spec_from_config(_build_config(file, raw))
    stored = GgufTensors(header, spec)
    check_tensors(stored.infos(), spec, name)
    spec = replace(spec, dtype=stored.dtype)
    return Checkpoint(
        name,
        role,
        spec,
        None,
        None,
        settings_of_gguf(file, raw, spec.vocab_size),
        stored=stored.describe(),
        gguf_header=header,
        count=planned_bytes,
    )


def _cache_scales(
    shards: TensorSource, quantisation: Quantisation, spec: ModelSpec, name: str
) -> dict[int, CacheScales]:
    scales = read_cache_scales(shards, tensor_shapes(spec), spec)
    if scales or quantisation.cache:
        warnings.warn(
            f"{name}: the checkpoint is meant for K and V in 8 bits ({len(scales)} layers with scales); "
            "K and V stay in 16 bits unless kv_dtype='fp8' is given, which is closer to the unquantised model",
            stacklevel=2,
        )
    return scales


def _hosted(directory: Path, name: str, role: str, raw: dict[str, Any], config: PretrainedConfig) -> Checkpoint:
    info = _hosted_info(directory, raw, config)
    shards = ShardTensors(directory)  # whole files, with safe names
    if info.whole:
        warn_of_other_parts(shards.infos(), f"{role}: {name}")
    settings, quantisation = settings_of_directory(directory, raw, info.vocab_size), _quantisation(directory, raw)
    if quantisation is None:
        return Checkpoint(name, role, info, directory, None, settings, count=hosted_bytes)
    stored = quantised_products(shards, quantisation, info).describe()
    return Checkpoint(name, role, info, directory, None, settings, quantisation, stored, count=hosted_bytes)


def _hosted_info(directory: Path, raw: dict[str, Any], config: PretrainedConfig) -> HostedInfo:
    with _naming(directory / CONFIG):
        info = hosted_info(config)
        if info.whole and _quantisation(directory, raw) is not None:
            raise UnsupportedModel(
                f"model_type {raw['model_type']!r} is hosted, and quantised text parts are read for native families "
                "alone; load the original weights"
            )
        named = raw.get("architectures")
        one = isinstance(named, list) and len(named) == 1 and isinstance(named[0], str)
        if named and not info.whole and not (one and names_causal_model(named[0], raw["model_type"])):
            raise UnsupportedModel(f"architectures={named!r} is not supported, wanted [{info.kind.__name__!r}]")
    return info


def check_before_download(directory: Path) -> None:
    """Refuses a model that cannot be run, before its weights are downloaded. Reads only the config in `directory`."""
    raw = check_config_file(directory)
    config = _build_config(directory / CONFIG, raw)
    if not runs_natively(config) and native_text_part(config) is None:
        _hosted_info(directory, raw, config)


def _quantisation(directory: Path, raw: Mapping[str, Any]) -> Quantisation | None:
    beside = directory / MODELOPT
    return quantisation_of(raw, read_json(beside) if beside.is_file() else None)


def _refuse_other_weights(directory: Path, raw: Mapping[str, Any]) -> None:
    """Refuses a directory from which transformers would load other weights than those that `find_shards` finds."""
    used, asked = SINGLE if (directory / SINGLE).is_file() else INDEX, raw.get("transformers_weights")
    if asked is not None and asked != used:
        raise UnsupportedModel(
            f"{directory / CONFIG}: transformers_weights={asked!r} names other weights than {used}, the ones that are "
            "read here; save the model again with save_pretrained, or delete that field"
        )
    if (directory / ADAPTER).is_file() and any(directory.glob("adapter_model.*")):
        raise UnsupportedModel(
            f"{directory}: {ADAPTER} and its weights lie beside those of the model, and transformers puts the adapter "
            "on top of them; save the merged model (merge_and_unload()), or delete adapter_* if the weights are merged"
        )


def _with_own_head(spec: ModelSpec, tensors: NamedTensors, name: str) -> ModelSpec:
    if not spec.tied or not has_own_head(tensors):
        return spec
    warnings.warn(
        f"{name}: the config ties the head to the embedding, but another {HEAD} is stored: it is used as it is, as in "
        "transformers. Set tie_word_embeddings to false in config.json if that is meant, or delete the tensor",
        stacklevel=2,
    )
    return replace(spec, tied=False)


def _with_stored_dtype(spec: ModelSpec, infos: Mapping[str, TensorInfo]) -> ModelSpec:
    stored = infos[EMBED].dtype if EMBED in infos else spec.dtype
    return spec if isinstance(stored, str) else replace(spec, dtype=stored)


def check_config_file(directory: Path) -> dict[str, Any]:
    """Reads `config.json`, and refuses unsafe or unsupported content before transformers reads it.

    Returns:
        The JSON object.

    Raises:
        CheckpointError: the file is unreadable, or a size is not a whole number within its limits. The message names
            the file and the field.
        UnsupportedModel: remote code, or a quantised format, family or architecture that is not supported.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: has no {CONFIG}; wanted a checkpoint directory as save_pretrained writes it"
        )
    raw = with_known_type(path, read_json(path))
    refuse_remote_code(path, raw)
    family = raw.get("model_type")
    if not isinstance(family, str) or not (family in FAMILIES or known_type(family)):
        raise UnsupportedModel(f"{path}: model_type={family!r} is not supported; {supported_models()}")
    if family in FAMILIES:
        with _naming(path):
            refuse_other_architectures(family, raw.get("architectures"))
    with _naming(path):
        quantisation_of(raw)
    if raw.get("per_layer_config") and family in FAMILIES and not FAMILIES[family].mixed_heads:
        raise UnsupportedModel(f"{path}: per_layer_config is not supported; {supported_models()}")
    check_sizes(raw, str(path), native=family in FAMILIES)
    if isinstance(raw.get(TEXT_CONFIG), dict):
        check_sizes(raw[TEXT_CONFIG], f"{path}: {TEXT_CONFIG}", native=False)
    return raw


def _build_config(path: Path, raw: Mapping[str, Any]) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError

    from fastspec.models.config_classes import config_class

    # not from_pretrained, which would read another file if the checked JSON has `configuration_files`
    family = FAMILIES.get(raw["model_type"])
    kind = config_class((family and family.read_as) or raw["model_type"])
    unread = (*UNREAD_FIELDS, *QUANTISED_FIELDS, AUTO_MAP)
    read = {field: with_floats(copy.deepcopy(value)) for field, value in raw.items() if field not in unread}
    try:
        config: PretrainedConfig = kind.from_dict(read)
    except (StrictDataclassError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: not a valid {raw['model_type']} config: {error}") from error
    return config
