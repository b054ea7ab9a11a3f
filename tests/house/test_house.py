"""House rules that no linter knows: banned calls, twins of kernels, light imports, the wheel."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.house.offenders import SPEEDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fastspec"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# an op's wrapper has the name of its torch definition; each folder of kernels has its twin in tests
KERNELS = PACKAGE / "kernels"

BANNED_NAMES = {"eval", "exec"}
BANNED_ATTRIBUTES = {("torch", "load"), ("os", "environ"), ("os", "getenv"), ("os", "system")}
BANNED_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BANNED_TRUE = {"trust_remote_code", "shell"}


def offences(source: str) -> list[str]:
    """What `source` does that this package may not: one line each."""
    return [offence for node in ast.walk(ast.parse(source)) for offence in _offences_of(node)]


def _offences_of(node: ast.AST) -> list[str]:
    found: list[str] = []
    if isinstance(node, ast.Global):
        found = [f"global {name}" for name in node.names]
    elif isinstance(node, ast.Import):
        found = [f"import {alias.name}" for alias in node.names if alias.name.split(".")[0] in BANNED_MODULES]
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        whole = module.split(".")[0] in BANNED_MODULES
        found = [
            f"from {module} import {alias.name}"
            for alias in node.names
            if whole or (module, alias.name) in BANNED_ATTRIBUTES
        ]
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        found = [f"{node.value.id}.{node.attr}"] if (node.value.id, node.attr) in BANNED_ATTRIBUTES else []
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in BANNED_NAMES:
            found = [f"{node.func.id}()"]
        for keyword in node.keywords:
            off = isinstance(keyword.value, ast.Constant) and keyword.value.value in (False, None)
            if keyword.arg in BANNED_TRUE and not off:
                found.append(f"{keyword.arg}=...")
    return [f"line {getattr(node, 'lineno', 0)}: {what}" for what in found]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# how a weight lies in memory is known to `Weight` and to `packing`: everyone else asks for its format and its shape
GUESSES_A_FORMAT = re.compile(
    r"\b(\w*weights?(\[\w+\])?|head|table|embed|qkv|o|gate_up|down)\.(dim\(\) [=!]= 4|shape\[[01]\] \* (8|16|32)\b)"
)
KNOW_FORMATS = {"fastspec/kernels/common/packing.py", "fastspec/kernels/common/weights.py"}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_source_guesses_the_format_of_a_weight(path: Path) -> None:
    if relative(path) not in KNOW_FORMATS:
        assert [found[0] for found in GUESSES_A_FORMAT.finditer(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("planted", ["if weight.dim() == 4:", "n = weights[0].shape[0] * 16", "layer.o.shape[1] * 32"])
def test_a_planted_guess_at_a_format_is_found(planted: str) -> None:
    assert GUESSES_A_FORMAT.search(planted)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_source_keeps_the_rules(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert offences(source) == []


@pytest.mark.parametrize(
    "planted",
    [
        "def f():\n    global state",
        "import torch\nweights = torch.load('x')",
        "from torch import load",
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "model = AutoModel.from_pretrained('x', trust_remote_code=True)",
        "flag = True\nAutoConfig.from_pretrained('x', trust_remote_code=flag)",
        "subprocess.run('ls', shell=True)",
        "import os\ndebug = os.environ['DEBUG']",
    ],
)
def test_a_planted_offence_is_found(planted: str) -> None:
    assert len(offences(planted)) == 1


@pytest.mark.parametrize(
    "fine", ["'torch.load, pickle and eval'", "model.eval()", "from_pretrained('x', trust_remote_code=False)"]
)
def test_what_only_looks_like_one_is_not(fine: str) -> None:
    assert offences(fine) == []


# constructors of torch that ask the caller's defaults for what they are not told
MAKES_TENSORS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
WHOLE = {"arange", "randint", "randperm", "tensor", "tril_indices", "triu_indices"}  # of integers, as we use them


def left_to_defaults(source: str) -> list[str]:
    """Tensors that `source` makes on the caller's default device, or in the caller's default dtype."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) != "torch" or node.func.attr not in MAKES_TENSORS:
            continue
        told = {keyword.arg for keyword in node.keywords}
        wanted = {"device"} if node.func.attr in WHOLE else {"device", "dtype"}
        found += [f"line {node.lineno}: torch.{node.func.attr} without {name}" for name in sorted(wanted - told)]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_tensor_is_left_to_the_callers_defaults(path: Path) -> None:
    assert left_to_defaults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "planted", ["torch.arange(3)", "torch.tensor([1])", "torch.empty(3, device=d)", "torch.zeros(3, dtype=t)"]
)
def test_a_planted_tensor_without_device_or_dtype_is_found(planted: str) -> None:
    assert len(left_to_defaults(planted)) == 1
    assert left_to_defaults("torch.zeros_like(x), x.new_empty(3), torch.zeros(3, dtype=t, device=d)") == []


