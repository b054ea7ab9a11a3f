"""Llama's config class, for reading files without the imports of transformers' own.

That one checks a field of training by `transformers.utils.type_validators`, which imports video and image readers,
`torch.distributed.tensor` and, where it is installed, torchvision: seconds, for a field that nothing here reads. The
class below has the same fields and defaults otherwise, and all that it does comes from the same base class.
"""

from dataclasses import is_dataclass
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig


class LlamaConfig(PretrainedConfig):
    """The fields of `transformers.LlamaConfig`; their meaning is in its docstring. (Tokenizers go by its name.)"""

    model_type = "llama"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    def validate_architecture(self) -> None:
        """Raises ValueError where heads do not divide the hidden size; called while a config is made."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"The hidden size ({self.hidden_size}) is not a multiple of the number of attention heads "
                f"({self.num_attention_heads})."
            )


if is_dataclass(LlamaConfig):  # the base class of older versions has fields of another kind, and no checks of types
    LlamaConfig = strict(LlamaConfig)  # type: ignore[misc, arg-type]


def config_class(model_type: str) -> type[PretrainedConfig]:
    """The class that reads configs of a type: transformers' own, but for Llama.

    Raises:
        KeyError: transformers has none.
    """
    if model_type == "llama":
        return LlamaConfig
    from transformers import CONFIG_MAPPING  # which looks through the folders of all models

    theirs: type[PretrainedConfig] = CONFIG_MAPPING[model_type]
    return theirs
