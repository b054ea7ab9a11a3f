"""House rules about names, signatures and docstrings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fastspec"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SHORT = 4  # lines of a function that may do without a docstring
MAX_PARAMETERS = 12  # of a host function; an open mapping counts as many
OPEN = 20
# a docstring begins with a verb or a noun, not with a clause
CLAUSE = re.compile(r"(?:What|Whether|Which|Those|That|As it|As in|As the|As its|As `|The same as `?\w+`?\.$)\b")
# an entry of "Args:" or "Attributes:" is described by a noun, not by a part of a sentence
FRAGMENT = re.compile(
    r"^ {4}([\w*]+(?:, [\w*]+)*): "
    r"(?:of|that|whose|which|where|as|what|how|whether|(?:by|in|for|from|to|on|with) which)\b",
    re.MULTILINE,
)
# phrases that readers had to read twice: "except", "because", "also" and plain verbs say the same
RIDDLES = re.compile(
    r"\b(?:all the same|as there|as well as|but for|however (?:it|many|they)|in vain|likewise|may not come|save for|"
    r"so many|taken off|wherever)\b",
    re.IGNORECASE,
)
LONGEST_SENTENCE = 30  # words
FLAG = re.compile(r"\b(?:flags|typer)\.")  # an annotation that makes a parameter a flag of the command line
DEVICE_CODE = re.compile(r"\bjit\b|constexpr_function")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def decorators(node: Function | ast.ClassDef) -> list[str]:
    return [ast.unparse(each) for each in node.decorator_list]


def on_device(node: Function) -> bool:
    return any(DEVICE_CODE.search(each) for each in decorators(node))


def functions(source: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def parameters(node: Function) -> int:
    """Parameters of a host function; `**x: Any` and `dict[str, Any]` hide as many as they like."""
    taken = node.args
    kinds = [each.annotation for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    texts = ["" if kind is None else ast.unparse(kind) for kind in kinds]
    count = sum(OPEN if "dict[str, Any]" in text else not FLAG.search(text) for text in texts)
    rest = taken.kwarg
    if rest is not None and (rest.annotation is None or ast.unparse(rest.annotation) == "Any"):
        count += OPEN
    return count


def packed_constants(source: str) -> set[str]:
    """Constexpr parameters of device functions that are read by place or by field: each should be several."""
    found = set()
    for node in functions(source):
        kinds = {each.arg: ast.unparse(each.annotation) for each in node.args.args if each.annotation is not None}
        names = {name for name, kind in kinds.items() if kind.endswith("constexpr")}
        for each in ast.walk(node):
            by_field = isinstance(each, ast.Attribute) and each.attr.isupper()
            if (by_field or isinstance(each, ast.Subscript)) and isinstance(each.value, ast.Name):
                found |= {each.value.id} & names
    return found


def without_docstring(source: str) -> list[str]:
    """Public functions and classes of some length without a docstring, but for overrides and device code."""
    found = []
    tree = ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    outer = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    inner = {id(each) for node in outer for each in ast.walk(node) if each is not node}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or id(node) in inner:
            continue
        long = (node.end_lineno or 0) - node.lineno + 1 > SHORT
        override = any(each.endswith(("override", "overload")) for each in decorators(node))
        if not node.name.startswith("_") and long and not override and ast.get_docstring(node) is None:
            found.append(node.name)
    return found


def clauses(source: str) -> list[str]:
    """Docstrings that begin with a clause."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [text.splitlines()[0] for text in texts if text and CLAUSE.match(text)]


