"""Prompts as users pass them, checked and turned into lists of ids before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def prompts_of(input_ids: Any, attention_mask: Any, vocab_size: int) -> list[list[int]]:
    """The prompts in `input_ids`: LongTensor [B, T] (left padding marked by the mask), 1-D, or lists of ids.

    Raises:
        ValueError: wrong type, dtype or nesting, an empty prompt, an id outside [0, vocab_size) (named with its
            row and position), or a mask that is not left padding of zeros and ones.
    """
    rows = _rows_of(input_ids)
    if attention_mask is not None:
        rows = _unpad(rows, _mask_rows(attention_mask, rows))
    if not rows:
        raise ValueError("input_ids holds no prompt; give at least one non-empty row of token ids")
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {index} is empty; give it at least one token, for example the BOS token")
        for position, token in enumerate(row):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt {index}, position {position}: token id {token} is outside the target's vocabulary "
                    f"[0, {vocab_size})"
                )
    return rows


def _rows_of(input_ids: Any) -> list[list[int]]:
    if isinstance(input_ids, Tensor):
        return _tensor_rows(input_ids, "input_ids")
    if not isinstance(input_ids, Sequence) or isinstance(input_ids, str):
        raise ValueError(
            f"input_ids must be a LongTensor [B, T] or [T], or a list of lists of ids, got {type(input_ids).__name__}; "
            "tokenize text first"
        )
    nested = [isinstance(row, Sequence | Tensor) and not isinstance(row, str) for row in input_ids]
    if any(nested) and not all(nested):
        raise ValueError("input_ids mixes ids and lists of ids; give one list per prompt")
    rows = list(input_ids) if any(nested) or not input_ids else [input_ids]
    return [_list_row(row, index) for index, row in enumerate(rows)]


def _tensor_rows(tensor: Tensor, name: str) -> list[list[int]]:
    if tensor.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise ValueError(f"{name} must hold integers, got dtype {tensor.dtype}")
    if tensor.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape [B, T] or [T], got {list(tensor.shape)}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(f"{name} must be a plain tensor with values, got layout {tensor.layout} on {tensor.device}")
    rows: list[list[int]] = (tensor[None] if tensor.dim() == 1 else tensor).tolist()
    return rows


def _list_row(row: Any, index: int) -> list[int]:
    if isinstance(row, Tensor):
        if row.dim() != 1:
            raise ValueError(f"prompt {index} must be 1-D, got shape {list(row.shape)}")
        return _tensor_rows(row, f"prompt {index}")[0]
    for position, token in enumerate(row):
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"prompt {index}, position {position}: {token!r} is not an integer token id")
    return list(row)


def _mask_rows(attention_mask: Any, rows: list[list[int]]) -> list[list[int]]:
    mask = attention_mask if isinstance(attention_mask, Tensor) else _mask_tensor(attention_mask)
    if mask.layout is not torch.strided or mask.is_meta:
        raise ValueError(f"attention_mask must be a plain tensor with values, got {mask.layout} on {mask.device}")
    if mask.dim() == 1:
        mask = mask[None]
    widths = {len(row) for row in rows}
    if mask.dim() != 2 or mask.shape[0] != len(rows) or widths != {mask.shape[1]}:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, input_ids has {len(rows)} rows of {sorted(widths)} tokens; "
            "they must be the same"
        )
    for index, (row, bad) in enumerate(zip(mask.tolist(), ((mask != 0) & (mask != 1)).tolist(), strict=True)):
        if any(bad):
            position = bad.index(True)
            raise ValueError(f"attention_mask row {index}, position {position}: {row[position]!r} is neither 0 nor 1")
    listed: list[list[int]] = mask.long().tolist()
    return listed


def _mask_tensor(attention_mask: Any) -> Tensor:
    try:
        return torch.tensor(attention_mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"attention_mask must be a tensor or nested lists like input_ids: {error}") from error


def _unpad(rows: list[list[int]], masks: list[list[int]]) -> list[list[int]]:
    prompts = []
    for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        first = mask.index(1) if 1 in mask else len(mask)
        if 0 in mask[first:]:
            position = first + mask[first:].index(0)
            raise ValueError(
                f"attention_mask row {index} has a 0 after a 1 (position {position}): only left padding is supported; "
                "set tokenizer.padding_side = 'left', or pass lists of ids without padding"
            )
        prompts.append(row[first:])
    return prompts
