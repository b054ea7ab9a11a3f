"""Programs of others that talk to `fastspec serve`, each in an environment of its own from PyPI or npm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.limits import HANGS

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "clients"


@dataclass(frozen=True)
class Other:
    """A client of somebody else.

    Attributes:
        name: of its environment.
        requirements: for pip, or for npm.
        command: program and arguments; `{url}`, `{root}`, `{target}` and `{folder}` are replaced. A program that ends
            with .py or .mjs is a file of the folder; the latter runs in node.
        shows: regular expressions that the output must match.
        files: written into the folder first, name -> text, with the same replacements.
        variables: of the process, beside those of this one.
    """

    name: str
    requirements: tuple[str, ...]
    command: tuple[str, ...]
    shows: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def runs_in_node(self) -> bool:
        return self.command[0].endswith(".mjs")


def environment(client: Other) -> Path:
    """Folder of an environment with the packages of a client; made once."""
    folder = ENVIRONMENTS / client.name
    stamp, wanted = folder / "requirements.json", json.dumps(client.requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        if client.runs_in_node:
            # scripts of packages would fetch programs from elsewhere
            install = ["npm", "install", "--no-audit", "--no-fund", "--omit=optional", "--ignore-scripts"]
            install += ["--prefix", str(folder)]
            folder.mkdir(parents=True, exist_ok=True)
        else:
            venv.create(folder, with_pip=True, clear=True)
            python = str(folder / "bin" / "python")
            install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*install, *client.requirements], check=True)
        stamp.write_text(wanted)
    return folder


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[str]:
    """Address of /v1 of a server, a process of its own on the CPU.

    Args:
        folder: for its log.
        arguments: of `fastspec serve`.
    """
    said = folder / "stderr"
    command = [sys.executable, "-m", "fastspec.cli", "serve", "--device", "cpu", "--port", "0", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with said.open("w") as stderr, subprocess.Popen(command, stderr=stderr, env=variables) as process:
        end = time.monotonic() + HANGS
        while (found := re.search(r" at (http\S+)", said.read_text())) is None:
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < end, said.read_text()
            time.sleep(0.1)
        yield found[1]
        process.terminate()
        assert process.wait(HANGS) == 0, said.read_text()


def gets_what_it_asks_for(client: Other, url: str, folder: Path, *, target: str = "") -> None:
    """Runs a client against a server, and looks at its output.

    Args:
        client: its environment is made if it is not there.
        url: of /v1.
        folder: for its files.
        target: directory of a tokenizer.
    """
    if client.runs_in_node and not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("needs node and npm")
    made = environment(client)

    def filled(text: str) -> str:
        values = {"url": url, "root": url.removesuffix("/v1"), "target": target, "folder": str(folder)}
        for name, value in values.items():
            text = text.replace("{" + name + "}", value)
        return text

    for name, text in client.files.items():
        (folder / name).write_text(filled(text))
    program, *arguments = map(filled, client.command)
    command = [str(made / "bin" / program)]
    if program.endswith(".py"):
        command = [str(made / "bin" / "python"), program]
    elif client.runs_in_node:
        (folder / "node_modules").symlink_to(made / "node_modules")
        command = ["node", program]
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, **{name: filled(value) for name, value in client.variables.items()}},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert [shown for shown in client.shows if not re.search(shown, said)] == [], said
