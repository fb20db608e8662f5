"""The command ``follow``: its lines, the command that it runs, and how it ends."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.models.source_layers import read_source_record
from blobstore.operations.create.create import create
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer
from tests.support.models import dense_tensors, moe_tensors, write_folder
from tests.support.training import first_weights, steps
from tests.unit.cli.running import command_line, environment, run, run_forked, run_json
from tests.unit.operations.export.folders import NAME, add_layers

SECONDS = 240
HOOK = (
    "import os, sys; names = ['NAME', 'DIGEST', 'PREVIOUS'];"
    "open(sys.argv[1], 'a').write(' '.join(os.environ['BLOBSTORE_' + n] for n in names) + '\\n');"
    "sys.exit(int(sys.argv[2]))"
)


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    """A store that another one follows."""
    store = LocalStore(tmp_path / "origin")
    blobstore.save(first_weights(1), "policy", store=store)
    return store


def hook(log: Path, status: int = 0) -> str:
    return f'{sys.executable} -c "{HOOK}" {log} {status}'


def digest_of(store: LocalStore) -> str:
    return str(Digest.of(store.read_manifest("policy")))


@contextmanager
def following(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run the command until the block ends."""
    process = subprocess.Popen(
        command_line("follow", *arguments, "--interval", "0.05"),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_it_says_what_it_installed_and_what_it_has(store: LocalStore, origin: LocalStore) -> None:
    arguments = ("follow", "policy", origin.root, "--once")
    assert run(*arguments).stdout.startswith(f"installed policy:latest: {digest_of(origin)[7:19]}")
    assert run(*arguments).stdout == f"policy:latest is what {origin.root} has\n"
    unchanged = run_json(*arguments)
    assert (unchanged["version"], unchanged["digest"]) == (None, digest_of(origin))
    first = digest_of(store)
    blobstore.save(next(steps(first_weights(1), 1)), "policy", store=origin)
    changed = run_json(*arguments, "--keep-last", "2")
    assert (changed["previous"], changed["digest"]) == (first, digest_of(origin))
    assert changed["kept"] == f"policy:latest-{changed['digest'][7:19]}"


def test_a_command_runs_after_each_version(
    store: LocalStore, origin: LocalStore, tmp_path: Path
) -> None:
    log = tmp_path / "it's a log"
    words = ("policy", origin.root, "--exec", hook(Path(f"'{tmp_path}/it'\"'\"'s a log'")))
    with following(*words, "--json", "--store", store.root) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        blobstore.save(next(steps(first_weights(1), 1)), "policy", store=origin)
        second = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 143
    interrupted = json.loads(output)["error"]
    assert (interrupted["kind"], errors) == ("Interrupted", "blobstore: interrupted\n")
    lines = log.read_text().splitlines()
    assert lines[0] == f"policy:latest {first['digest']} "
    # The second one may have been stopped.
    assert lines[1:] in ([], [f"policy:latest {second['digest']} {first['digest']}"])


def test_a_command_uses_the_store_that_follows(
    store: LocalStore, origin: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = shlex.join(command_line("list", "--quiet"))
    arguments = ("follow", "policy", origin.root, "--once", "--exec", names)

    followed = run_forked(*arguments, "--store", "other")

    assert followed.stderr == b"policy:latest\n"
    assert run("list", "--quiet").stdout == ""


def test_a_command_that_fails_is_reported_and_ends_only_a_single_question(
    store: LocalStore, origin: LocalStore, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with following(
        *("policy", origin.root, "--exec", hook(log, 3), "--store", store.root)
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("installed")
        assert "failed with status 3" in process.stderr.readline()
        blobstore.save(next(steps(first_weights(1), 1)), "policy", store=origin)
        assert process.stdout.readline().startswith("replaced")
        assert "failed with status 3" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert len(log.read_text().splitlines()) == 2
    blobstore.save(first_weights(1), "policy", store=origin)
    assert run(
        *("follow", "policy", origin.root, "--once", "--exec", "false"), exit_code=1
    ).stderr.endswith("'false' failed with status 1\n")


def test_a_command_that_is_not_there_is_reported(store: LocalStore, origin: LocalStore) -> None:
    arguments = ("follow", "policy", origin.root, "--once", "--exec", "/no/such/program now")
    assert "cannot run '/no/such/program'" in run(*arguments, exit_code=1).stderr
    for text in ("'", " "):
        assert "--exec" in run("follow", "policy", "x/y", "--exec", text, exit_code=2).stderr


def test_an_error_is_printed_and_the_place_is_asked_again(
    store: LocalStore, tmp_path: Path
) -> None:
    origin = LocalStore(tmp_path / "later")
    origin.root.mkdir()
    with following("policy", origin.root, "--store", store.root) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert "asking again in" in process.stderr.readline()
        blobstore.save(first_weights(1), "policy", store=origin)
        assert process.stdout.readline().startswith("installed policy:latest")


def of_hub(server: HubServer, folder: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }


def test_a_revision_of_the_hub_is_followed(store: LocalStore, tmp_path: Path) -> None:
    first = write_folder(tmp_path / "first", dense_tensors())
    second = write_folder(tmp_path / "second", moe_tensors())
    with HubServer() as server:
        repository = server.add("org/model", first)
        variables = of_hub(server, tmp_path)
        arguments = ("follow", "model", "hf://org/model", "--once", "--json", "--keep-last=9")

        def ask() -> dict[str, str]:
            done = run_forked(*arguments, **variables)
            assert done.returncode == 0, done.stderr
            found: dict[str, str] = json.loads(done.stdout)
            return found

        commit = repository.commit
        found = ask()
        assert (found["version"], found["kept"]) == (commit, f"model:latest-{commit[:12]}")
        question = "GET /api/models/org/model"
        asked = server.requests[question]
        assert ask()["version"] is None
        assert server.requests[question] == asked + 1
        repository.folder, repository.commit = second, "1" * 40
        assert ask()["version"] == "1" * 40
    create(second, "expected", store=store)
    with (
        blobstore.open("model", store=store) as model,
        blobstore.open("expected", store=store) as expected,
    ):
        assert set(model) == set(expected)


def test_the_record_of_a_model_that_somebody_else_has_made_may_have_any_options(
    store: LocalStore, tmp_path: Path
) -> None:
    with HubServer() as server:
        repository = server.add("org/model", write_folder(tmp_path / "first", dense_tensors()))
        variables = of_hub(server, tmp_path)
        arguments = ("follow", str(NAME), "hf://org/model", "--once")
        assert run_forked(*arguments, **variables).returncode == 0
        record = read_source_record(store, store.resolve(NAME))
        assert record is not None
        forged = replace(record, options={"jobs": 5}).to_bytes()
        add_layers(store, (media_types.SOURCE, "", forged))
        before = store.read_manifest(NAME)
        repository.commit = "1" * 40
        done = run_forked(*arguments, **variables)
    assert done.returncode == 4
    assert b"options that create does not record" in done.stderr
    assert store.read_manifest(NAME) == before
