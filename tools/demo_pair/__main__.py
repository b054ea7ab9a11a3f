"""Command line: trains the pair, writes it, measures it and prints the report."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import Corpus, Document, read_corpus
from .distil import distil, write_own_text
from .evaluate import measure_pair, pick_prompts, real_text_repeats
from .export import greatest_difference, save, tokenizer_agrees
from .model import Llama, frozen_copy, write
from .recipe import Recipe, smoke_recipe
from .tokens import Packer, cut_rows, encode, train_tokenizer
from .train import History, learn, text_loss
from .unloop import unloop

LOGGER = logging.getLogger("tools.demo_pair")
SAMPLES = 6
SHOWN_PROMPT = 32
MOST_DIFFERENCE = 1e-3


@dataclass(frozen=True, slots=True)
class Data:
    """The corpus as token ids.

    Attributes:
        tokenizer: What made the ids.
        packer: Training rows.
        stream: All training ids, int32 [tokens].
        validation, held_out: Rows [n, context + 1].
        held_documents: The held-out documents' ids.
        sizes: Files, bytes and tokens, for the report.
    """

    tokenizer: Tokenizer
    packer: Packer
    stream: Tensor
    validation: Tensor
    held_out: Tensor
    held_documents: list[Tensor]
    sizes: dict[str, int]


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; returns the exit status."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms  %(message)s", stream=sys.stdout)
    start = time.perf_counter()
    recipe = smoke_recipe() if options.smoke else Recipe()
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    data = load_data(read_corpus(options.corpus), recipe, device)
    LOGGER.info("corpus: %s", data.sizes)
    target, draft, phases = train_pair(data, recipe, device, options.out)
    report = make_report(target, draft, data, recipe, options.out)
    report |= {"phases": phases, "recipe": asdict(recipe)}
    report["wall_seconds"] = round(time.perf_counter() - start, 1)
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0


def load_data(corpus: Corpus, recipe: Recipe, device: torch.device) -> Data:
    """Trains the tokenizer and encodes the corpus."""
    train, validation, held_out = (
        part[: recipe.max_files] for part in (corpus.train, corpus.validation, corpus.held_out)
    )
    tokenizer = train_tokenizer(train, recipe.vocab_size)
    encoded = encode(tokenizer, train)
    tests = [ids for ids, document in zip(encoded, train, strict=True) if document.is_test]
    library = [ids for ids, document in zip(encoded, train, strict=True) if not document.is_test]
    held_documents = encode(tokenizer, held_out)
    length = recipe.context + 1
    return Data(
        tokenizer=tokenizer,
        packer=Packer(library, tests, recipe.test_share, device),
        stream=torch.cat(encoded).to(device),
        validation=cut_rows(torch.cat(encode(tokenizer, validation)), length).to(device).long(),
        held_out=cut_rows(torch.cat(held_documents), length).to(device).long(),
        held_documents=held_documents,
        sizes={
            **_sizes("train", train, sum(map(len, encoded))),
            **_sizes("held_out", held_out, sum(map(len, held_documents))),
            "train_library_tokens": sum(map(len, library)),
            "validation_files": len(validation),
        },
    )


def train_pair(
    data: Data, recipe: Recipe, device: torch.device, out: Path
) -> tuple[Llama, Llama, dict[str, dict[str, object]]]:
    """Trains target and draft and writes each as soon as it is done."""
    target = Llama(recipe.target, recipe.vocab_size, recipe.context, recipe.dropout).to(device)
    learning = learn(target, recipe, data.packer, data.validation)
    unlooping, blend = unloop(target, recipe, data.packer, data.stream, data.validation)
    save(target, data.tokenizer, out / "target")
    start = time.perf_counter()
    own = write_own_text(target, recipe, data.stream)
    LOGGER.info("own text: %d tokens in %.1f s", own.numel(), time.perf_counter() - start)
    draft = Llama(recipe.draft, recipe.vocab_size, recipe.context).to(device)
    distilling = distil(draft, target, recipe, data.packer, own, data.validation)
    save(draft, data.tokenizer, out / "draft")
    row_tokens = recipe.context / len(data.stream)
    phases = {
        "learn": _phase(learning, recipe.learn.batch * row_tokens),
        "unloop": _phase(unlooping, recipe.unloop.batch * row_tokens) | {"blend": asdict(blend)},
        "distil": _phase(distilling, recipe.distil.batch * row_tokens) | {"own_tokens": own.numel()},
    }
    return target, draft, phases


def make_report(target: Llama, draft: Llama, data: Data, recipe: Recipe, out: Path) -> dict[str, object]:
    """Measures the pair as saved, on held-out text only.

    Raises:
        RuntimeError: transformers, given the saved folders, computes or encodes otherwise.
    """
    device = data.stream.device
    models = {"target": target, "draft": draft}
    saved = {name: frozen_copy(model, torch.float32) for name, model in models.items()}
    report: dict[str, object] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "corpus": data.sizes,
        "parameters": {name: model.size() for name, model in models.items()},
        "held_out_loss": {name: round(text_loss(model, data.held_out), 4) for name, model in saved.items()},
        "held_out_text_repeated_8gram_share": real_text_repeats(data.held_documents, recipe),
        "greatest_logit_difference_from_transformers": _check_saved(models, data, out),
    }
    for length in (recipe.prompt_length, 2 * recipe.prompt_length):
        prompts = pick_prompts(data.held_documents, recipe.prompts, length).to(device)
        rollouts = measure_pair(saved["target"], saved["draft"], prompts, recipe)
        report[f"rollouts_after_{length}_tokens"] = rollouts
        _log_samples(saved["target"], data, prompts[:SAMPLES], recipe)
    return report


def _check_saved(models: dict[str, Llama], data: Data, out: Path) -> dict[str, float]:
    differences = {}
    for name, model in models.items():
        rows = data.held_out[:1, : model.context]
        differences[name] = greatest_difference(model, out / name, rows)
        if differences[name] > MOST_DIFFERENCE or not tokenizer_agrees(data.tokenizer, out / name):
            raise RuntimeError(
                f"transformers reads {out / name} otherwise: its logits differ by {differences[name]:.2g} "
                f"(at most {MOST_DIFFERENCE} is allowed) or its tokenizer disagrees; compare export.py with the "
                "installed transformers."
            )
    return differences


def _log_samples(target: Llama, data: Data, prompts: Tensor, recipe: Recipe) -> None:
    for temperature in (0.0, 0.8):
        temperatures = torch.full((len(prompts),), temperature, device=prompts.device)
        for prompt, row in zip(prompts, write(target, prompts, recipe.new_tokens, temperatures), strict=True):
            shown = data.tokenizer.decode(prompt[-SHOWN_PROMPT:].tolist())
            written = data.tokenizer.decode(row[len(prompt) :].tolist())
            LOGGER.info("temperature %s: %s >>>%s", temperature, shown, written)


def _phase(history: History, epochs_per_step: float) -> dict[str, object]:
    return asdict(history) | {"epochs": round(history.steps * epochs_per_step, 2)}


def _sizes(part: str, documents: list[Document], tokens: int) -> dict[str, int]:
    size = sum(len(document.text.encode()) for document in documents)
    return {f"{part}_files": len(documents), f"{part}_bytes": size, f"{part}_tokens": tokens}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_pair", description=__doc__)
    library = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--corpus", type=Path, default=library, help="Python files: folder or tar (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, draft/ and report.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="tiny settings, seconds on a CPU: proves the pipeline")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
