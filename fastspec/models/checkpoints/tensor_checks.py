"""Checks of stored tensors against the table of a model's tensors, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastspec.errors import CheckpointError, UnsupportedModel
from fastspec.models.checkpoints.tensor_source import TensorInfo
from fastspec.models.layer_table import EMBED, HEAD, tensor_shapes

if TYPE_CHECKING:
    from fastspec.models.config import ModelSpec


def check_tensors(infos: Mapping[str, TensorInfo], spec: ModelSpec, name: str) -> None:
    """Compares what a checkpoint holds with what its config promises, before anything is allocated.

    Args:
        infos: the stored tensors. spec: of the same checkpoint. name: the checkpoint, for messages.

    Raises:
        CheckpointError: names are missing, or a shape is not the config's.
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
    """Refuses parameters of a live model that its config has no place for: its layers compute with them.

    Raises:
        CheckpointError: names them.
    """
    wanted = {*tensor_shapes(spec), HEAD}
    extra = [tensor for tensor in infos if tensor not in wanted]
    if extra:
        raise CheckpointError(
            f"{name}: {listing(extra)} unexpected; the config of this {spec.family} model with {spec.num_layers} "
            "layers has no place for them"
        )


def listing(names: list[str]) -> str:
    """The number of names and the first three of them, for messages."""
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensor(s) ({shown}{more})"
