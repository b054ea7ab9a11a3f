"""Flags of the commands, and the arguments of `FastSpecGenerator` and `generate` that they set."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastspec.adaptive.controller import AUTO
from fastspec.demo import demo_pair
from fastspec.inputs.table import NUMBERS, OPTIONS, ROWS, Flag, Form
from fastspec.models.pairs import natural_pairs
from fastspec.sampling.rules import MODES

if TYPE_CHECKING:
    from fastspec.generator import FastSpecGenerator
    from fastspec.proposers.ngram import NGram
    from fastspec.proposers.suffix import Remember

LOOKUP = "--proposer ngram drafts by lookup in the text, and needs no model"
_MADE_WITH = "num_speculative_tokens"  # the command line passes this option to the constructor, not to `generate`


def _help(keyword: str) -> str:
    flag = ROWS[keyword].flag
    assert isinstance(flag, Flag), f"{keyword} has a flag"
    return flag.help


Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: cuda if there is a GPU.")]
MaxNewTokens = Annotated[int, typer.Option(help=_help("max_new_tokens"))]


def _drafts(text: object) -> int | str:
    """Parses a number of draft tokens per step, or "auto"."""
    if str(text) == AUTO:
        return AUTO
    try:
        return int(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor {AUTO!r}") from None


Drafts = Annotated[
    Any,  # int | str: typer cannot make an option of this union
    typer.Option(
        parser=_drafts,
        metavar="INTEGER|auto",
        help=_help(_MADE_WITH),
    ),
]
_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
}


def _dtype(text: str) -> str:
    """Returns torch's name of a dtype."""
    if text not in _DTYPES:
        raise typer.BadParameter(f"got {text!r}, wanted one of {', '.join(_DTYPES)}")
    return _DTYPES[text]


Dtype = Annotated[
    str | None,
    typer.Option(
        parser=_dtype,
        metavar="bf16|fp16|fp32",
        help="Dtype of weights and KV cache. Default: the checkpoint's on CUDA, fp32 on a CPU.",
    ),
]
Target = Annotated[
    str | None,
    typer.Argument(
        help="Directory, GGUF file, Hub id or owner/name:file.gguf of the target. Default: the shipped pair."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Directory, GGUF file or Hub id of a draft model, or directory or Hub id of a head; mtp: the target's own "
        "MTP layer."
    ),
]
MaxLength = Annotated[
    int | None, typer.Option(help="Largest number of tokens of prompt and new text. Memory is reserved for them.")
]
DraftFormat = Annotated[
    str | None,
    typer.Option(
        metavar="fp8|int8|int4|auto|none",
        help="Round the draft's weights while they are loaded. auto, the default, takes the fastest format; none keeps "
        "them as stored. The text stays the same.",
    ),
]
TargetFormat = Annotated[
    str | None,
    typer.Option(
        metavar="fp8|int8|int4",
        help="Round the target's weights while they are loaded: less memory, but the text changes. Default: as stored.",
    ),
]
KVDtype = Annotated[
    str | None, typer.Option(metavar="fp8", help="Keep K and V in 8 bits: half the memory, but the text changes.")
]
Temperature = Annotated[float, typer.Option(help=_help("temperature"))]
TopP = Annotated[float | None, typer.Option(help=_help("top_p"))]
Seed = Annotated[int | None, typer.Option(help=_help("seed"))]
Rule = Annotated[str | None, typer.Option(help=f"Rule that accepts drafts: {', '.join(MODES)}. Default: block.")]
TensorParallel = Annotated[
    int | None, typer.Option(help="Number of GPUs that share the target, one process each: 1, 2, 4 or 8.")
]
Drafter = Annotated[
    str | None,
    typer.Option(
        metavar="ngram[:MIN:MAX]|suffix[:MIN:MAX]",
        help="Draft by lookup of the last MIN to MAX tokens; the draft model drafts in rows without a match. suffix "
        "also looks in predictions and corpora.",
    ),
]
Corpus = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Text that drafts may come from. Repeatable."),
]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds flags to a command: one for every row of the table OPTIONS that defines a flag.

    The command receives their values as `**` keyword arguments, under the keyword of the row.
    """
    own = inspect.signature(command, eval_str=True)
    kinds = {row.keyword: _annotated(row.flag) for row in OPTIONS if isinstance(row.flag, Flag)}
    del kinds[_MADE_WITH]
    rows = [
        inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=_default(keyword))
        for keyword, kind in kinds.items()
    ]
    named = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in named] + rows
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _default(keyword: str) -> float | None:
    flag = ROWS[keyword].flag
    return flag.default if isinstance(flag, Flag) else None


def _annotated(flag: Flag) -> Any:
    """Returns the annotation of a parameter from which typer makes the flag."""
    told: dict[str, Any] = {"help": flag.help, "metavar": flag.metavar or None}
    names = [flag.name] if flag.name else []
    if flag.form is Form.FILE:
        return Annotated[Path | None, typer.Option(*names, **told, exists=True, dir_okay=False)]
    if flag.form in (Form.BIASES, Form.TEXTS):
        return Annotated[list[str] | None, typer.Option(*names, **told)]
    kind: Any = flag.kind
    return Annotated[kind if flag.default is not None else kind | None, typer.Option(*names, **told)]


def options_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments of `generate` for the flags that were given.

    Other options keep the checkpoint's defaults.

    Raises:
        typer.BadParameter: a flag cannot be parsed, or would have no effect.
    """
    options: dict[str, Any] = {}
    for row in OPTIONS:
        value = flags.get(row.keyword)
        if not isinstance(row.flag, Flag) or row.keyword in (_MADE_WITH, "temperature") or value is None:
            continue
        if row.flag.form in (Form.BIASES, Form.TEXTS) and not value:
            continue
        options[row.keyword] = _READERS[row.flag.form](value, _flag(row.keyword))
    return options | drawing(options, flags["temperature"])


