"""Writes a quantised copy of a checkpoint in the compressed-tensors format, which other engines can read, too.

    fp8   weight e4m3 [N, K], weight_scale [N, 1]
    int8  weight_packed int32 [N, K/4] (low byte first), weight_scale [N, 1], weight_shape [2]
    int4  weight_packed int32 [N, K/8] (low nibble first), weight_scale [N, K/G], weight_shape [2]

N and K are rows and columns of the matrix, and G columns share a scale. int8 and int4 are symmetric. Stored codes are
unsigned: half of their range is added. int8 as plain bytes ("int-quantized") is not used, because some engines accept
it only with quantised activations.

Matrices of layers are quantised by `kernels/common/rounding.py`, which `draft_quantization=` also uses. So both give
the same values. With a calibration text, `feedback.py` quantises to int4 instead. The files have the same layout.
Embedding, LM head, norms and biases are not quantised.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from fastspec.errors import CheckpointError, UnsupportedOption
from fastspec.kernels.common.codes import CodeFormat, Codes, CodesKind
from fastspec.kernels.common.rounding import FORMATS, kind_for, rounded
from fastspec.models.checkpoints.checkpoint import Checkpoint
from fastspec.models.checkpoints.expert_tensors import by_expert
from fastspec.models.checkpoints.generation import CONFIG
from fastspec.models.checkpoints.parameter_names import PREFIX, parameter_of
from fastspec.models.checkpoints.quantised.activations import Activations, beginning
from fastspec.models.checkpoints.quantised.feedback import rounded_with_feedback
from fastspec.models.checkpoints.quantised.tensors import WEIGHT
from fastspec.models.checkpoints.resolve import load_tokenizer, resolve
from fastspec.models.checkpoints.safetensors_files import INDEX, ShardTensors, read_json
from fastspec.models.layer_table import EMBED, HEAD, INPUTS, tensor_shapes

_LAYOUTS: Final = {"fp8": "float-quantized", "int8": "pack-quantized", "int4": "pack-quantized"}
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth")


class Written(NamedTuple):
    """Facts about a copy that was written.

    Attributes:
        parameters: number of the model's parameters.
        missed: names of quantised matrices whose inputs the calibration could not measure, such as experts that
            transformers has as one tensor. Their values are rounded to the nearest code. Empty without a calibration.
    """

    parameters: int
    missed: list[str]


def write_quantised(
    source: str,
    destination: Path,
    form: str,
    *,
    revision: str | None = None,
    calibration: str | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Written:
    """Writes `destination`, a copy of the directory `source` with quantised matrices of layers.

    One file of weights is in memory at a time. If writing fails, the destination does not exist afterwards.

    Args:
        source: a local directory or a Hub id. The model must be one that this package's decoder runs, in 16 or 32 bits.
        destination: path of the new directory. It must not exist.
        form: "fp8", "int8" or "int4".
        revision: revision of a Hub id.
        calibration: text like those that the model will read. GPTQ quantises to int4 with the activations of this text.
            None: values are rounded to the nearest code.
        tell: called with the name of each stage when it begins: a window of the calibration text, a matrix, a file.

    Raises:
        UnsupportedOption: another form, a hosted model, a source that is already quantised, a calibration text that
            is too short, or one for another form than int4.
        CheckpointError: the destination exists, or the source is damaged.
    """
    wanted = [each for each in FORMATS if each == form]
    if not wanted:
        raise UnsupportedOption(f"format {form!r} is not supported, wanted one of {', '.join(FORMATS)}")
    if calibration is not None and form != "int4":
        raise UnsupportedOption(f"a calibration changes int4 only, got {form}; leave it out: 8-bit formats need none")
    if destination.exists():
        raise CheckpointError(f"{destination}: exists already; name a directory that does not")
    checkpoint = resolve(source, role="target", revision=revision)
    if checkpoint.spec.hosting:
        raise UnsupportedOption(
            f"{source} is not of a native family (see docs/models.md), and only those can be quantised"
        )
    if checkpoint.gguf is not None:
        raise UnsupportedOption(f"{source} is a GGUF file; take the original weights")
    if checkpoint.quantisation is not None or checkpoint.directory is None:
        raise UnsupportedOption(f"{source} is stored quantised ({checkpoint.stored}); take its original weights")
    measured = None if calibration is None else _Measured(checkpoint, calibration, tell)
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(checkpoint.directory, partial, wanted[0], _matrices(checkpoint, checkpoint.directory), tell, measured)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(destination)
    parameters = checkpoint.spec.weight_bytes(torch.float32) // torch.float32.itemsize
    return Written(parameters, [] if measured is None else measured.missed)


def _matrices(checkpoint: Checkpoint, directory: Path) -> dict[str, str]:
    """Returns the matrices of layers: stored name -> name of the model's parameter. A stack of experts is none.

    Args:
        checkpoint: checkpoint of the model.
        directory: its files.
    """
    spec, files = checkpoint.native, ShardTensors(directory)
    wanted = {name for name, shape in tensor_shapes(spec).items() if len(shape) == 2 and name.endswith(WEIGHT)}
    wanted -= {EMBED, HEAD, INPUTS}
    tensors, shapes = by_expert(files, spec, checkpoint.name), files.infos()
    names = {tensors.stored_name(name): parameter_of(name, wanted, spec) for name in tensors.infos()}
    return {name: meant for name, meant in names.items() if meant in wanted and len(shapes[name].shape) == 2}


class _Measured:
    """Quantises matrices to int4 with the activations of a calibration text.

    Args:
        checkpoint: directory of the model and its tokenizer.
        text: the calibration text.
        tell: see `write_quantised`.

    Attributes:
        missed: names of quantised matrices whose inputs were not measured.
    """

    def __init__(self, checkpoint: Checkpoint, text: str, tell: Callable[[str], object]) -> None:
        assert checkpoint.directory is not None, "live modules are not written"
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tell = tell
        tell("loading the model that the text runs through")
        tokenizer = load_tokenizer(checkpoint)
        if tokenizer is None:
            raise UnsupportedOption(
                f"{checkpoint.name} has no tokenizer, which a calibration text needs; add its files"
            )
        ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
        self._activations = Activations(checkpoint.directory, list(ids), device, beginning(tokenizer))
        self._moments: dict[str, Tensor] = {}
        self.missed: list[str] = []

    def read(self, names: list[str]) -> None:
        """Measures second moments of the inputs of the matrices `names`. Frees those of the previous call."""
        self._moments = {}
        self._moments = self._activations.moments([name.removesuffix(WEIGHT) for name in names], self._tell)

    def rounded(self, name: str, values: Tensor, kind: CodesKind) -> Codes:
        """Quantises the matrix `name`. If its inputs were not measured, values are rounded to the nearest code."""
        moment = self._moments.get(name.removesuffix(WEIGHT))
        if moment is None:
            self.missed.append(name)
            return rounded(values, kind)
        return rounded_with_feedback(values, kind, moment)


def _write(
    source: Path,
    directory: Path,
    form: CodeFormat,
    matrices: dict[str, str],
    tell: Callable[[str], object],
    measured: _Measured | None,
) -> None:
    stored = ShardTensors(source)
    files: dict[str, list[str]] = defaultdict(list)
    for name, info in stored.infos().items():
        files[info.where].append(name)
    groups: dict[int | None, list[str]] = defaultdict(list)  # see `_settings`
    kept: list[str] = []
    weight_map: dict[str, str] = {}
    total = 0
    with stored.open():
        for file, names in sorted(files.items()):
            written: dict[str, Tensor] = {}
            if measured is not None:
                measured.read([matrices[name] for name in names if name in matrices])
            for count, name in enumerate(names, 1):
                tensor, meant = stored.read(name), matrices.get(name)
                if meant is None:
                    written[name] = tensor.clone()
                    continue
                tell(f"rounding tensor {count} of {len(names)} of {file}")
                kind, module = kind_for(form, (tensor.shape[0], tensor.shape[1])), _module(name, meant)
                if kind is None:
                    written[name] = tensor.clone()
                    kept.append(module)
                    continue
                codes = rounded(tensor, kind) if measured is None else measured.rounded(meant, tensor, kind)
                parts = _parts(codes, tensor.dtype)
                at = name.removesuffix(WEIGHT)
                written |= {f"{at}.{part}": each.contiguous() for part, each in parts.items()}
                groups[kind.block[1] if form == "int4" else None].append(module)
            tell(f"writing {file}")
            save_file(written, directory / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(written, file)
            total += sum(each.nbytes for each in written.values())
    if not groups:
        raise UnsupportedOption(f"no matrix of {source} has rows that divide into groups of {form}")
    _copy_others(source, directory)
    if len(files) > 1 or (source / INDEX).is_file():
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2), "utf-8")
    config = read_json(source / CONFIG)
    config["quantization_config"] = _settings(form, groups, kept)
    (directory / CONFIG).write_text(json.dumps(config, indent=2), "utf-8")


def _module(stored: str, meant: str) -> str:
    """Returns the name of a matrix's module in settings: the stored one, with the prefix that engines give it."""
    return (meant if meant == PREFIX + stored else stored).removesuffix(WEIGHT)


