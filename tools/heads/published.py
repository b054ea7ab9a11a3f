"""Published EAGLE-3 heads: read with fastspec's own reader, and written back as they were, with trained values."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.heads.checkpoint import HeadCheckpoint
from fastspec.models.heads.eagle3_spec import Eagle3Spec
from fastspec.models.heads.spec import NORMED, plain_name

from .export import CONFIG, WEIGHTS
from .head import Eagle3Head, HeadShape, Variant

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Published:
    """A head that somebody published.

    Attributes:
        name: What the user gave, for messages.
        found: fastspec's reading of it.
        spec: Its sizes and flags.
        tensors: Its tensors, by stored name.
    """

    name: str
    found: HeadCheckpoint
    spec: Eagle3Spec
    tensors: dict[str, Tensor]

    @property
    def readings(self) -> tuple[tuple[int, ...], ...]:
        """What the layers in its config may mean, as boundaries of the target that a head trained here can read."""
        layers = range(1, self.spec.target.layers)
        return tuple(reading for reading in self.spec.readings if all(each in layers for each in reading))

    def head(self, output: Tensor) -> Eagle3Head:
        """The head in float32, to be trained.

        Args:
            output: The target's output head, [vocabulary, hidden], which a head without its own uses unchanged.
        """
        spec, plain = self.spec, {_name(stored): tensor for stored, tensor in self.tensors.items()}
        drafted = torch.arange(spec.vocab_size) if self.found.vocab_map is None else self.found.vocab_map
        made = Eagle3Head(_shape(spec), drafted)
        if spec.own_embed:
            made.table = plain[EMBEDDING].float()
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name == OUTPUT and name not in plain:
                    parameter.copy_(plain[EMBEDDING] if spec.tied_head else output)
                    parameter.requires_grad_(False)
                else:
                    parameter.copy_(plain[name])
        return made


def read_published(name: str, target: str | Path, boundaries: Sequence[int] | None) -> Published:
    """Reads a folder or a name on the Hub.

    Args:
        name: The head.
        target: Folder or name of its target.
        boundaries: Hidden states that it reads. None: those of its config.

    Raises:
        ValueError: It is no EAGLE-3 head of one layer, or has a part that cannot be trained here.
        CheckpointError, UnsupportedModel: fastspec cannot run it.
    """
    _, found = resolve_pair(str(target), name, (None, None), (None, None), boundaries)
    if not isinstance(found, HeadCheckpoint) or type(found.spec) is not Eagle3Spec:
        what = found.spec.family if found is not None else "nothing"
        raise ValueError(f"{name} is a {what}; --from continues EAGLE-3 heads alone.")
    spec, plan = found.spec, found.spec.decoder.plans[0]
    others = {
        f"{spec.num_layers} layers": spec.num_layers > 1,
        "biases of its layer": plan.qkv_bias or plan.o_bias or plan.mlp_bias,
        "a sliding window": plan.window is not None,
        "no fc": not spec.fc,
        "the target's last hidden state as input": (NORMED,) in spec.readings,
        f"rope of type {spec.decoder.rope.kind}": spec.decoder.rope.scaling != 1.0,
    }
    if any(others.values()):
        raise ValueError(f"{name} has {', '.join(each for each, has in others.items() if has)}: not trained here.")
    tensors: dict[str, Tensor] = {}
    for file in sorted(found.directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {each: opened.get_tensor(each) for each in opened.keys()}  # noqa: SIM118
    made = Published(name, found, spec, tensors)
    if not made.readings:
        raise ValueError(f"{name} reads boundaries {spec.readings}, which are not trained here: name others.")
    return made


def save_like(head: Eagle3Head, published: Published, folder: Path) -> None:
    """Writes a trained head into a folder: config, names and dtypes of the published one, and trained values.

    Its embedding and its tables of ids are written as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trained = {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
    tensors = {}
    for stored, tensor in published.tensors.items():
        value = trained.get(_name(stored))
        tensors[stored] = tensor if value is None else value.detach().cpu().to(tensor.dtype).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copyfile(published.found.directory / CONFIG, folder / CONFIG)


def _name(stored: str) -> str:
    """The name of a parameter of `Eagle3Head` for a stored name of any layout."""
    name = plain_name(stored)
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _shape(spec: Eagle3Spec) -> HeadShape:
    decoder = spec.decoder
    return HeadShape(
        hidden=spec.hidden_size,
        features=spec.feature_layers,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate_size,
        vocab=spec.target.vocab_size,
        draft_vocab=spec.vocab_size,
        rope_theta=0.0,
        rms_eps=decoder.rms_eps,
        variant=Variant(
            reads=spec.target.hidden_size,
            qk_norm=decoder.qk_norm,
            fc_norm=spec.fc_norm,
            norm_before_fc=spec.norm_before_fc,
            fc_bias=spec.fc_bias,
            norm_before_residual=spec.norm_before_residual,
            norm_output=spec.norm_output,
            frequencies=decoder.rope.inv_freq,
            logit_scale=decoder.scales.logits,
        ),
    )
