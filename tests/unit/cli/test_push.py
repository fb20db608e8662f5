from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from tests.support.frozen import layer, put, spoil_deltas, tuned
from tests.support.models import add_blobs
from tests.support.raw_server import RawServer, Received, reply
from tests.support.registry import Server, running_registry
from tests.unit.cli.running import LAUNCHER, environment, run, run_json


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


def without_time(output: str) -> str:
    return output.rpartition("; ")[0]


def test_reports_what_was_sent(stored: LocalStore, server: Server) -> None:
    remote = f"{server.host}/cli/dense"
    planned = run("push", "dense", remote, "--dry-run").stdout
    assert without_time(planned) == (
        f"would push dense:latest to {remote}:latest: 17 blobs, 6.6 kB to send"
    )
    done = run("push", "dense", remote).stdout
    assert without_time(done) == f"pushed dense:latest to {remote}:latest: 17 blobs, 6.6 kB sent"
    again = run("push", "dense", remote).stdout
    assert without_time(again) == f"nothing to do: {remote}:latest is dense:latest already"
    verified = run("push", "dense", remote, "--verify").stdout
    assert without_time(verified).endswith("is dense:latest already, 6.6 kB read back")
    copied = run("push", "dense", f"{remote}-copy:v2").stdout
    assert without_time(copied) == (
        f"pushed dense:latest to {remote}-copy:v2: 17 blobs, 0 B sent, 6.6 kB mounted"
    )
    retagged = run("push", "dense", f"{remote}:v2").stdout
    assert without_time(retagged).endswith("17 blobs, 0 B sent, 6.6 kB already there")


def test_prints_exact_numbers_as_json(stored: LocalStore, server: Server) -> None:
    remote = f"{server.host}/cli/json:v1"
    found = run_json("push", "dense", remote, "--layout", "ollama")
    assert found["remote"] == remote
    assert found["remote_shape"] == "ollama"
    assert found["bytes_sent"] == sum(blob.size for blob in stored.resolve("dense").blobs)
    assert (found["unchanged"], found["dry_run"], found["bytes_verified"]) == (False, False, 0)


def test_reports_deltas_that_could_not_be_verified(
    store: LocalStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "base", {"x": 1})
    add_blobs(store, "child", {"x": layer("x", tuned(10, 1))})
    spoil_deltas(monkeypatch)
    remote = f"{server.host}/cli/spoiled"
    command = ("push", "child", remote, "--cold", "--base", "base", "--verify")
    assert run(*command).stdout.splitlines()[1] == (
        "  1 blob compressed without a base: the base is damaged, "
        "or the delta could not be verified"
    )
    assert run_json(*command)["fallbacks"] == 1


def test_pushes_a_name_with_a_host_to_that_host(stored: LocalStore, server: Server) -> None:
    name = f"{server.host}/Team/Dense:v1"
    run("cp", "dense", name)
    assert f"to {server.host}/team/dense:v1" in run("push", name).stdout


def test_all_models_go_to_one_place(stored: LocalStore, tmp_path: Path) -> None:
    put(stored, "team/one:v1", {"x": 1})
    place = f"file://{tmp_path}/bucket"
    names = [model["name"] for model in run_json("push", "--all", place)["models"]]
    assert names == sorted(map(str, stored.references()))
    found = run_json("list", place)["models"]
    assert [model["name"] for model in found] == [f"{place}/{name}" for name in names]
    assert "--all takes no NAME" in run("push", "--all", "dense", place, exit_code=2).stderr


def test_a_name_without_a_host_is_a_usage_error(stored: LocalStore) -> None:
    result = run("push", "dense", exit_code=2)
    assert "give a REMOTE such as registry.example.com/dense" in result.stderr


def test_a_damaged_blob_is_exit_status_4(stored: LocalStore, server: Server) -> None:
    layer = max(stored.resolve("dense").layers, key=lambda layer: layer.size)
    path = Path(stored.blob_path(layer.digest))
    path.chmod(0o644)
    path.write_bytes(bytes(layer.size - 1) + b"x")
    result = run("push", "dense", f"{server.host}/cli/damaged", "--layout=ollama", exit_code=4)
    assert "run 'blobstore repair', then push again" in result.stderr


def test_other_tools_words_for_it_lead_to_it() -> None:
    assert "push" in run("upload", exit_code=2).stderr


# A stalled connection is waited for as long as the tests may take.
PATIENT = """
import functools
from blobstore.registry import client
client.Patience = functools.partial(client.Patience, stall=3600)
"""


@pytest.mark.parametrize("silent", ["HEAD", "POST", "PUT"])
def test_an_interrupt_ends_a_push_although_the_server_is_silent(
    stored: LocalStore, silent: str
) -> None:
    is_silent = threading.Event()

    def serve(request: Received) -> Iterator[bytes]:
        if "/blobs/" in request.path + "/" and request.method == silent:
            is_silent.set()
            mute.closing.wait()
        yield reply(202 if request.method == "POST" else 404, location="/v2/a/blobs/uploads/1")

    with RawServer(serve) as mute:
        process = subprocess.Popen(
            [sys.executable, "-c", PATIENT + LAUNCHER, "push", "dense", f"{mute.host}/a"],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        is_silent.wait()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "the same command continues where this one stopped" in errors
