"""Files of deploy/: what they run is there, and ports, users, paths and times agree."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_serve_command import parameters

DEPLOY = Path(__file__).parents[2] / "deploy"
# the instructions of a Dockerfile
KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT"}
ENDS = 10  # seconds more than the drain that a server has before it is killed


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with their arguments."""
    whole = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in whole.splitlines() if line.strip()]


DOCKERFILE = instructions((DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
(COMPOSE,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
OBJECTS = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))}
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def argument(name: str) -> str:
    """The argument of an instruction that is there once."""
    (found,) = [each for instruction, each in DOCKERFILE if instruction == name]
    return found


def entrypoint(monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """Parameters of the command that the image runs."""
    program, command, *arguments = json.loads(argument("ENTRYPOINT"))
    assert (program, command) == ("fastspec", "serve")
    return parameters(monkeypatch, *arguments, *more)


def test_the_image_is_whole_and_runs_as_nobody_special(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DOCKERFILE[0][0] == "FROM"
    assert DOCKERFILE[0][1].startswith("nvidia/cuda:")
    assert {name for name, _ in DOCKERFILE} <= KNOWN
    user = argument("USER").split(":")[0]
    assert int(user) > 0
    assert any(f"useradd --uid {user}" in each for name, each in DOCKERFILE if name == "RUN")
    names = [name for name, _ in DOCKERFILE]
    assert "RUN" not in names[names.index("USER") :], "what is installed belongs to root"
    for each in (each for name, each in DOCKERFILE if name == "COPY"):
        for source in each.split()[:-1]:
            assert (DEPLOY.parent / source).exists(), source
    extras = re.search(r'"\.\[([\w,]+)\]"', " ".join(each for _, each in DOCKERFILE))
    assert extras is not None
    project = (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert [name for name in extras[1].split(",") if f"\n{name} = [" not in project] == []
    port = entrypoint(monkeypatch)["port"]
    assert argument("EXPOSE") == str(port)
    probe = json.loads(argument("HEALTHCHECK").split("CMD ", 1)[1])
    assert f"http://127.0.0.1:{port}/health" in probe[-1]
    compile(probe[-1], "the probe", "exec")


def test_compose_runs_the_image_with_a_key_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (DEPLOY / COMPOSE["build"]["context"] / COMPOSE["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    volumes = dict(each.split(":")[:2] for each in COMPOSE["volumes"])
    file, inside = next(each for each in volumes.items() if each[0].startswith("."))
    command = [str(DEPLOY / file) if each == inside else each for each in COMPOSE["command"]]
    found = entrypoint(monkeypatch, *command)
    assert (found["host"], found["names"]) == ("0.0.0.0", ["qwen"])
    assert COMPOSE["ports"] == [f"127.0.0.1:{found['port']}:{found['port']}"]
    assert volumes["cache"] == argument("VOLUME")
    assert COMPOSE["environment"]["FASTSPEC_API_KEY"].startswith("${FASTSPEC_API_KEY:?")
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) >= found["drain"] + ENDS
    assert COMPOSE["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_kubernetes_runs_the_image_with_a_key_and_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(OBJECTS) == {"ConfigMap", "PersistentVolumeClaim", "Deployment", "Service"}
    config = tmp_path / "serve.toml"
    config.write_text(OBJECTS["ConfigMap"]["data"]["serve.toml"], encoding="utf-8")
    found = entrypoint(
        monkeypatch, *[each.replace("/etc/fastspec/serve.toml", str(config)) for each in CONTAINER["args"]]
    )
    assert found["config"] == config
    assert POD["terminationGracePeriodSeconds"] >= found["drain"] + ENDS
    assert str(POD["securityContext"]["runAsUser"]) == argument("USER").split(":")[0]
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert CONTAINER["securityContext"]["allowPrivilegeEscalation"] is False
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert [each["name"] for each in CONTAINER["env"]] == ["FASTSPEC_API_KEY"]
    (port,) = CONTAINER["ports"]
    assert port["containerPort"] == found["port"] == OBJECTS["Service"]["spec"]["ports"][0]["port"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    mounts = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert set(mounts) == {each["name"] for each in POD["volumes"]}
    assert mounts["cache"] == argument("VOLUME")
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Service"]["spec"]["selector"] == OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels


def test_systemd_runs_the_command_and_lets_it_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "fastspec.service", encoding="utf-8")
    assert unit.sections() == ["Unit", "Service", "Install"]
    program, command, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("fastspec", "serve")
    given = [str(DEPLOY / "serve.toml") if each == "/etc/fastspec/serve.toml" else each for each in arguments]
    found = parameters(monkeypatch, *given)
    assert found["target"].startswith("Qwen/")
    assert int(unit["Service"]["TimeoutStopSec"]) >= found["drain"] + ENDS
    assert unit["Service"]["DynamicUser"] == "yes"
    assert unit["Service"]["KillSignal"] == "SIGTERM"


def test_a_planted_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "serve.toml").write_text("max-batch-sizes = 3")
    with pytest.raises(AssertionError, match="max-batch-sizes is no flag"):
        parameters(monkeypatch, "--config", str(tmp_path / "serve.toml"))
    assert instructions("# x\nRUN a \\\n    && b\nUSER 1") == [("RUN", "a      && b"), ("USER", "1")]
