"""Natural pairs of target and draft: a published model, and a smaller one with the same tokenizer.

The pairs come from the table `pairs.json`, without network. The table only gives hints. Loaded models are always
compared token by token (`vocab.shared_vocab`).
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LARGEST_SHARE: Final = 0.35
"""Largest size of a suggested draft, as a share of the parameters that the target reads per token. A larger draft
rarely makes decoding faster."""
# billions of parameters that a token reads, for mixtures of experts whose names do not have them, such as "-A3B"
_ACTIVE: Final = {"openai/gpt-oss-20b": 3.6, "openai/gpt-oss-120b": 5.1}


@dataclass(frozen=True, slots=True)
class TokenizerGroup:
    """Published models that share one tokenizer.

    Attributes:
        name: name for messages.
        tokenizer: name of the tokenizer. Models of two groups may be paired if the groups have the same tokenizer.
        types: values of `model_type` in configs of these models.
        vocab_sizes: numbers of embedding rows of these models, which may be padded differently.
        marker: (token id, its text), by which a tokenizer file is recognised. No other group of the same type and size
            has this pair. None: the group needs no marker.
        models: Hub id -> parameters in billions (in a mixture of all experts), ascending. Each may draft for a larger
            one.
    """

    name: str
    tokenizer: str
    types: tuple[str, ...]
    vocab_sizes: tuple[int, ...]
    marker: tuple[int, str] | None
    models: tuple[tuple[str, float], ...]

    def drafts(self, billions: float | None) -> list[str]:
        """Returns models that are small enough to draft for a model with `billions` of parameters, smallest first.

        If `billions` is None, the size is unknown. Then the two smallest models of the group are returned.
        """
        if billions is None:
            return [name for name, _ in self.models[:2]]
        return [name for name, size in self.models if size <= LARGEST_SHARE * billions]


# small models for targets with other tokenizers
_FOR_OTHERS: Final = ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B-Instruct")
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_TABLE: Final = Path(__file__).with_suffix(".json")


def _group(row: dict[str, Any]) -> TokenizerGroup:
    """Makes one group from a row of the table. Converts JSON's lists, and the object `models`, to tuples."""
    marker, lists = row["marker"], {name: tuple(row[name]) for name in ("types", "vocab_sizes")}
    return TokenizerGroup(
        row["name"], row["tokenizer"], **lists, marker=marker and tuple(marker), models=tuple(row["models"].items())
    )


GROUPS: Final = tuple(_group(row) for row in json.loads(_TABLE.read_text("utf-8")))


@dataclass(frozen=True, slots=True)
class Found:
    """Result of `natural_pairs`: the tokenizer group of a model, and the drafts that fit the model.

    Attributes:
        model: name that the user gave.
        group: tokenizer group of the model.
        drafts: drafts that fit, smallest first. Empty: the table has no draft that is small enough.
        by: description of how the model was recognised, such as "by its name".
        others: drafts with another tokenizer that are small enough. They draft only tokens that both tokenizers have.
    """

    model: str
    group: TokenizerGroup
    drafts: tuple[str, ...]
    by: str
    others: tuple[str, ...]

    def __str__(self) -> str:
        """Formats the group as the first line, then one command line for each draft. Those of `others` come last."""
        lines = [f"{self.model}: {self.group.name} ({self.by})"]
        if not self.drafts:
            lines[0] += (
                "; the table has no draft with its tokenizer that is small enough. Lookup in the text can draft, and "
                "needs no model: --proposer ngram"
            )
        lines += [f"  fastspec chat {self.model} --draft {draft}" for draft in self.drafts]
        if self.others:
            lines.append("with another tokenizer, so that only tokens that both have are drafted:")
        return "\n".join([*lines, *(f"  fastspec chat {self.model} --draft {draft}" for draft in self.others)])


def natural_pairs(model: str) -> Found | None:
    """Finds drafts that fit a model, by its Hub id or by the files of its directory. Downloads nothing.

    Args:
        model: a directory with config.json, or a Hub id. If the table does not have the id, the model is recognised by
            its files, if these were downloaded before.

    Returns:
        None if the table does not have the model.
    """
    directory = Path(os.path.expanduser(model))
    if not os.path.isdir(directory):  # Path.is_dir would raise for a name that no file system accepts
        if (known := _by_name(model)) is not None:
            return _found(model, *known, "by its name")
        if (cached := _in_cache(model)) is None:
            return None
        directory = cached
    group = _by_files(directory)
    return None if group is None else _found(model, group, _billions(directory), "by its vocabulary")


