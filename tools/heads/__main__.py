"""Command line: trains a head for a target, writes it, and measures what the target accepts."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from .answers import answer_rows
from .corpus import Texts, cut_prompts, last_tokens, read_texts
from .evaluate import Drafter, Figures, decode, draft_with, draft_with_model
from .export import load, save
from .head import DraftHead
from .loss import law_temperatures
from .mtp import OWN, MtpHead, load_mtp, save_mtp
from .published import read_published, save_like
from .recipe import CONTINUED, Recipe
from .rows import Chunks, Rows, own_rows, real_rows
from .target import LAST, Target, encode_all, encode_prompts, load_target
from .train import History, choose_drafted, coverage, head_shape, make_head, train

LOGGER = logging.getLogger("tools.heads")
TEMPERATURES = (0.0, 1.0)
LENGTH_UNIT = 64  # rows of similar lengths share a batch


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; returns the exit status."""
    options, recipe = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms  %(message)s", stream=sys.stdout)
    start = time.perf_counter()
    torch.manual_seed(options.seed)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    texts = read_texts(options.corpus)
    if options.continued is not None:
        report = continue_head(texts, recipe, options, dtype)
        return _finish(report, options.out, start)
    if options.measure is None:
        boundaries = LAST if recipe.mtp else recipe.boundaries
        target = load_target(options.target, boundaries, options.device, dtype)
        if options.write:
            return _write_only(target, texts, recipe, options)
        report = make_head_for(target, texts, recipe, options)
        folder = options.out
    else:
        folder = options.measure
        recipe = replace(recipe, mtp=(folder / OWN).exists())
        boundaries = LAST if recipe.mtp else load(folder)[1]
        target = load_target(options.target, boundaries, options.device, dtype)
        report = {}
    prompts = held_out_prompts(texts, recipe, options)
    head = load_mtp(folder, head_shape(target, 0, recipe)) if recipe.mtp else load(folder)[0]
    report["held_out"] = measure(target, head, prompts, recipe, options.beside)
    return _finish(report, options.out, start)


def continue_head(texts: Texts, recipe: Recipe, options: argparse.Namespace, dtype: torch.dtype) -> dict[str, object]:
    """Trains a published head further on a target's own text and writes it; returns the report.

    The layers in its config may have two meanings. Then the one is taken whose first drafts the target accepts more.
    """
    published = read_published(options.continued, options.target, recipe.boundaries)
    held_out = held_out_prompts(texts, recipe, options)
    target = load_target(options.target, published.readings[0], options.device, dtype)
    head = published.head(target.head.cpu()).to(target.device)
    if len(published.readings) > 1:
        target = max(
            (Target(target.model, reading) for reading in published.readings),
            key=lambda each: _first_place(measure(each, head, held_out[:8], recipe, None)),
        )
    before = measure(target, head, held_out, recipe, options.beside)
    generator = torch.Generator().manual_seed(options.seed)
    own, groups = _groups(target, texts, recipe, options, generator)
    chunks = Chunks(target, groups, _keep(options), generator, law_temperatures(recipe))
    history = train(head, target, chunks.batches(recipe.batch_tokens), recipe)
    save_like(head, published, options.out)
    written = read_published(str(options.out), options.target, target.boundaries)
    after = measure(target, written.head(target.head.cpu()), held_out, recipe, options.beside)
    for name, then in before.items():
        now = after[name]
        for figure in ("accepted_at_least", "tokens_per_step"):
            LOGGER.info("%s, %s: %s before, %s after", name, figure, then[figure], now[figure])
    report = _summary(head, target, history, coverage([own], head.drafted.cpu())) | {"recipe": asdict(recipe)}
    return report | {"continued": options.continued, "held_out_before": before, "held_out": after}


def _first_place(measured: dict[str, Figures]) -> float:
    """Share of steps that accept the first draft, at temperature 0."""
    shares = measured["head, temperature 0.0"]["accepted_at_least"]
    assert isinstance(shares, list), "one for each place"
    return float(shares[0])


def _finish(report: dict[str, object], out: Path, start: float) -> int:
    report["wall_seconds"] = round(time.perf_counter() - start, 1)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0


def make_head_for(target: Target, texts: Texts, recipe: Recipe, options: argparse.Namespace) -> dict[str, object]:
    """Trains a head and writes it; returns its part of the report."""
    generator = torch.Generator().manual_seed(options.seed)
    own, groups = _groups(target, texts, recipe, options, generator)
    drafted = choose_drafted(groups, len(target.embedding), recipe.draft_vocab)
    head = make_head(target, drafted, recipe)
    chunks = Chunks(target, groups, _keep(options), generator, law_temperatures(recipe))
    history = train(head, target, chunks.batches(recipe.batch_tokens), recipe)
    if isinstance(head, MtpHead):
        save_mtp(head, options.target, options.out)
    else:
        save(head, target.model.config, target.boundaries, options.out)
    return _summary(head, target, history, coverage([own], drafted)) | {"recipe": asdict(recipe)}


def held_out_prompts(texts: Texts, recipe: Recipe, options: argparse.Namespace) -> Tensor:
    """Prompts int64 [count, prompt_length] of held-out texts: pieces of texts, or the ends of whole prompts."""
    if texts.prompts:
        found = encode_prompts(options.target, texts.held_out)
        return last_tokens(found, recipe.prompts, recipe.prompt_length)
    generator = torch.Generator().manual_seed(7)
    return cut_prompts(encode_all(options.target, texts.held_out), recipe.prompts, recipe.prompt_length, generator)


