"""Reads single fields of a Hugging Face config, checks them, and refuses a bad one by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from fastspec.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FLOAT: Final = "__float__"
MAX_NUMBER: Final = 2.0**62  # limit of settings that are not sizes; torch's integers have 64 bits

SIZE_LIMITS: Final[Mapping[str, int]] = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "shared_expert_intermediate_size": 2**22,
    "shared_intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**16,
    "max_position_embeddings": 2**30,
    "sliding_window": 2**30,
    "linear_num_key_heads": 2**14,
    "linear_num_value_heads": 2**14,
    "linear_key_head_dim": 2**10,
    "linear_value_head_dim": 2**10,
    "linear_conv_kernel_dim": 2**6,
}
"""Largest accepted value of each size field, far above that of any real model. It bounds the memory and the time that a
bad config can cost."""


OPTIONAL_SIZES: Final = ("num_key_value_heads", "head_dim", "sliding_window")


def check_sizes(raw: Mapping[str, Any], path: str, *, native: bool) -> None:
    """Refuses a config file with sizes that are not whole numbers within their limits.

    Args:
        raw: the JSON object.
        path: its file, for messages.
        native: True for a family of this package. Other configs may omit any size, or have one value per layer.

    Raises:
        CheckpointError: names the file and the field.
    """
    for field, limit in SIZE_LIMITS.items():
        value = raw.get(field, 1)
        if (value is None and field in OPTIONAL_SIZES) or (not native and (value is None or isinstance(value, list))):
            continue
        if field == "sliding_window" and value == 0 and raw.get("use_sliding_window") is False:
            continue  # transformers saves configs of Qwen2-MoE in this way
        if field.startswith("shared_") and type(value) is int and value == 0:
            continue  # means "none" in Qwen3-Coder and MiniMax-M2; families with a shared expert refuse it
        if type(value) is not int or not 1 <= value <= limit:
            raise CheckpointError(f"{path}: {field}={value!r}, wanted a whole number from 1 to {limit}")


def with_floats(value: Any) -> Any:
    """Converts numbers that JSON does not have to floats. transformers stores them as {"__float__": "Infinity"}.

    Also converts them inside lists and objects. Returns anything else unchanged.
    """
    if isinstance(value, list):
        return [with_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {FLOAT} and value[FLOAT] in ("Infinity", "-Infinity", "NaN"):
        return float(value[FLOAT])
    return {name: with_floats(each) for name, each in value.items()}


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Checked access to the fields of one config. Methods that check a value raise UnsupportedModel for a bad one.

    Attributes:
        config: a transformers config object; not modified.
        supported: a list of supported models, for the end of error messages.
    """

    config: PretrainedConfig
    supported: str

    def refuse(self, field: str, got: object, wanted: str) -> NoReturn:
        """Raises UnsupportedModel with the field, its value and what was expected."""
        raise UnsupportedModel(f"{field}={got!r} is not supported, wanted {wanted}; {self.supported}")

    def get(self, field: str) -> Any:
        """Returns the value of a field without a check. None if the config lacks the field."""
        # a family's config class declares only its own fields, and transformers itself reads others in this way
        return getattr(self.config, field, None)

    def expect(self, field: str, wanted: object) -> None:
        """Refuses a config whose field has another value than `wanted`. A missing field is accepted.

        It is for fields that a publisher's code reads and that transformers does not read.
        """
        if (value := self.get(field)) not in (None, wanted):
            self.refuse(field, value, repr(wanted))

    def of_first_layer(self) -> ConfigFields:
        """Returns the fields of the first layer if the config has fields for each layer. Else returns these fields."""
        own = self.get("per_layer_config") if self.get("is_heterogeneous") else None
        return self if own is None else ConfigFields(own[0], self.supported)

    def size(self, field: str) -> int:
        """Returns the value of a size field, a whole number from 1 to its limit in SIZE_LIMITS."""
        value = self.get(field)
        limit = SIZE_LIMITS[field]
        if type(value) is not int or not 1 <= value <= limit:
            self.refuse(field, value, f"a whole number from 1 to {limit}")
        return int(value)

    def count(self, field: str, maximum: int, minimum: int = 1) -> int:
        """Returns the value of a field, a whole number from `minimum` to `maximum`."""
        value = self.get(field)
        if type(value) is not int or not minimum <= value <= maximum:
            self.refuse(field, value, f"a whole number from {minimum} to {maximum}")
        return int(value)

    def flag(self, field: str) -> bool:
        """Returns the value of a field, True or False. False if the field is missing."""
        value = self.get(field)
        if value is not None and type(value) is not bool:
            self.refuse(field, value, "true or false")
        return bool(value)

    def positive(self, field: str) -> float:
        """Returns the value of a field, a positive number."""
        return self.check_positive(self.get(field), field)

    def optional_positive(self, field: str) -> float | None:
        """Returns the value of a field, a positive number. None if the field is missing."""
        return None if self.get(field) is None else self.positive(field)

    def check_positive(self, value: object, field: str) -> float:
        """Returns `value` as a float, and checks that it is a positive number. Errors name `field`."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            self.refuse(field, value, f"a positive number up to {MAX_NUMBER:.2g}")
        return float(value)

    def layer_types(self, layers: int, *kinds: str) -> tuple[str, ...] | None:
        """Returns the type of each layer, which must be one of `kinds`. None if the config has no `layer_types`.

        Default kinds: "full_attention" and "sliding_attention". `layers` is the number of layers.
        """
        kinds = kinds or ("full_attention", "sliding_attention")
        types = self.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list | tuple) or len(types) != layers:
            self.refuse("layer_types", types, f"a list of num_hidden_layers={layers} entries")
        for kind in types:
            if kind not in kinds:
                self.refuse("layer_types", kind, " or ".join(map(repr, kinds)) + " in every layer")
        return tuple(types)