def _found(model: str, group: TokenizerGroup, billions: float | None, by: str) -> Found:
    """Makes a `Found`.

    Args:
        model: name that the user gave.
        group: tokenizer group of the model.
        billions: parameters that a forward pass reads for one token, in billions. None: unknown.
        by: description of how it was recognised.
    """
    largest = math.inf if billions is None else LARGEST_SHARE * billions
    others = [
        name
        for each in GROUPS
        for name, size in each.models
        if name in _FOR_OTHERS and each.tokenizer != group.tokenizer and size <= largest
    ]
    return Found(model, group, tuple(group.drafts(billions)), by, tuple(others))


def _in_cache(model: str) -> Path | None:
    """Returns the directory with the files of a Hub id. None if they were not downloaded before."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a Hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def suggestion(*models: str) -> str:
    """Returns a clause with names of drafts, for the end of an error message.

    The drafts fit the first of `models` for which the table has drafts. Empty if it has none for any of them.
    """
    for model in models:
        found = natural_pairs(model)
        if found is not None and found.drafts:
            return f"; drafts that fit {model}: {', '.join(found.drafts)}"
    return ""


def public_name(model: str) -> str:
    """Returns the public name of a model: the name of its directory, or its Hub id."""
    directory = Path(os.path.expanduser(model))
    return directory.resolve().name if directory.exists() else model


def _by_name(model: str, *, exact: bool = False) -> tuple[TokenizerGroup, float | None] | None:
    """Returns the group of a Hub id, and the billions of parameters that a forward pass reads for one token.

    Unless `exact` is set, a longer name that begins with a known name is accepted too. Returns None if the name is
    unknown.
    """
    asked = model.lower()
    for group in GROUPS:
        for name, billions in group.models:
            if asked == name.lower():
                return group, _read(name, billions)
    if exact:
        return None
    # names of quantised copies extend the known name; names of base models lack its "-Instruct" or "-it"
    bare = asked.rpartition("/")[2]
    best: tuple[int, TokenizerGroup, float] | None = None
    for group in GROUPS:
        for name, billions in group.models:
            core = name.rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-it")
            goes_on = bare.startswith(core) and not bare[len(core) :][:1].isalnum()
            if goes_on and (best is None or len(core) > best[0]):
                best = len(core), group, _read(name, billions)
    return None if best is None else (best[1], best[2])


def _read(name: str, billions: float) -> float:
    """Returns the billions of parameters that a forward pass reads for one token.

    In a mixture of experts only the chosen and shared experts count.

    Args:
        name: Hub id.
        billions: all parameters of the model, in billions.
    """
    said = re.search(r"-a([\d.]+)b", name.lower())
    return float(said[1]) if said else _ACTIVE.get(name, billions)


def _by_files(directory: Path) -> TokenizerGroup | None:
    """Returns the group of a local checkpoint. None: no group matches, or several groups match.

    Compares model_type and vocabulary size. If several groups match, tokenizer.json decides: it must contain the
    `marker` of the group.
    """
    config = _json(directory / "config.json")
    text = config.get("text_config")
    inner: dict[str, Any] = text if isinstance(text, dict) else {}
    size = config.get("vocab_size", inner.get("vocab_size"))
    kinds = [config.get("model_type"), inner.get("model_type")]
    found = [each for each in GROUPS if any(kind in each.types for kind in kinds) and size in each.vocab_sizes]
    if len(found) > 1:
        added = _json(directory / "tokenizer.json").get("added_tokens")
        entries = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
        texts = [(each.get("id"), each.get("content")) for each in entries]
        found = [each for each in found if each.marker in texts]
    return found[0] if len(found) == 1 else None


def _billions(directory: Path) -> float | None:
    """Estimates the billions of parameters that a forward pass reads for one token, from the sizes of weight files.

    Counts two bytes as one parameter. Returns None if there are no weight files.
    """
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    config = _json(directory / "config.json")
    text = config.get("text_config", config)
    chosen, of = (_number(text, *names) for names in (("num_experts_per_tok",), _EXPERTS))
    return stored / 2e9 * (chosen / of if chosen and of else 1) if stored else None


def _number(config: Any, *names: str) -> int | None:
    """Returns the value of the first field in `names` that is a whole number. None if there is none."""
    found = [config.get(name) for name in names] if isinstance(config, dict) else []
    return next((each for each in found if type(each) is int), None)


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