def riddles(source: str) -> list[str]:
    """Fragments, phrases and sentences of docstrings that have to be read twice."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(ast.parse(source)):
        text = (ast.get_docstring(node) or "") if isinstance(node, documented) else ""
        found += [each.group(0).strip() for each in FRAGMENT.finditer(text)]
        found += [each.group(0) for each in RIDDLES.finditer(" ".join(text.split()))]
        found += [sentence for sentence in sentences(text) if len(sentence.split()) > LONGEST_SENTENCE]
    return found


def sentences(text: str) -> list[str]:
    """Sentences of the plain paragraphs of a docstring: without tables, formulas and entries of lists."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        if not any(line.startswith((" ", "|", "- ", ">>>", "```")) or line.endswith(":") for line in lines):
            found += re.split(r"(?<=[.;:?!])\s+", " ".join(lines))
    return found


def modules_by_string(source: str) -> list[str]:
    """Modules of this package that are imported by a string."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            found += [text for text in texts if isinstance(text, str) and text.startswith("fastspec.")]
    return found


def classes() -> dict[str, list[str]]:
    named = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                named[node.name].append(relative(path))
    return named


def test_a_class_name_is_used_once() -> None:
    assert {name: paths for name, paths in classes().items() if len(paths) > 1} == {}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    assert clauses(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_docstrings_are_read_once(path: Path) -> None:
    assert riddles(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_what_is_public_and_long_has_a_docstring(path: Path) -> None:
    assert without_docstring(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_module_of_ours_is_imported_by_a_string(path: Path) -> None:
    assert modules_by_string(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").rglob("*.py")), ids=relative)
def test_a_constexpr_is_one_fact(path: Path) -> None:
    # the table of sizes of splits is one fact: rows of a kind
    assert packed_constants(path.read_text(encoding="utf-8")) <= {"SPLIT_SIZES"}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_parameters_are_few_and_named(path: Path) -> None:
    nodes = [node for node in functions(path.read_text(encoding="utf-8")) if not on_device(node)]
    long = {node.name: parameters(node) for node in nodes if parameters(node) > MAX_PARAMETERS}
    allowed = OPEN_SIGNATURES.get(relative(path), set())
    assert {name: count for name, count in long.items() if name not in allowed} == {}
    assert allowed <= long.keys(), "these keep the rule now: take them out of the list"


# Functions that take an open mapping, or more than MAX_PARAMETERS; the lists may only shrink.
# The constructor has the arguments of the generator. Hooks have the signatures of transformers, launches those of
# kernels, servers and command lines JSON and flags of others; passes hand the options of an op on.
OPEN_SIGNATURES: dict[str, set[str]] = {
    "fastspec/cli/app.py": {"_generate", "_opened"},
    "fastspec/cli/flags.py": {"given", "opened"},
    "fastspec/cli/probes.py": {"_summary", "run"},
    "fastspec/distributed/following.py": {"_row"},
    "fastspec/engine/threads.py": {"by_one_thread"},
    "fastspec/generator.py": {"__init__", "generate"},
    "fastspec/grammar/library.py": {"_blanks"},
    "fastspec/integrations/lm_eval.py": {"__init__", "_largest", "_loglikelihood_tokens", "_texts", "tok_encode"},
    "fastspec/integrations/ray.py": {"_generate"},
    "fastspec/integrations/ray_serve.py": {"__init__", "deployment"},
    "fastspec/integrations/transformers.py": {"_check_lists", "generate"},
    "fastspec/integrations/trl.py": {"__init__", "rollout"},
    "fastspec/kernels/attention/decode/launch.py": {"_start"},
    "fastspec/kernels/common/compilers.py": {"submit"},
    "fastspec/kernels/common/launch.py": {"completed", "launch"},
    "fastspec/kernels/common/weights.py": {"empty"},
    "fastspec/kernels/compiled_ops.py": {"attend_op"},
    "fastspec/models/checkpoints/decoder_weights.py": {"load_weights"},
    "fastspec/models/checkpoints/resolve.py": {"_hosted", "_hosted_info"},
    "fastspec/models/compiled.py": {"__init__"},
    "fastspec/models/config_classes.py": {"__post_init__"},
    "fastspec/models/decoder.py": {"_product", "head_argmax", "head_logits"},
    "fastspec/models/heads/passes.py": {"__init__", "head_argmax", "head_logits"},
    "fastspec/models/hosted/layerwise.py": {"enter"},
    "fastspec/models/hosted/model.py": {"attend", "forward"},
    "fastspec/models/hosted/probe.py": {"_scale", "attend"},
    "fastspec/models/hosted/swaps.py": {
        "_attention",
        "_probe_mask",
        "attend",
        "constant_on_device",
        "number_on_device",
        "padded_elements",
        "padded_reduction",
        "rotated",
        "update",
    },
    "fastspec/models/pairs.py": {"_group"},
    "fastspec/models/parallel.py": {"_own_keys", "_own_logits", "_product", "_products", "head_argmax", "head_logits"},
    "fastspec/models/remote_code.py": {"with_known_type"},
    "fastspec/models/rope.py": {"computed"},
    "fastspec/models/checkpoints/gguf_config.py": {"_gemma2", "_gemma3", "_moe", "_phi3"},
    "fastspec/proposers/combined.py": {"propose"},
    "fastspec/proposers/heads.py": {"build_head"},
    "fastspec/server/completions/echo.py": {"added", "shifted", "usage"},
    "fastspec/server/completions/envelope.py": {"_whole", "last", "whole"},
    "fastspec/server/fields.py": {"_function_of", "_object_schema"},
    "fastspec/text/answers/lark.py": {"bare_value", "json"},
    "fastspec/text/answers/values.py": {"json_of_text", "property_of", "types_of"},
}


def test_planted_offences_are_found() -> None:
    assert clauses('def f():\n    """Whether it is."""') == ["Whether it is."]
    assert clauses('class A:\n    """What it is."""') == ["What it is."]
    assert clauses('def f():\n    """As `reference.f`."""') == ["As `reference.f`."]
    assert clauses('def f():\n    """Returns what it is."""') == []
    body = "\n".join(["    x = 1"] * SHORT)
    assert without_docstring(f"def f():\n{body}") == ["f"]
    assert without_docstring(f"@override\ndef f():\n{body}") == without_docstring(f"def _f():\n{body}") == []
    assert without_docstring("def f():\n    x = 1") == []
    assert without_docstring("def f():\n    'Does it.'\n    def g():\n" + body.replace("    ", " " * 8)) == []
    for fragment in (
        "dtype: of the weights.",
        "key: that clients send.",
        "rows, size: as in `Weight`.",
        "by: how it was found.",
    ):
        assert riddles(f'def f():\n    """Makes it.\n\n    Args:\n        {fragment}\n    """') == [
            " ".join(fragment.split()[: 3 if fragment.startswith("rows") else 2])
        ]
    assert riddles('def f():\n    """Makes all, but for the last."""') == ["but for"]
    assert riddles('def f():\n    """Waits, but not in\n    vain."""') == ["in vain"]
    assert riddles(f'def f():\n    """{"Word " * 31}."""') == [f"{'Word ' * 31}."]
    good = "Makes it, except in the last row.\n\n    Args:\n        dtype: dtype of the weights.\n"
    good += "        of: tensor that it reads.\n    "
    assert riddles(f'def f():\n    """{good}"""') == []
    assert modules_by_string('import_module("fastspec.kernels")') == ["fastspec.kernels"]
    assert modules_by_string('import_module("triton"), "fastspec.kernels"') == []
    (many,) = functions(f"def f({', '.join(f'a{i}: int' for i in range(13))}): ...")
    assert parameters(many) == 13
    (flags,) = functions("def f(a: flags.Seed, b: Annotated[int, typer.Option()]): ...")
    assert parameters(flags) == 0
    for open_mapping in ("def f(**x: Any): ...", "def f(**x): ...", "def f(x: dict[str, Any]): ..."):
        (taken,) = functions(open_mapping)
        assert parameters(taken) == OPEN
    (typed,) = functions("def f(**x: Unpack[Options]): ...")
    assert parameters(typed) == 0
    (kernel,) = functions("@triton.jit\ndef f(): ...")
    assert on_device(kernel)
    for packed in ("SIZES.ROWS", "SIZES[0]"):
        assert packed_constants(f"def f(SIZES: tl.constexpr): return {packed}") == {"SIZES"}
    assert packed_constants("def f(x, DTYPE: gl.constexpr): return DTYPE.primitive_bitwidth, x[0]") == set()