def drawing(options: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """Returns the arguments `do_sample` and `temperature` of `generate` for the value of `--temperature`.

    Raises:
        typer.BadParameter: temperature is 0 (greedy), and an option for sampling was given.
    """
    if temperature:
        return {"do_sample": True, "temperature": temperature}
    if idle := [_flag(name) for name, each in NUMBERS.items() if not each.changes_greedy and name in options]:
        raise typer.BadParameter("has no effect at temperature 0; give --temperature too", param_hint=", ".join(idle))
    return {"do_sample": False}


def text_of(file: Path | str, flag: str) -> str:
    """Reads the UTF-8 text of a file that a flag names. An empty file is refused."""
    path = Path(file)  # some versions of typer pass a str
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path} as UTF-8 text: {error}", param_hint=flag) from None
    if not text:
        raise typer.BadParameter(f"{path} is empty; name a file with text, or leave {flag} out", param_hint=flag)
    return text


def proposer_of(
    flag: str | None,
    *,
    corpus: Mapping[str, str] | None = None,
    prediction: str | None = None,
    remember: Remember | None = None,
) -> NGram | None:
    """Makes the proposer that --proposer names.

    If --proposer is not given, makes `suffix` if any other argument is given, else returns None.

    Args:
        flag: value of --proposer. None: it is not given.
        corpus: texts of --corpus by name. The proposer reserves memory for all their tokens.
        prediction: text of --prediction. The proposer reserves memory for all its tokens, too.
        remember: see `Suffix`.

    Raises:
        typer.BadParameter: --proposer cannot be parsed. Or it is `ngram`, which uses no other argument, and another
            argument is given.
    """
    texts = [name for name, given in (("--corpus", corpus), ("--prediction", prediction)) if given]
    texts += ["--remember"] if remember else []
    if flag is None and not texts:
        return None
    from fastspec.proposers.ngram import NGram
    from fastspec.proposers.suffix import Suffix

    if not (found := re.fullmatch(r"(ngram|suffix)(?::(\d+):(\d+))?", flag or "suffix")):
        raise typer.BadParameter(f"got {flag!r}, wanted ngram or suffix, or ngram:MIN:MAX", param_hint="--proposer")
    given = zip(("min_n", "max_n"), found.groups()[1:], strict=True)
    lengths: dict[str, Any] = {name: int(number) for name, number in given if number}
    try:
        if found[1] == "suffix":
            room = sum(len(text.encode()) for text in (corpus or {}).values())  # a token has a byte
            sizes: dict[str, Any] = {"corpus_tokens": room}
            sizes |= {"prediction_tokens": max(4096, len(prediction.encode()))} if prediction else {}
            return Suffix(**lengths, **sizes, remember=remember)
        if texts:
            raise typer.BadParameter(
                f"ngram looks in the row alone; give suffix with {texts[0]}", param_hint="--proposer"
            )
        return NGram(**lengths)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--proposer") from None


def corpora_of(files: Sequence[Path] | None) -> dict[str, str]:
    """Returns the texts of the files that --corpus names, by file name."""
    return {str(file): text_of(file, "--corpus") for file in files or ()}


def check_values(flags: Mapping[str, Any]) -> None:
    """Checks the values of flags before models are loaded.

    Args:
        flags: values by the command's parameter names. Missing names are not checked.

    Raises:
        typer.BadParameter: a number is out of range, or a text is not UTF-8.
    """
    from fastspec.inputs.row_options import read_number  # imports torch, which `--help` must not
    from fastspec.inputs.values import whole

    least = {"max_new_tokens": 1, "num_return_sequences": 1, "min_new_tokens": 0}
    checks: dict[str, Callable[[Any], object]] = {name: partial(read_number, name) for name in NUMBERS}
    checks |= {name: partial(whole, name, low=low) for name, low in least.items()}
    for name, check in checks.items():
        try:
            if flags.get(name) is not None:
                check(flags[name])
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=_flag(name)) from None
    for name in ("prompt", "system", "regex", "stop_strings"):
        given = flags.get(name) or ()
        for text in [given] if isinstance(given, str) else given:
            try:
                check_text(text)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint=_flag(name)) from None


