"""Reads prompts and converts them to lists of token ids, before any kernel is launched."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastspec.inputs.values import is_array, is_list, listed, scalar

_WANTED = "a LongTensor [B, T] or [T], an array of integers, a list of lists of ids, or what a tokenizer returns"


@dataclass(frozen=True, slots=True)
class RawPrompts:
    """Prompts of a call, as the user passed them.

    Attributes:
        rows: token ids of each row, including padding.
        masks: attention mask of each row: 1 for text, 0 for padding. None: the user passed no mask.
        arrays: True if the user passed one array or tensor, not lists.
        device: device of the user's prompts.
    """

    rows: list[list[int]]
    masks: list[list[int]] | None
    arrays: bool
    device: torch.device

    @property
    def width(self) -> int:
        """Number of tokens of the longest row."""
        return max(map(len, self.rows), default=0)

    def prompts(
        self, vocab_size: int, padding: int | None = None, stop_ids: tuple[int, ...] = (), *, stacklevel: int = 2
    ) -> list[list[int]]:
        """Returns the rows without padding.

        A mask tells padding from text. Without a mask, an array's leading ids equal to `padding` are removed, as in
        transformers. They are kept as text if `padding` is also a stop id. Without a mask, lists are kept whole. Rows
        that are kept but look padded cause a warning.

        Args:
            vocab_size: upper limit of ids (exclusive).
            padding: the pad id that the user or the checkpoint set. None: not set.
            stop_ids: token ids that end a row.
            stacklevel: stack level of the warning.

        Raises:
            ValueError: an empty prompt, an id out of range, or padding that is not on the left.
        """
        if self.masks is not None:
            rows = _unpad(self.rows, self.masks)
        elif len(set(map(len, self.rows))) != 1:  # rows with padding would have one length
            rows = self.rows
        elif padding is None or padding in stop_ids or not self.arrays:
            rows = self.rows
            _warn_of_padding(rows, padding, stop_ids, stacklevel + 1)
        else:
            rows = [self._without(row, index, padding) for index, row in enumerate(self.rows)]
        _check(rows, vocab_size)
        return rows

    def _without(self, row: list[int], index: int, padding: int) -> list[int]:
        """Returns a row without the ids equal to `padding` at its beginning.

        Args:
            row: token ids of the row.
            index: index of the prompt, for the error.
            padding: the pad id.

        Raises:
            ValueError: the pad id also occurs after other ids.
        """
        left = row[_leading(row, padding) :]
        if padding in left:
            raise ValueError(
                f"prompt {index}, position {len(row) - len(left) + left.index(padding)}: pad_token_id={padding} behind "
                "other tokens, and there is no attention_mask. Padding belongs to the left (tokenizer.padding_side = "
                "'left'); if the id is part of the text, pass an attention_mask of ones"
            )
        return left


def read(input_ids: Any, attention_mask: Any = None) -> RawPrompts:
    """Reads prompts in any form that `generate` accepts.

    Args:
        input_ids: LongTensor [B, T] (left-padded, with a mask) or [T], an array, or lists of ids. A mapping, such as a
            tokenizer's result, has these as "input_ids", and optionally "attention_mask".
        attention_mask: mask in the shape of the ids. None: there is no mask, or the mapping has it.

    Raises:
        ValueError: there is no prompt, or its type, dtype or nesting is wrong. For a mask: it has values other than 0
            and 1, or its shape differs from the shape of the prompts.
    """
    if isinstance(input_ids, Mapping):
        input_ids, attention_mask = _of_tokenizer(input_ids, attention_mask)
    device = input_ids.device if isinstance(input_ids, Tensor) else torch.device("cpu")
    rows = _rows_of(input_ids)
    if not rows:
        raise ValueError("input_ids holds no prompt; give at least one non-empty row of token ids")
    masks = None if attention_mask is None else _mask_rows(attention_mask, rows)
    return RawPrompts(rows, masks, is_array(input_ids), device)


def _of_tokenizer(encoding: Mapping[str, Any], attention_mask: Any) -> tuple[Any, Any]:
    """Returns (input_ids, attention_mask) of a tokenizer's result. Without a mask in the result, uses the argument."""
    if "input_ids" not in encoding:
        raise ValueError(f"input_ids is a mapping without 'input_ids'; it holds {sorted(map(str, encoding))}")
    mask = encoding.get("attention_mask")
    if mask is not None and attention_mask is not None:
        raise ValueError("attention_mask is given twice, as an argument and with the ids; leave one out")
    return encoding["input_ids"], attention_mask if mask is None else mask


