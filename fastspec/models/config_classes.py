"""Config and tokenizer classes of the most common families, without transformers' slow imports.

In some versions, a decorator of transformers' config classes imports all of generation. Llama's class validates a
training field, for which it imports image readers, `torch.distributed.tensor` and torchvision. `AutoTokenizer` imports
all that and torch's compiler to find the class of a tokenizer. This takes seconds and is not needed here. The config
classes below have the same names, fields, defaults and base class. The class of a tokenizer is found by the name in the
checkpoint.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# If a checkpoint names one of these tokenizer classes, and has a model type of the second list, then `AutoTokenizer`
# loads PreTrainedTokenizerFast
_OF_ONE_FILE: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")
_READ_FROM_ONE_FILE: Final = ("llama",)
# the same for Qwen2Tokenizer
_QWEN: Final = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_READ_AS_QWEN: Final = ("qwen2", "qwen3")


class _Config(PretrainedConfig):
    """Fields that the four config classes below have in common, as documented in transformers."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_dropout: int | float | None = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]


class LlamaConfig(_Config):
    """Fields of `transformers.LlamaConfig`."""

    model_type = "llama"

    intermediate_size: int = 11008
    max_position_embeddings: int = 2048
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    attention_bias: bool = False
    mlp_bias: bool = False
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Raises ValueError if the number of heads does not divide the hidden size. Called when a config is made."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"The hidden size ({self.hidden_size}) is not a multiple of the number of attention heads "
                f"({self.num_attention_heads})."
            )


class MistralConfig(_Config):
    """Fields of `transformers.MistralConfig`."""

    model_type = "mistral"

    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    head_dim: int | None = None
    sliding_window: int | None = 4096
    attention_dropout: int | float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class Qwen2Config(_Config):
    """Fields of `transformers.Qwen2Config`."""

    model_type = "qwen2"

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    attention_dropout: int | float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            full = self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
            kinds = ("full_attention", "sliding_attention")
            self.layer_types = [kinds[layer >= full] for layer in range(self.num_hidden_layers)]
        super().__post_init__(**kwargs)


class Qwen3Config(Qwen2Config):
    """Fields of `transformers.Qwen3Config`."""

    model_type = "qwen3"

    head_dim: int = 128
    attention_bias: bool = False


_OURS: Final = (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)
# in older versions of transformers the base class is no dataclass, and does not check types
OURS: Final[dict[str, type[PretrainedConfig]]] = {
    kind.model_type: strict(kind) if is_dataclass(kind) else kind  # type: ignore[arg-type]
    for kind in _OURS
}


def config_class(model_type: str) -> type[PretrainedConfig]:
    """Returns the class that reads configs of a model type: a class of this file, else transformers' own.

    Raises:
        KeyError: transformers does not have the model type.
    """
    if model_type in OURS:
        return OURS[model_type]
    from transformers import CONFIG_MAPPING  # slow: it searches the folders of all models

    theirs: type[PretrainedConfig] = CONFIG_MAPPING[model_type]
    return theirs


def load_as_named(directory: Path, config: PretrainedConfig, beside: Mapping[str, Any]) -> Any:
    """Loads the tokenizer that `AutoTokenizer` would load.

    If `tokenizer_class` knows its class, the tokenizer is loaded without `AutoTokenizer`.

    Args:
        directory: local directory.
        config: config of the model.
        beside: content of tokenizer_config.json, which is beside tokenizer.json.

    Raises:
        Exception: an error of any type, if files are damaged.
    """
    kind = tokenizer_class(config.model_type, beside) if (directory / "tokenizer.json").is_file() else None
    if kind is not None:
        return kind.from_pretrained(str(directory), local_files_only=True)
    from transformers import AutoTokenizer

    # because the config is given, transformers does not read the file itself, without this package's checks
    return AutoTokenizer.from_pretrained(str(directory), config=config, trust_remote_code=False, local_files_only=True)


def tokenizer_class(model_type: str, beside: Mapping[str, Any]) -> "type[PreTrainedTokenizerBase] | None":
    """Returns the class that `AutoTokenizer` would use for a directory with a tokenizer.json.

    None if this function does not know the class; then call `AutoTokenizer`.

    Args:
        model_type: type of the config.
        beside: content of tokenizer_config.json, which is beside tokenizer.json.
    """
    named = beside.get("tokenizer_class")
    if model_type in _READ_FROM_ONE_FILE and named in _OF_ONE_FILE:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    if model_type in _READ_AS_QWEN and named in _QWEN:
        from transformers import Qwen2Tokenizer

        return Qwen2Tokenizer
    return None
