"""Classes of configs and tokenizers of the commonest families, without the imports of transformers' own ways to them.

transformers' classes have a decorator that builds docstrings, which in some versions imports all of generation, and
Llama's checks a field of training, for which it imports image readers, `torch.distributed.tensor` and, where it is
installed, torchvision. Either takes seconds, and nothing here needs it. The config classes below have the same names,
fields and defaults; everything else comes from the same base class. `AutoTokenizer` imports all that and torch's
compiler in some versions, to find the class of a tokenizer, which a checkpoint names itself.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# names that checkpoints give to the class of a tokenizer that is one file, and types of models for which
# `AutoTokenizer` takes no other class then
_OF_ONE_FILE: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")
_READ_FROM_ONE_FILE: Final = ("llama",)
_QWEN: Final = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_READ_AS_QWEN: Final = ("qwen2", "qwen3")


class _Config(PretrainedConfig):
    """Fields that the four classes have in common, as transformers documents them."""

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
        """Raises ValueError where heads do not divide the hidden size; called while a config is made."""
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
# the base class of older versions has fields of another kind, and no checks of types
OURS: Final[dict[str, type[PretrainedConfig]]] = {
    kind.model_type: strict(kind) if is_dataclass(kind) else kind  # type: ignore[arg-type]
    for kind in _OURS
}


def config_class(model_type: str) -> type[PretrainedConfig]:
    """The class that reads configs of a type: transformers' own if there is none here.

    Raises:
        KeyError: transformers has none.
    """
    if model_type in OURS:
        return OURS[model_type]
    from transformers import CONFIG_MAPPING  # which looks through the folders of all models

    theirs: type[PretrainedConfig] = CONFIG_MAPPING[model_type]
    return theirs


def load_as_named(directory: Path, config: PretrainedConfig, beside: Mapping[str, Any]) -> Any:
    """The tokenizer that `AutoTokenizer` loads from a directory, by the class that the checkpoint names if it is that.

    Args:
        directory: on the local disk. config: of the model. beside: what tokenizer_config.json says.

    Raises:
        Exception: of any kind, where files are damaged.
    """
    kind = tokenizer_class(config.model_type, beside) if (directory / "tokenizer.json").is_file() else None
    if kind is not None:
        return kind.from_pretrained(str(directory), local_files_only=True)
    from transformers import AutoTokenizer

    # the config is given, or it would be read again, without our checks
    return AutoTokenizer.from_pretrained(str(directory), config=config, trust_remote_code=False, local_files_only=True)


def tokenizer_class(model_type: str, beside: Mapping[str, Any]) -> "type[PreTrainedTokenizerBase] | None":
    """The class that `AutoTokenizer` takes for a directory with a tokenizer.json; None: only that knows.

    Args:
        model_type: of the config. beside: what tokenizer_config.json says.
    """
    named = beside.get("tokenizer_class")
    if model_type in _READ_FROM_ONE_FILE and named in _OF_ONE_FILE:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    if model_type in _READ_AS_QWEN and named in _QWEN:
        from transformers import Qwen2Tokenizer

        return Qwen2Tokenizer
    return None