def _parts(codes: Codes, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors to store for a quantised matrix, by the last part of their names.

    Args:
        codes: the quantised matrix.
        dtype: dtype of the matrix before quantisation. Scales are stored in fp32 if it is fp32, else in bf16, which
            holds them exactly.
    """
    scales = codes.scales.to(torch.float32 if dtype is torch.float32 else torch.bfloat16)
    if codes.kind.format == "fp8":
        return {"weight": codes.codes.view(torch.float8_e4m3fn), "weight_scale": scales}
    words = packed(codes.codes, 4) if codes.kind.format == "int4" else packed(codes.codes ^ 128, 8)
    shape = torch.tensor(codes.codes.shape, dtype=torch.int64, device="cpu")
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": shape}


def packed(codes: Tensor, bits: int) -> Tensor:
    """Packs codes uint8 [N, K] into int32 words [N, ceil(K * bits / 32)], lowest bits first."""
    count = 32 // bits
    whole = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[1] % count)).unflatten(1, (-1, count))
    words = sum(whole[..., place] << bits * place for place in range(count))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _settings(form: CodeFormat, groups: dict[int | None, list[str]], kept: list[str]) -> dict[str, Any]:
    """Returns the `quantization_config` for the new `config.json`.

    Args:
        form: "fp8", "int8" or "int4".
        groups: number of columns that share a scale -> names of the modules with this number. The key None stands for
            one scale per row. With several keys, each entry of the config lists its modules.
        kept: names of modules that are not quantised.
    """
    of_group = {}
    for index, (size, modules) in enumerate(sorted(groups.items(), key=lambda each: each[0] or 0)):
        weights: dict[str, Any] = {
            "num_bits": 4 if form == "int4" else 8,
            "type": "float" if form == "fp8" else "int",
            "symmetric": True,
            "strategy": "channel" if size is None else "group",
            "dynamic": False,
        }
        if size is not None:
            weights["group_size"] = size
        targets = ["Linear"] if len(groups) == 1 else sorted(modules)
        of_group[f"group_{index}"] = {
            "targets": targets,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": _LAYOUTS[form],
        "quantization_status": "compressed",
        "config_groups": of_group,
        "ignore": sorted({"lm_head", *kept}),
        "kv_cache_scheme": None,
    }


def _copy_others(source: Path, directory: Path) -> None:
    """Copies tokenizer, generation settings and other files of a checkpoint, without weights, index and config."""
    for path in source.iterdir():
        written = path.suffix in _WEIGHTS or path.name in (INDEX, CONFIG)
        if path.is_file() and not written and not path.name.startswith("."):
            shutil.copyfile(path, directory / path.name)
