"""Checks that a checkpoint has the tensors that its config requires, and warns of tensors that are not used."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.parameter_names import NamedTensors
from fastspec.models.checkpoints.tensor_source import TensorInfo
from fastspec.models.heads.mtp_names import find_mtp
from fastspec.models.layer_table import EMBED, HEAD, tensor_shapes
from fastspec.models.text_parts import text_name

_OWN_KEYS: Final = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")

if TYPE_CHECKING:
    from fastspec.models.config import ModelSpec


def check_tensors(infos: Mapping[str, TensorInfo], spec: ModelSpec, name: str) -> None:
    """Compares the stored tensors with those that the config requires, before anything is allocated.

    Args:
        infos: properties of the stored tensors, by parameter name.
        spec: spec of the model, from the config.
        name: name of the checkpoint, for messages.

    Raises:
        CheckpointError: tensors are missing, or a shape differs from the config's.
        UnsupportedModel: a tensor is stored in a dtype other than bfloat16, float16 or float32.
    """
    wanted = tensor_shapes(spec)
    missing = [tensor for tensor in wanted if tensor not in infos]
    if missing:
        raise CheckpointError(
            f"{name}: {listing(missing)} missing; the config of this {spec.family} model needs them{_advice(missing)}"
        )
    if spec.tied and HEAD in infos:
        wanted[HEAD] = wanted[EMBED]
    for tensor, shape in wanted.items():
        info = infos[tensor]
        if info.shape != shape:
            raise CheckpointError(
                f"{name}: {tensor} in {info.where} has shape {list(info.shape)}, wanted {list(shape)} from the "
                f"config (vocab_size={spec.vocab_size}, hidden_size={spec.hidden_size}, "
                f"intermediate_size={spec.intermediate_size}, num_attention_heads={spec.num_heads}, "
                f"num_key_value_heads={spec.num_kv_heads}, head_dim={spec.head_dim})"
            )
        if isinstance(info.dtype, str):
            raise UnsupportedModel(
                f"{name}: {tensor} in {info.where} is stored as {info.dtype}, wanted BF16, F16 or F32: load an "
                "unquantised checkpoint"
            )


def _advice(missing: list[str]) -> str:
    if missing == [HEAD]:
        return (
            "; tie_word_embeddings is false in the config, or absent, which transformers reads as false: it would fill "
            "the head with random numbers. If the head is the embedding, set tie_word_embeddings to true in config.json"
        )
    return ""


def check_no_others(infos: Mapping[str, TensorInfo], spec: ModelSpec, name: str) -> None:
    """Refuses a live model with parameters that do not follow from its config, because its layers compute with them.

    Args:
        infos: properties of the model's parameters, by name.
        spec: spec of the model, from its config.
        name: class name of the model, for messages.

    Raises:
        CheckpointError: there are such parameters. The message names them.
    """
    wanted = {*tensor_shapes(spec), HEAD}
    extra = [tensor for tensor in infos if tensor not in wanted]
    if extra:
        raise CheckpointError(
            f"{name}: {listing(extra)} unexpected; the config of this {spec.family} model with {spec.num_layers} "
            "layers does not use them"
        )


def listing(names: list[str]) -> str:
    """Describes a list of tensors for messages: their number and the first three names."""
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensor(s) ({shown}{more})"


def warn_of_other_parts(stored: Iterable[str], name: str) -> list[str]:
    """Warns that tensors outside of the text model, such as those of a vision tower, are not used.

    Args:
        stored: stored names of tensors.
        name: name of the checkpoint, for messages.

    Returns:
        The names of tensors that may belong to the text model.
    """
    stored = sorted(stored)
    parts = [each for each in stored if text_name(each) is None]
    if parts:
        warnings.warn(
            f"{name}: {listing(parts)} not used: they are for images or sound, and only the text model runs",
            stacklevel=2,
        )
    return [each for each in stored if each not in set(parts)]


def _of_shared(stored: str, spec: ModelSpec) -> bool:
    """True if a stored tensor belongs to the K or V projection of a layer that uses the K and V of another layer.

    Some publishers store such tensors, which no computation reads.
    """
    found = _OWN_KEYS.search(stored)
    layer = int(found.group(1)) if found else spec.num_layers
    return layer < spec.num_layers and spec.plans[layer].shares is not None


def name_others(tensors: NamedTensors, spec: ModelSpec, name: str, *, is_part: bool) -> bool:
    """Warns that some tensors of a checkpoint are not used by the model.

    Tensors of MTP layers give no warning, because `draft="mtp"` may use them.

    Args:
        tensors: tensors of the checkpoint, by parameter name.
        spec: spec of the model.
        name: name of the checkpoint, for messages.
        is_part: True if the model is the text part of a larger model, such as one that also reads images.

    Returns:
        True if the checkpoint has MTP layers.
    """
    others = tensors.others()
    mtp = find_mtp(others, spec.num_layers)
    if mtp is not None:
        others = [other for other in others if other not in mtp.stored]
    others = [other for other in others if not _of_shared(other, spec)]
    if is_part:
        others = warn_of_other_parts(others, name)
    if others:
        warnings.warn(
            f"{name}: {listing(others)} not used: the config of this {spec.family} model with {spec.num_layers} layers "
            "does not use them. transformers leaves them out too; is it the config of these weights?",
            stacklevel=2,
        )
    return mtp is not None
