"""Perplexity of a checkpoint in each format, on text that no calibration saw: `python -m perf perplexity --target DIR`.

The text is that of this project's documents. Calibration reads docstrings of Python's standard library. Both are on
every machine that has the project. A quantised copy is written for each format and scored by fastspec.
"""

from __future__ import annotations

import argparse
import ast
import math
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fastspec import FastSpecGenerator
from fastspec.kernels.common.rounding import FORMATS
from fastspec.models.checkpoints.quantised.activations import beginning
from fastspec.models.checkpoints.quantised.write import write_quantised
from perf.experiment import compared, rated, say
from perf.records import ROOT, Row

WINDOW = 256  # tokens that are scored together
AS_STORED, CALIBRATED = "as stored", "int4, calibrated"
ALL = ("int4", CALIBRATED, *(form for form in FORMATS if form != "int4"))
COLUMNS = ("format", "tokens", "nats", "nats_95", "perplexity", "over_stored", "over_stored_95", "mib", "status")


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf perplexity`."""
    made.set_defaults(out="perplexity", columns=COLUMNS)
    made.add_argument("--target", type=Path, required=True, help="a checkpoint in 16 or 32 bits, with its tokenizer")
    made.add_argument("--name", required=True, help="name of the target in the rows, without a path")
    made.add_argument("--dtype", default=None, help="of the models; default: the checkpoint's")
    made.add_argument("--windows", type=int, default=40, help=f"of {WINDOW} tokens, spread over the documents")
    made.add_argument("--formats", nargs="*", default=ALL, choices=ALL, help="besides the stored one")
    made.add_argument("--copy", action="append", default=[], metavar="NAME=DIR", help="another tool's copy; repeatable")
    made.add_argument("--calibration", type=int, default=400_000, help="characters of docstrings")


def docstrings(characters: int) -> str:
    """Docstrings of the standard library, in the order of its files."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parsed = ast.parse(path.read_text(encoding="utf-8"))
        nodes = (each for each in ast.walk(parsed) if isinstance(each, ast.FunctionDef | ast.ClassDef | ast.Module))
        found += [text for each in nodes if (text := ast.get_docstring(each))]
    return "\n\n".join(found)[:characters]


def windows_of(generator: FastSpecGenerator, count: int) -> list[list[int]]:
    """Windows of the documents, spread evenly. Each begins with the ids that texts of the model begin with."""
    files = sorted((ROOT / "docs" / "guides").glob("*.md"))
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in files)
    ids: list[int] = generator.tokenizer(text, add_special_tokens=False)["input_ids"]
    begin = beginning(generator.tokenizer)
    taken = WINDOW - len(begin)
    starts = [index * (len(ids) - taken) // count for index in range(count)]
    return [begin + ids[start : start + taken] for start in starts]


def losses(source: Path, given: argparse.Namespace) -> list[float]:
    """Nats of each window: the sum over its tokens from the second on."""
    with FastSpecGenerator(
        source, dtype=given.dtype, device=given.device, max_length=WINDOW + 8, max_batch_size=1, progress=False
    ) as generator:
        found = []
        for window in windows_of(generator, given.windows):
            scored = generator.score([window]).prompt_logprobs
            assert scored is not None, "asked for"
            found.append(-math.fsum(scored[0]))
        return found


def command_perplexity(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Perplexity of a checkpoint by format: as stored, rounded to nearest, and calibrated."""
    count = [float(WINDOW - 1)] * given.windows
    stored: list[float] = []
    ready = {AS_STORED: given.target} | {name: Path(at) for name, at in (each.split("=", 1) for each in given.copy)}
    for name in (AS_STORED, *given.formats, *(each for each in ready if each != AS_STORED)):
        with tempfile.TemporaryDirectory() as scratch:
            source = ready.get(name, Path(scratch) / "quantised")
            if name not in ready:
                text = docstrings(given.calibration) if name == CALIBRATED else None
                write_quantised(str(given.target), source, name.partition(",")[0], calibration=text)
            size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
            nats = losses(source, given)
        stored = stored or nats
        say(f"{name}: {sum(nats) / sum(count):.4f} nats a token")
        yield [
            {
                "bench": "perplexity", "workload": f"{given.name}, {given.windows} windows of the guides",
                "format": name, "status": "ok", "tokens": int(sum(count)), "mib": round(size / 2**20, 1),
                **rated("nats", (nats, count), 4), "perplexity": round(math.exp(sum(nats) / sum(count)), 2),
                **compared("over_stored", (nats, count), (stored, count), 4),
            }
        ]  # fmt: skip
