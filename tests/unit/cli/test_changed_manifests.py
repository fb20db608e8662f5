"""A changed manifest is refused by commands that use the model, and accepted by those that manage names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.unit.cli.running import run


@pytest.fixture
def changed(stored: LocalStore, dense: Path) -> LocalStore:
    """Return a store with the model ``dense``, of whose manifest a bit was changed, and ``whole``."""
    run("create", dense, "whole")
    path = stored.manifest_path(Reference.parse("dense"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"ollama.image.json", b"ollama.image.jsoo", 1))
    assert path.read_bytes() != data
    return stored


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "dense"),
        ("export", "dense", "{folder}"),
        ("link", "dense", "{folder}"),
        ("compare", "dense", "whole"),
        ("compare", "whole", "dense"),
        ("diff", "dense", "whole"),
        ("diff", "whole", "dense"),
    ],
    ids=" ".join,
)
def test_is_refused_by_commands_that_use_it(
    arguments: tuple[str, ...], changed: LocalStore, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    result = run(*(item.format(folder=folder) for item in arguments), exit_code=4)
    assert "the manifest was changed since it was written" in result.stderr
    assert not folder.exists()


@pytest.mark.parametrize("options", [(), ("--quick",)])
def test_is_found_by_verify(options: tuple[str, ...], changed: LocalStore) -> None:
    result = run("verify", *options, "--json", exit_code=4)
    (fault,) = json.loads(result.stdout)["faults"]
    assert fault["reference"] == "dense:latest"
    assert "the manifest was changed since it was written" in fault["message"]
    assert "create the model again, copy it from another of its names" in result.stderr


def test_is_accepted_by_commands_that_manage_names(changed: LocalStore) -> None:
    run("cp", "dense", "copy")
    for arguments in (["list"], ["du"], ["rm", "copy"], ["show", "dense", "--manifest"]):
        run(*arguments)


def test_stops_gc_until_the_name_is_gone(changed: LocalStore) -> None:
    assert "'blobstore rm dense:latest'" in run("gc", exit_code=4).stderr
    run("rm", "dense")
    run("gc")


@pytest.mark.slow
def test_is_repaired_as_the_message_says(changed: LocalStore, dense: Path) -> None:
    run("cp", "whole", "dense", "--force")
    run("verify")
    path = changed.manifest_path(Reference.parse("dense"))
    path.write_bytes(path.read_bytes().replace(b'"name"', b'"nbme"', 1))
    run("create", dense, "dense")
    run("verify")
