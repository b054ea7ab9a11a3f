"""Checks of kernel arguments by shape, dtype and strides. Values are not checked: reading one would wait for the GPU.

A kernel gets addresses and a few strides, and assumes the rest. Without checks it would misread a tensor of another
layout, or write out of bounds, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec.kernels.common.kv_scales import FP8

ATTENTION_TYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 512  # largest head_dim in the launch tables of attention


def told(tensor: Tensor) -> str:
    """Describes a tensor in an error message: dtype, shape, and strides if it is not contiguous."""
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{_name(tensor.dtype)} {list(tensor.shape)}{strides}"


def check(
    name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None, *, step: str | None = None
) -> None:
    """Raises ValueError unless `tensor` is contiguous and has the wanted shape and dtype.

    Args:
        name: name of the tensor in the error message.
        tensor: the argument to check.
        shape: wanted shape.
        dtype: wanted dtype. None: any dtype.
        step: advice to the caller at the end of the error message. None: advice chosen by the kind of error.
    """
    fits = tensor.shape == tuple(shape) and dtype in (None, tensor.dtype)
    if fits and tensor.is_contiguous():
        return
    wanted = f"{_name(dtype or tensor.dtype)} {list(shape)}"
    raise ValueError(f"{name} is {told(tensor)}; wanted contiguous {wanted}: {step or _step(name, fits)}")


def check_table(name: str, table: Tensor, rows: int, width: int = 1) -> None:
    """Raises ValueError unless `table` is int64 [rows, >= width] with contiguous rows. For `name` see `check`."""
    fits = table.dim() == 2 and table.dtype == torch.int64 and table.shape[0] == rows and table.shape[1] >= width
    if fits and table.stride(1) == 1:
        return
    wanted = f"int64 [{rows}, {width} or more], each row contiguous"
    raise ValueError(f"{name} is {told(table)}; wanted {wanted}: {_step(name, fits)}")


def check_room(name: str, tensor: Tensor, least: int, step: str) -> None:
    """Raises ValueError unless `tensor` is contiguous int64 with at least `least` elements.

    For `name` and `step`, which appear in the error message, see `check`.
    """
    if tensor.dtype != torch.int64 or tensor.numel() < least or not tensor.is_contiguous():
        raise ValueError(f"{name} is {told(tensor)}; wanted contiguous int64 [{least}] or longer: {step}")


def check_logits(logits: Tensor) -> None:
    """Raises ValueError unless `logits` is fp32 [B, positions, V] whose last axis is contiguous."""
    if logits.dim() != 3 or logits.dtype != torch.float32 or logits.stride(2) != 1:
        raise ValueError(
            f"logits is {told(logits)}; wanted float32 [B, places, V], contiguous over the vocabulary: "
            "pass logits.float().contiguous()"
        )


def check_ieee() -> None:
    """Raises RuntimeError if torch is set to multiply fp32 matrices in tf32, with 10 of the 23 bits of the mantissa."""
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        raise RuntimeError(
            "torch is set to multiply float32 in tf32; exact=True needs IEEE products: call "
            "torch.set_float32_matmul_precision('highest') before generating, or make the generator with exact=False"
        )


def check_cache(
    rows: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, positions: Tensor, num_heads: int
) -> None:
    """Raises ValueError unless the attention kernels can read this paged KV cache.

    Args:
        rows: [B, Q, ...], for example qkv of the new tokens. Only B and Q are read.
        keys, values: cache of one layer, [num_pages, page_size, Hkv, D].
        block_table: int64 [B, P], the pages of each row.
        positions: int64 [B, Q], position of each new token.
        num_heads: number of query heads.
    """
    if keys.dim() != 4 or not keys.is_contiguous() or keys.dtype not in (*ATTENTION_TYPES, FP8):
        raise ValueError(
            f"keys is {told(keys)}; wanted contiguous [num_pages, page_size, Hkv, D] of bfloat16, float16, float32 or "
            "float8_e4m3fn: pass whole layers of the cache"
        )
    kv_heads, dim = keys.shape[2:]
    if dim % 2 or dim > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim is {dim}; wanted an even one up to {MAX_HEAD_DIM}: `reference` has this op for any other"
        )
    if num_heads % kv_heads:
        raise ValueError(f"num_heads is {num_heads}; wanted a multiple of the {kv_heads} key heads of the cache")
    check("values", values, keys.shape, keys.dtype, step="pass the layer of the cache that goes with keys")
    check("positions", positions, rows.shape[:2], torch.int64)
    check_table("block_table", block_table, rows.shape[0])


def rows_dtype(rows: Tensor, keys: Tensor) -> torch.dtype:
    """Returns the dtype that queries must have: the dtype of the KV cache, if the cache does not have 8 bits.

    With an 8-bit cache, queries may have any of ATTENTION_TYPES. The result is then the dtype of `rows`, or bf16 if
    `rows` has none of these types.

    Args:
        rows: the queries.
        keys: keys of the KV cache.
    """
    if keys.dtype != FP8:
        return keys.dtype
    return rows.dtype if rows.dtype in ATTENTION_TYPES else torch.bfloat16


def check_sinks(sinks: Tensor | None, num_heads: int, dtype: torch.dtype) -> None:
    """Raises ValueError unless `sinks` is None (no attention sinks), or [num_heads] in fp32 or `dtype`."""
    if sinks is not None:
        check("sinks", sinks, (num_heads,), dtype if sinks.dtype == dtype else torch.float32)


def _step(name: str, fits: bool) -> str:
    return f"pass {name}.contiguous()" if fits else "the table at the top of the op's file has all shapes and dtypes"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