def measure(target: Target, head: DraftHead, prompts: Tensor, recipe: Recipe, beside: str | None) -> dict[str, Figures]:
    """Measures a head, and a draft model beside it, on held-out prompts int64 [prompts, tokens]."""
    head = head.to(target.device)
    drafters: dict[str, Drafter] = {"head": draft_with(head, target)}
    if beside is not None:
        model: Any = AutoModelForCausalLM.from_pretrained(beside, dtype=torch.float32)
        model = model.to(target.device).eval()
        drafters["draft model"] = draft_with_model(model)
    measured: dict[str, Figures] = {}
    for name, drafter in drafters.items():
        for temperature in TEMPERATURES:
            torch.manual_seed(7)  # the same texts for every drafter
            steps = decode(target, drafter, prompts, recipe.new_tokens, recipe.places, temperature)
            measured[f"{name}, temperature {temperature}"] = steps.figures()
            LOGGER.info("%s, temperature %s: %s", name, temperature, steps.figures())
    return measured


def _groups(
    target: Target, texts: Texts, recipe: Recipe, options: argparse.Namespace, generator: torch.Generator
) -> tuple[Rows, list[Rows]]:
    """The rows that the target wrote, and the groups of rows that a head learns from.

    Args:
        generator: draws pieces of texts. It is the same afterwards whether the target wrote or its text was there.
    """
    own = _own_rows(target, texts, recipe, options)
    torch.manual_seed(options.seed)
    groups = own.by_length(LENGTH_UNIT)
    if texts.prompts:
        return own, groups
    return own, [*groups, real_rows(encode_all(options.target, texts.train), recipe, generator)]


def _own_rows(target: Target, texts: Texts, recipe: Recipe, options: argparse.Namespace) -> Rows:
    """The rows that the target wrote: those of --work if there are some, else new ones."""
    path = options.work / "own.safetensors" if options.work else None
    if path is not None and path.exists():
        own = Rows(**load_file(path))
        LOGGER.info("%d rows that the target wrote come from %s", len(own.ids), path)
        return own
    own = _written(target, texts, recipe, options)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        begins = {} if own.begins is None else {"begins": own.begins}
        save_file({"ids": own.ids, "lengths": own.lengths} | begins, path)
    return own


def _write_only(target: Target, texts: Texts, recipe: Recipe, options: argparse.Namespace) -> int:
    """Lets the target write into --work, and trains nothing; returns the exit status."""
    if options.work is None:
        raise SystemExit("--write needs --work FOLDER, where the text goes")
    own = _own_rows(target, texts, recipe, options)
    LOGGER.info("%d rows with %d tokens that teach", len(own.ids), sum(map(len, own.texts())))
    return 0


def _written(target: Target, texts: Texts, recipe: Recipe, options: argparse.Namespace) -> Rows:
    """Lets the target answer prompts, or continue pieces of texts."""
    if texts.prompts:
        prompts = encode_prompts(options.target, texts.train)
        return answer_rows(options.target, prompts, recipe, options.device, target.embedding.dtype)
    documents = encode_all(options.target, texts.train)
    return own_rows(target, documents, recipe, torch.Generator().manual_seed(options.seed))


def _keep(options: argparse.Namespace) -> Path | torch.device:
    """Place of the hidden states: the memory of a device, or files."""
    if options.keep is None and options.work is not None:
        return Path(options.work) / "features"
    return torch.device(options.keep or "cpu")


def _summary(head: DraftHead, target: Target, history: History, covered: float) -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else target.device.type,
        "boundaries": target.boundaries,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "draft_vocab_covers": round(covered, 4),
        "training_seconds": history.seconds,
        "chance_of_acceptance_in_training": history.accepted[-1][1],
    }


def _parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Recipe]:
    parser = argparse.ArgumentParser(prog="python -m tools.heads", description=__doc__)
    parser.add_argument("target", help="folder or name on the Hub of a Llama, a Qwen3 or the like")
    parser.add_argument("corpus", type=Path, help="folder, tar archive, .jsonl or text file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head and report.json")
    parser.add_argument("--work", type=Path, help="folder for the target's own text, reused if there, and its features")
    parser.add_argument("--write", action="store_true", help="only let the target write into --work")
    parser.add_argument("--keep", help="device whose memory keeps the features, also with --work (cpu without --work)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the target's passes")
    parser.add_argument("--beside", help="a draft model to measure beside the head")
    parser.add_argument("--from", dest="continued", metavar="HEAD", help="train this published EAGLE-3 head further")
    parser.add_argument("--measure", type=Path, metavar="HEAD", help="measure this folder, train nothing")
    parser.add_argument("--seed", type=int, default=7)
    for field in fields(Recipe):
        several = isinstance(field.default, tuple) or field.name == "boundaries"
        kind = float if "float" in str(field.type) else int
        flag = f"--{field.name.replace('_', '-')}"
        again = getattr(CONTINUED, field.name)
        shown = f"({field.default}; {again} with --from)" if again != field.default else f"({field.default})"
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true", default=None)
        else:
            parser.add_argument(flag, type=kind, nargs="+" if several else None, help=shown)
    options = parser.parse_args(arguments)
    chosen: dict[str, Any] = {}
    for field in fields(Recipe):
        value = getattr(options, field.name)
        if value is not None:
            chosen[field.name] = tuple(value) if isinstance(value, list) else value
    others = ("intermediate", "boundaries", "dflash_layers", "mask_id")
    unread = [name for name in others if name in chosen] + ["from"] * (options.continued is not None)
    if options.mtp and unread:
        parser.error(f"--mtp does not go with --{unread[0].replace('_', '-')}: an MTP layer has the target's sizes")
    recipe = replace(Recipe() if options.continued is None else CONTINUED, **chosen)
    return options, recipe


if __name__ == "__main__":
    sys.exit(main())
