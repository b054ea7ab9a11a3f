"""Arguments of a generator as one frozen value, which is checked once and must be equal on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict

import torch

from fastspec.adaptive.controller import AUTO
from fastspec.errors import UnsupportedOption
from fastspec.inputs.values import flag, scalar
from fastspec.proposers.choose import check
from fastspec.proposers.interface import Proposer
from fastspec.sampling.rules import BLOCK, Verification

if TYPE_CHECKING:  # transformers is slow to import, and a model given as a directory does not need it
    from transformers import PreTrainedModel

# default of prefill_budget, in prompt tokens: up to this number a pass on a GPU mostly waits for weights
PREFILL_BUDGET: Final = 256
_MAX_BUDGET: Final = 2**31 - 1
# arguments that may differ between ranks; `Ranks` compares `tensor_parallel` and `draft_tensor_parallel` itself
_OF_ONE_RANK: Final = frozenset(
    ["device", "progress", "nvtx", "release_source", "tensor_parallel", "draft_tensor_parallel"]
)

Source: TypeAlias = "str | os.PathLike[str] | PreTrainedModel"


class PlanOptions(TypedDict, total=False):
    """Keyword arguments of `plan`: the arguments of `FastSpecGenerator` that change memory use.

    `Config` has the defaults.
    """

    proposer: Proposer | None
    verification: Verification
    num_speculative_tokens: int | str
    max_batch_size: int
    max_length: int | None
    page_size: int
    dtype: torch.dtype | str | None
    device: torch.device | str | None
    target_revision: str | None
    draft_revision: str | None
    target_quantization: str | None
    draft_quantization: str | None
    feature_layers: Sequence[int] | None
    draft_vocab: Sequence[int] | None
    kv_dtype: str | Sequence[str | None] | None
    prefix_cache: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Arguments of `FastSpecGenerator` except target and draft, as the user gave them.

    `FastSpecGenerator` documents their meaning. `check` raises an error for invalid values.
    `engine.settings.settings_of` replaces None by values that depend on the models.
    """

    proposer: Proposer | None = None
    verification: Verification = BLOCK
    num_speculative_tokens: int | str = 4
    max_batch_size: int = 8
    max_length: int | None = None
    page_size: int = 64
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    target_revision: str | None = None
    draft_revision: str | None = None
    target_quantization: str | None = None
    draft_quantization: str | None = AUTO
    kv_dtype: str | Sequence[str | None] | None = None
    feature_layers: Sequence[int] | None = None
    draft_vocab: Sequence[int] | None = None
    release_source: bool = False
    prefix_cache: bool = True
    prefill_budget: int | None = PREFILL_BUDGET
    exact: bool = True
    graphs: bool | None = None
    compile: bool = False
    nvtx: bool = False
    progress: bool | Callable[[str], object] = True
    tensor_parallel: int | str | None = None
    draft_tensor_parallel: str | None = None

    @property
    def bars(self) -> bool:
        """True if progress bars are shown."""
        return not callable(self.progress) and bool(self.progress)

    @property
    def chooses_format(self) -> bool:
        """True if draft_quantization="auto": the weight format of the draft is chosen by estimated speed."""
        return self.draft_quantization == AUTO

    @property
    def formats(self) -> tuple[str | None, str | None]:
        """Formats to which the weights of the target and of the draft are quantised while they are loaded.

        None: the weights are not quantised, or "auto" has not chosen the format yet.
        """
        return self.target_quantization, None if self.chooses_format else self.draft_quantization

    def shared(self) -> dict[str, object]:
        """Returns {name of an argument: value} for the arguments that must be equal on all ranks."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OF_ONE_RANK}

    def check(self, *, with_draft: bool) -> None:
        """Checks those arguments that can be checked before the models are read.

        Args:
            with_draft: True if the generator has a draft model or learned drafter.

        Raises:
            ValueError: a flag is not a bool, `prefill_budget` is out of range, or `proposer` is not a Proposer.
            UnsupportedOption: an argument that needs a draft was given without a draft.
        """
        check(self.proposer, with_draft=with_draft)
        for name in ("prefix_cache", "exact", "graphs", "compile", "release_source", "nvtx"):
            value = getattr(self, name)
            if value is None and name in ("prefix_cache", "exact", "compile"):  # None would be read as False
                raise ValueError(f"{name} must be True or False, got None; leave it out for the default")
            flag(name, value)  # a text such as "no" would be read as True
        if not callable(self.progress) and not isinstance(scalar(self.progress), bool | None):
            raise ValueError(f"progress must be True, False or a function of a line, got {self.progress!r}")
        if self.prefill_budget is not None:
            check_range("prefill_budget", self.prefill_budget, 1, _MAX_BUDGET)
        if not with_draft and self.draft_quantization not in (None, AUTO):
            raise UnsupportedOption(
                f"draft_quantization={self.draft_quantization!r}, and there is no draft; leave it out"
            )


def check_range(name: str, value: Any, low: int, high: int) -> int:
    """Checks that a value is a whole number in low..high, and returns it as an int.

    Args:
        name: name of the argument, for the error.
        value: int, or an integer of numpy or torch.
        low: smallest permitted value.
        high: largest permitted value.

    Raises:
        ValueError: the value is not a whole number in this range. The message names the argument.
    """
    value = scalar(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number between {low} and {high}, got {value!r}")
    return value