def check_text(text: str) -> None:
    """Raises ValueError if a text from the command line or the keyboard was not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # Python decodes such bytes as lone surrogates, which no tokenizer accepts
        raise ValueError(
            f"character {error.start} is {text[error.start]!r}, which is no text; write it in UTF-8, and set a "
            "locale of UTF-8 (LC_ALL=C.UTF-8)"
        ) from None


def _flag(name: str) -> str:
    """Returns the flag as users write it: the name in the table of options, else the parameter's with dashes."""
    flag = ROWS[name].flag if name in ROWS else None
    return (flag.name if isinstance(flag, Flag) else "") or "--" + name.replace("_", "-")


def _texts(texts: Sequence[str], flag: str) -> list[str]:
    return list(texts)


def _value(value: object, flag: str) -> object:
    return value


def _ids(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"got {text!r}, wanted token ids with commas: 3,17", param_hint=flag) from None


def _biases(pairs: Sequence[str], flag: str) -> dict[int, float]:
    found = {}
    for pair in pairs:
        try:
            token, bias = pair.split("=")
            found[int(token)] = float(bias)
        except ValueError:
            raise typer.BadParameter(f"got {pair!r}, wanted ID=BIAS: 17=-2.5", param_hint=flag) from None
    return found


_READERS: Mapping[Form, Callable[[Any, str], object]] = {
    Form.VALUE: _value,
    Form.IDS: _ids,
    Form.BIASES: _biases,
    Form.TEXTS: _texts,
    Form.FILE: text_of,
}


def pair_of(target: str | None, draft: str | None) -> tuple[str, str | None]:
    """Returns (target, draft) as given, or the shipped pair if neither was.

    Raises:
        typer.BadParameter: a draft is given without a target.
    """
    if target is not None:
        return target, draft
    if draft is not None:
        raise typer.BadParameter("a draft needs its target: give the target, too", param_hint="--draft")
    shipped, its_draft = demo_pair()
    return str(shipped), str(its_draft)


def given(**options: Any) -> dict[str, Any]:
    """Returns the options that are not None, so that defaults apply to the others.

    draft_quantization="none" is returned as None, which means that the draft's weights are not quantised.
    """
    found = {name: value for name, value in options.items() if value is not None}
    return found | ({"draft_quantization": None} if found.get("draft_quantization") == "none" else {})


def suggest_draft(target: str | None, draft: str | None, proposer: str | None, drafts: int | str) -> None:
    """Says on stderr that nothing drafts, if the user gave only a target, and names a draft that fits it.

    If the table of pairs has no such draft, names drafting by lookup.

    Args:
        target, draft, proposer: values of the flags. None: not given.
        drafts: value of --num-speculative-tokens. 0: the user wants no drafts.
    """
    if target is None or draft is not None or proposer is not None or drafts == 0:
        return
    found = natural_pairs(target)
    fits = f"--draft {found.drafts[0]} fits {target}" if found is not None and found.drafts else LOOKUP
    typer.echo(f"fastspec: decoding without a draft; {fits}", err=True)


def opened(context: typer.Context, target: str, draft: str | None, **options: Any) -> FastSpecGenerator:
    """Makes the generator of a command.

    A program can call the command line as `app(obj=factory)`. Then `factory` is called instead of `FastSpecGenerator`.
    """
    if context.obj is not None:
        made: FastSpecGenerator = context.obj(target, draft, **options)
        return made
    from fastspec.generator import FastSpecGenerator

    return FastSpecGenerator(target, draft, **options)


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Makes the entries of a TOML file the defaults of a command's flags. A flag on the command line wins.

    Returns `file`, as typer expects of the callback of a flag.

    Args:
        context: the command's context.
        file: TOML file, whose keys are flags without the leading dashes. None: the defaults stay.

    Raises:
        typer.BadParameter: the file cannot be read, or a key is not a flag of the command.
    """
    if file is None:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # a package of the extra `serve`
        import tomli as tomllib
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {file} as TOML: {error}") from None
    # every name of a parameter: "max-length", "max_length", and the argument "target"
    names = {name.lstrip("-"): one for one in context.command.params for name in [*one.opts, *one.secondary_opts]}
    found: dict[str, object] = {}
    for key, value in given.items():
        one = names.get(key.replace("_", "-")) or names.get(key)
        if one is None or one.name == "config" or isinstance(value, dict):
            known = ", ".join(sorted(name for name in names if name not in ("config", "help", "h")))
            raise typer.BadParameter(f"{file}: {key} is no flag of this command; wanted some of {known}")
        # a flag that may repeat takes a list here
        several = getattr(one, "multiple", False)
        if isinstance(value, list) != several:
            raise typer.BadParameter(f"{file}: {key} must be {'a list' if several else 'one value'}, got {value!r}")
        found[str(one.name)] = value
    context.default_map = found
    return file