def test_every_folder_has_its_tests() -> None:
    folders = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if list(path.glob("*.py"))} - {
        Path("demo"),
        Path(),
    }
    missing = {str(folder) for folder in folders if not any((ROOT / "tests" / folder).rglob("test_*.py"))}
    assert missing == {"kernels/reference"}  # tested with the kernels


def test_the_page_table_needs_only_the_standard_library() -> None:
    tree = ast.parse((PACKAGE / "kv_cache" / "pages.py").read_text(encoding="utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    foreign = {name for name in modules if name.split(".")[0] not in sys.stdlib_module_names}
    assert foreign <= {"fastspec.errors"}


BLOCK_TRITON = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str) -> str:
    """Runs `code` in a fresh interpreter that sees no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_is_light() -> None:
    heavy = "('triton', 'torch', 'transformers')"
    assert run_python(f"import sys, fastspec; print([name for name in {heavy} if name in sys.modules])") == "[]\n"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def importing_triton() -> set[str]:
    """Modules of the kernels that import Triton when they are imported, themselves or by way of each other."""
    texts = {module_of(path): path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py")}
    found = {name for name, text in texts.items() if re.search(r"^(import|from) triton", text, re.M)}
    while True:
        more = {name for name, text in texts.items() if any(_imports(text, other) for other in found)}
        if more <= found:
            return found
        found |= more


def _imports(text: str, module: str) -> bool:
    package, _, stem = module.rpartition(".")
    whole = rf"^from {re.escape(module)} import"
    part = rf"^from {re.escape(package)} import (\([^)]*|[^(\n]*)\b{stem}\b"
    return bool(re.search(whole, text, re.M) or re.search(part, text, re.M))


def test_every_module_imports_without_triton_and_cuda() -> None:
    names = [module_of(path) for path in SOURCES]
    needs_triton = importing_triton() | {"fastspec.cli.__main__"}  # the latter runs the command line
    plugins = {"fastspec.integrations.llm", "fastspec.integrations.lm_eval"}  # classes derive from those of an extra
    imports = "\n".join(f"import {name}" for name in names if name not in needs_triton | plugins)
    assert "fastspec.kernels.product.plan" not in needs_triton  # explain() asks it what was measured, on any machine
    public = "import fastspec\nfor name in fastspec.__all__: getattr(fastspec, name)"
    assert run_python(f"{BLOCK_TRITON}\n{imports}\n{public}\nprint(fastspec.demo_pair())").count("demo") == 2


def test_the_wheel_holds_the_package_and_the_pair_and_nothing_else(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(built).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fastspec"}
    shipped = {relative(path) for path in SOURCES}
    shipped |= {relative(path) for path in (PACKAGE / "demo").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert shipped | {"fastspec/py.typed"} <= names
    for model in ("target", "draft"):
        for file in ("config.json", "tokenizer.json", "model.safetensors"):
            assert f"fastspec/demo/{model}/{file}" in names


MAX_ROOT_MODULES, MAX_FILES = 9, 16
# private words that the field's terms have replaced (see perf/LOG.md); a word joins them once no source uses it
BANNED_WORDS = {
    *("CertainProposer", "Launched", "Outlook", "Pacer", "PassRows", "_settle", "_settle_by_fiat", "keeps_laws"),
    *("lane", "needs_law", "readying", "take_in", "find_laws", "law_of", "race_of_few", "coin", "slab", "slabs"),
    *("narrow_kernel", "ring_kernel", "wide_kernel"),
    *(
        "at_hand",
        "Beside",
        "Ends",
        "Given",
        "given_kernel",
        "InParts",
        "Intake",
        "KeptStates",
        "PASSED",
        "passes_whole",
    ),
    *("take_given", "TakesGiven", "Where"),
    *("alike", "rows_together", "sum_of_ways", "together", "TOGETHER", "ways_scale"),
    *("ways", "WAYS", "most", "MOST", "settle", "settle_keys", "tile_pick_kernel", "fp32_pick_kernel"),
}
SPEED = re.compile(r"\d\s?(?:us|ms|[KMGT]i?B/s|tok/s|tokens (?:a|per) second)\b")


def large_folders(counts: dict[str, int]) -> list[str]:
    """Folders of the package with more modules than are allowed; "." is its root."""
    limits = {".": MAX_ROOT_MODULES}
    return [folder for folder, count in counts.items() if count > limits.get(folder, MAX_FILES)]


def banned_words(source: str) -> set[str]:
    """Banned words that `source` uses as names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        found |= {
            getattr(node, part) for part in ("id", "attr", "arg", "name") if isinstance(getattr(node, part, 0), str)
        }
    return found & BANNED_WORDS


def speeds(source: str) -> list[str]:
    """Figures of speed in docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return [found for text in texts for found in SPEED.findall(text)]


# a file in a text, with as much of its folder as the text says
FILE = re.compile(r"(?<![\w/.-])((?:[a-z]\w*/)*[a-z]\w*\.py)\b")


def files_named(source: str) -> set[str]:
    """Python files that comments and docstrings of `source` name."""
    return {
        name for line in source.splitlines() if not line.startswith(("import", "from")) for name in FILE.findall(line)
    }


def within(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_folders_are_small() -> None:
    counts = Counter(str(path.parent.relative_to(PACKAGE)) for path in SOURCES)
    assert large_folders(counts) == []
    assert large_folders({".": 10, "text": 17, "kernels/product": 16}) == [".", "text"]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_source_keeps_the_rules_of_words_and_sizes(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert banned_words(source) == set()
    assert len(speeds(source)) <= SPEEDS.get(within(path), 0)


@pytest.mark.parametrize(
    "planted",
    [
        "alike = 1",
        "f(TOGETHER=2)",
        "K.most",
        "f(WAYS=2)",
        "lane = 1",
        "self.take_in()",
        "class Pacer: ...",
        "def _settle(): ...",
        "f(readying=1)",
        "def f(lane): ...",
    ],
)
def test_a_planted_word_is_found(planted: str) -> None:
    assert len(banned_words(planted)) == 1
    assert banned_words(f"'{planted}'") == set()  # in a text it may stand


@pytest.mark.parametrize("planted", ["takes 3 us", "4.2 GB/s", "508 tok/s", "12 ms a step", "1,961 tokens a second"])
def test_a_planted_figure_of_speed_is_found(planted: str) -> None:
    assert len(speeds(f'def f():\n    """It {planted}."""')) == 1
    assert speeds("'of 16 bytes, 4 users, 32 KiB'") == []


def test_files_that_sources_name_are_there() -> None:
    there = [
        f"/{relative(path)}"
        for folder in ("fastspec", "tests", "perf", "tools")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    named = {name: path for path in SOURCES for name in files_named(path.read_text(encoding="utf-8"))}
    named.pop("script.py")  # the reader's own, in an error message
    gone = {name: within(path) for name, path in named.items() if not any(each.endswith(f"/{name}") for each in there)}
    assert gone == {}
    assert files_named("# as in kernels/publish.py, see accept.py") == {"kernels/publish.py", "accept.py"}


COMPARED = re.compile(r"capability\b[^\n]{0,40}? (?:[<>]=?|[!=]=|in) |[<>=!]=? \(\d+, \d\)")


def test_only_the_record_of_the_device_compares_compute_capabilities() -> None:
    planted = [
        "gpu.capability >= (9, 0)",
        "capability in ROOMY",
        "x != (9, 0)",
        "get_device_capability(device) < FIRST",
    ]
    assert all(COMPARED.search(line) for line in planted)
    record = PACKAGE / "kernels" / "gpu.py"
    assert COMPARED.search(record.read_text(encoding="utf-8"))
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path != record
        for line in path.read_text(encoding="utf-8").splitlines()
        if "capability" in line and COMPARED.search(line)
    ]
    assert found == []
