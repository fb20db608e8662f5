"""The files of ``docs/examples`` for Kubernetes, Compose and systemd: they name what the program and each other have."""

from __future__ import annotations

import copy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from blobstore.cli.main import program

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
IMAGE = "registry.example.com/blobstore:0.1.0"
PROGRAM = "/opt/blobstore/bin/blobstore"
UNITS = sorted((EXAMPLES / "systemd").iterdir())
COMPOSE = (EXAMPLES / "compose/compose.yaml").read_text(encoding="utf-8")
VERSIONS = ("1.33", "1.37")  # the first one that has image volumes in beta, and the newest one


def resources() -> list[dict[str, Any]]:
    files = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
    return [one for file in files for one in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and specifications of all pods."""
    for one in resources():
        spec = one["spec"].get("jobTemplate", one)["spec"]
        if "containers" in (pod := spec.get("template", {"spec": spec})["spec"]):
            yield one["metadata"]["name"], pod


def commands() -> list[tuple[str, ...]]:
    """Return the arguments of each call of the program."""
    found = [
        tuple(container["args"])
        for _, pod in pods()
        for container in pod["containers"]
        if container["image"] == IMAGE
    ]
    found.append(tuple(yaml.safe_load(COMPOSE)["services"]["blobstore"]["command"]))
    for unit in UNITS:
        for line in unit.read_text(encoding="utf-8").splitlines():
            if line.startswith("ExecStart="):
                called, *arguments = shlex.split(line.partition("=")[2].replace("%%", "%"))
                assert called == PROGRAM
                found.append(tuple(arguments))
    return found


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_the_program_has_each_command_with_its_options(arguments: tuple[str, ...]) -> None:
    context = click.Context(program)
    command = program.get_command(context, arguments[0])
    assert command is not None
    parser = command.make_parser(click.Context(command, parent=context))
    values, rest, _ = parser.parse_args(list(arguments[1:]))
    assert rest == []
    for parameter in command.params:
        if (value := values.get(parameter.name or "")) and not isinstance(
            parameter, click.Argument
        ):
            parameter.process_value(click.Context(command), value)


def test_every_kind_of_deployment_has_its_commands() -> None:
    assert sorted(arguments[0] for arguments in commands()) == [
        *("gc", "gc"),
        *("serve", "serve", "serve", "serve"),
        *("verify", "verify"),
    ]


def test_pods_mount_volumes_that_they_have_and_run_without_rights() -> None:
    found = dict(pods())
    assert len(found) == 6
    for name, pod in found.items():
        volumes = {volume["name"] for volume in pod["volumes"]}
        containers = pod["containers"] + pod.get("initContainers", [])
        mounted = {mount["name"] for one in containers for mount in one["volumeMounts"]}
        assert mounted == volumes, name
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            if container["image"] == IMAGE:
                user = {**pod["securityContext"], **container["securityContext"]}
                assert user["runAsNonRoot"], name
                assert user["runAsUser"] == 10001
                assert user["readOnlyRootFilesystem"]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_has_every_field_of_the_files(version: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="it is in the test group")
    found = resources()
    for one in found:
        kubernetes.validate(one, version, strict=True)
    assert len(found) >= 10
    wrong = copy.deepcopy(found[0])
    wrong["spec"]["replica"] = 1
    with pytest.raises(kubernetes.ValidationError, match="replica"):
        kubernetes.validate(wrong, version, strict=True)


def test_compose_has_every_field_of_the_file_and_what_it_names() -> None:
    compose = pytest.importorskip("compose_spec", reason="it is in the test group").PyCompose
    compose.from_yaml(COMPOSE).validate()
    with pytest.raises(ValueError, match="restarts"):
        compose.from_yaml(COMPOSE.replace("restart: ", "restarts: ", 1))
    with pytest.raises(ValueError, match="certificate"):
        compose.from_yaml(COMPOSE.replace("  certificate: ", "  another: ")).validate()


def test_services_and_policies_select_pods_that_there_are() -> None:
    labels = [
        one["spec"].get("jobTemplate", one)["spec"].get("template", {}).get("metadata", {})
        for one in resources()
    ]
    known = {item for one in labels for item in one.get("labels", {}).items()}
    selected: list[tuple[str, str]] = []

    def collect(value: object) -> None:
        if isinstance(value, dict):
            for selector in ("podSelector", "labelSelector"):
                selected.extend(value.get(selector, {}).get("matchLabels", {}).items())
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    for one in resources():
        collect(one)
        if one["kind"] == "Service":
            selected.extend(one["spec"]["selector"].items())
    assert {("app", "blobstore"), ("app", "blobstore-cache")} < set(selected)
    assert set(selected) <= known


def test_a_server_has_time_to_drain() -> None:
    for _, pod in pods():
        for container in pod["containers"]:
            for argument in container["args"]:
                if argument.startswith("--drain="):
                    drain = int(argument.partition("=")[2])
                    assert pod["terminationGracePeriodSeconds"] > drain


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace(PROGRAM, sys.executable)
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
