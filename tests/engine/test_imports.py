"""What a process has imported: a start waits for none of what a generator made from a directory does not use."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import fastspec
from fastspec import demo_pair
from tests.helpers.checkpoints import make_model

# heavy, and of use for live models, torch.compile, GPUs or training alone
UNUSED = (
    "torch._dynamo",
    "torch._inductor",
    "transformers.generation.utils",
    "transformers.utils.type_validators",
    "transformers.integrations.finegrained_fp8",
    "transformers.models.auto.configuration_auto",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "triton",
)
IMPORT = "from fastspec import FastSpecGenerator"
MAKE = f"""
generator = FastSpecGenerator({str(demo_pair()[0])!r}, {str(demo_pair()[1])!r}, device="cpu", progress=False)
generator.generate([[5, 6, 7]], max_new_tokens=4)
"""
TOKENIZER = "generator.tokenizer.decode([5])"


def imported(*parts: str) -> list[set[str]]:
    """Which of UNUSED a fresh process has after each part of its code."""
    ask = f"import sys; print('has', *[name for name in {UNUSED!r} if name in sys.modules], file=sys.stderr)"
    code = "\n".join(f"{part}\n{ask}" for part in parts)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [set(line.split()[1:]) for line in done.stderr.splitlines() if line.split()[:1] == ["has"]]
    assert len(found) == len(parts), done.stderr
    return found


@pytest.fixture(scope="module")
def ours() -> list[set[str]]:
    return imported(IMPORT, MAKE, TOKENIZER)


@pytest.fixture(scope="module")
def theirs() -> list[set[str]]:
    """What transformers imports for any config, for a class of tokenizers, and for models."""
    names = "PretrainedConfig", "PreTrainedTokenizerFast", "PreTrainedModel"
    return imported(*(f"from transformers import {name}" for name in names))


def test_importing_imports_nothing_heavy(ours: list[set[str]]) -> None:
    assert not ours[0]


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_cycles_are_collected_while_a_name_is_imported(
    collecting: bool, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the collector is as it was afterwards, also if a module cannot be imported."""
    (tmp_path / "looks_at_gc.py").write_text("import gc\nStats = gc.isenabled()\n" + "import nowhere\n" * fails)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(fastspec._LAZY, "Stats", "looks_at_gc")
    monkeypatch.delitem(sys.modules, "looks_at_gc", raising=False)
    was = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(ModuleNotFoundError, match="nowhere") if fails else nullcontext():
            assert fastspec.__getattr__("Stats") is False
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if was else gc.disable)()
        sys.modules.pop("looks_at_gc", None)


def test_a_generator_imports_no_more_than_transformers_does_for_any_config(
    ours: list[set[str]], theirs: list[set[str]]
) -> None:
    """Nor for tokenizers, which are not loaded where a pair has one."""
    assert ours[1] <= theirs[0]


def test_a_tokenizer_imports_no_more_than_its_class_does(ours: list[set[str]], theirs: list[set[str]]) -> None:
    """And not `AutoTokenizer`, with which some versions import all of generation and torch's compiler."""
    assert ours[2] <= theirs[1]


def test_the_check_sees_what_is_imported(theirs: list[set[str]]) -> None:
    assert "transformers.modeling_utils" in theirs[2]
    assert "transformers.modeling_utils" not in theirs[0]


def test_a_live_model_is_still_taken() -> None:
    from fastspec import FastSpecGenerator

    with FastSpecGenerator(make_model("llama2"), max_length=32, device="cpu", progress=False) as generator:
        assert len(generator.generate([[5, 6]], max_new_tokens=2, eos_token_id=None)[0]) == 4