def _rows_of(input_ids: Any) -> list[list[int]]:
    if isinstance(input_ids, Tensor):
        return _tensor_rows(input_ids, "input_ids")
    if is_array(input_ids):
        return _array_rows(np.asarray(input_ids))
    if input_ids is None:
        raise ValueError(f"input_ids is missing (got NoneType); give prompts: {_WANTED}")
    if isinstance(input_ids, str | bytes):
        raise ValueError(f"input_ids must be {_WANTED}, got {type(input_ids).__name__}; tokenize text first")
    if not isinstance(input_ids, Sequence):
        raise ValueError(f"input_ids must be {_WANTED}, got {type(input_ids).__name__}")
    nested = [is_list(row) for row in input_ids]
    if any(nested) and not all(nested):
        raise ValueError("input_ids mixes ids and lists of ids; give one list per prompt")
    rows = list(input_ids) if any(nested) or not input_ids else [input_ids]
    return [_list_row(row, index) for index, row in enumerate(rows)]


def _array_rows(array: Any) -> list[list[int]]:
    if array.dtype == object or array.dtype.kind in "US":  # rows of different lengths, or text
        return _rows_of(array.tolist())
    if array.dtype.kind not in "iu":
        raise ValueError(f"input_ids must hold integers, got dtype {array.dtype}")
    if array.ndim not in (1, 2):
        raise ValueError(f"input_ids must have shape [B, T] or [T], got {list(array.shape)}")
    rows: list[list[int]] = (array[None] if array.ndim == 1 else array).tolist()
    return rows


def _tensor_rows(tensor: Tensor, name: str) -> list[list[int]]:
    if tensor.is_nested:  # nested tensors have no sizes to check
        raise ValueError(f"{name} must be a plain tensor, got a nested one; give a list of tensors")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized or tensor.dtype == torch.bool:
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
    if type(row) is list and set(map(type, row)) == {int}:
        return list(row)
    ids = [scalar(token) for token in listed(row)]
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            hint = "; tokenize text first" if isinstance(token, str) else ""
            raise ValueError(f"prompt {index}, position {position}: {token!r} is not an integer token id{hint}")
    return ids


def _leading(row: list[int], token: int) -> int:
    """Counts how many ids at the beginning of a row equal `token`."""
    return next((at for at, one in enumerate(row) if one != token), len(row))


def _warn_of_padding(rows: list[list[int]], padding: int | None, stop_ids: tuple[int, ...], stacklevel: int) -> None:
    """Warns if rows without an attention mask look padded, but are read as text.

    Args:
        rows: token ids of each row.
        padding: the pad id. None: it is not known.
        stop_ids: token ids that end a row.
        stacklevel: stack level of the warning.
    """
    named = padding if padding is not None else stop_ids[0] if stop_ids else None
    if named is None:  # without a pad id, padding is recognised as a run of one id
        named = next((row[0] for row in rows if _leading(row, row[0]) > 1), None) if len(rows) > 1 and rows[0] else None
    counts = [] if named is None else [_leading(row, named) for row in rows]
    # a single id at the front of every row is probably the token that begins texts
    if not any(counts) or (max(counts) == 1 and len(set(counts)) == 1):
        return
    why = "no pad_token_id is known" if padding is None else f"pad_token_id={padding} ends texts too"
    if padding is not None and padding not in stop_ids:
        why = "lists hold text alone"
    warnings.warn(
        f"prompt {counts.index(max(counts))} begins with {max(counts)} ids of {named}, which are read as text: there "
        f"is no attention_mask, and none can be inferred, for {why}. Pass the tokenizer's attention_mask",
        stacklevel=stacklevel,
    )


def _check(rows: list[list[int]], vocab_size: int) -> None:
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {index} is empty; give it at least one token, for example the BOS token")
        if min(row) >= 0 and max(row) < vocab_size:
            continue
        for position, token in enumerate(row):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt {index}, position {position}: token id {token} is outside the target's vocabulary "
                    f"[0, {vocab_size})"
                )


def _mask_rows(attention_mask: Any, rows: list[list[int]]) -> list[list[int]]:
    mask = attention_mask if isinstance(attention_mask, Tensor) else _mask_tensor(attention_mask)
    if mask.is_nested or mask.layout is not torch.strided or mask.is_meta:
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
    masks: list[list[int]] = mask.long().tolist()
    return masks


def _mask_tensor(attention_mask: Any) -> Tensor:
    try:
        given = listed(attention_mask) if is_array(attention_mask) else attention_mask
        rows = [listed(row) if is_array(row) and is_list(row) else row for row in given] if is_list(given) else given
        return torch.tensor(rows, device="cpu")
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
