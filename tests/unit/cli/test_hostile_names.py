"""Names that attack the terminal, shown by every command."""

from __future__ import annotations

import json
import struct
import unicodedata
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner

from blobstore.cli.main import program
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.describe import list as listing
from blobstore.operations.maintenance import verify
from blobstore.operations.maintenance.verify import Fault, Verified
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.unit.cli.running import run, run_forked, run_json, run_process

LONG = "long." + "n" * 70_000 + ".weight"
HOSTILE = {
    "esc": "esc\x1b[2J\x1b]0;owned\x07.weight",
    "csi": "csi\x9b31m.weight",
    "cr": "cr\rspoofed.weight",
    "lf": "lf\nblobstore: error: spoofed.weight",
    "override": "rtl\u202eslauqe\u202c.weight",
    "isolate": "iso\u2066late\u2069.weight",
    "separator": "sep\u2028line\u2029.weight",
    "delete": "del\x7f\x00.weight",
    "tab": "tab\t.weight",
    "markup": "[bold red]markup[/] :smile: {task}.weight",
    "long": LONG,
}


def assert_clean(data: bytes) -> None:
    """Check that nothing but visible characters, spaces and line feeds reaches a terminal."""
    bad = {
        char
        for char in data.decode()
        if char != "\n" and (unicodedata.category(char)[0] == "C" or char in "\u2028\u2029")
    }
    assert not bad


@pytest.fixture
def hostile(store: LocalStore, tmp_path: Path) -> Path:
    """A model file with hostile tensor names, stored as ``hostile``."""
    names = list(HOSTILE.values())
    header = {
        name: {"dtype": "U8", "shape": [2], "data_offsets": [2 * index, 2 * index + 2]}
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(2 * len(names)))
    run("create", path, "hostile")
    return path


def commands(path: Path) -> list[list[object]]:
    return [
        ["create", path, "again"],
        ["create", path, "again", "--dry-run"],
        ["show", "hostile"],
        ["show", "hostile", "--layers"],
        ["show", "hostile", "*.weight"],
        ["show", "hostile", "--sort", "name"],
        ["verify"],
        ["list"],
        ["du"],
        ["diff", "hostile", "hostile", "--all"],
        ["rm", "hostile", "--dry-run"],
    ]


def test_nothing_unprintable_is_shown(hostile: Path) -> None:
    for command in commands(hostile):
        done = run_forked(*command)
        assert done.returncode == 0, done.stderr
        assert_clean(done.stdout)
        assert_clean(done.stderr)
        assert len(max(done.stdout.split(b"\n"), key=len)) < 2000


def test_every_name_stays_on_its_row(hostile: Path) -> None:
    lines = run("show", "hostile").stdout.split("\n")

    assert len(lines) == 2 + len(HOSTILE) + 2
    rows = {line.split()[0] for line in lines[2:-2]}
    assert {
        "esc\\x1b[2J\\x1b]0;owned\\x07.weight",
        "csi\\x9b31m.weight",
        "cr\\rspoofed.weight",
        "rtl\\u202eslauqe\\u202c.weight",
        "sep\\u2028line\\u2029.weight",
        "del\\x7f\\x00.weight",
        "tab\\t.weight",
        "[bold",
    } < rows
    assert sum("…" in row for row in rows) == 1


@pytest.mark.slow
def test_json_has_the_names_unchanged(hostile: Path) -> None:
    for command in commands(hostile):
        run_json(*command)
    tensors = run_json("show", "hostile")["tensors"]
    assert {tensor["name"] for tensor in tensors} == set(HOSTILE.values())


def test_damage_is_reported_on_clean_lines(hostile: Path, store: LocalStore) -> None:
    for layer in store.resolve(Reference.parse("hostile")).layers:
        (store.folder("blobs") / layer.digest.file_name).unlink()
    for command in (["show", "hostile"], ["show", "hostile", "--layers"], ["verify"]):
        done = run_forked(*command)
        assert done.returncode == 4
        assert_clean(done.stdout)
        assert_clean(done.stderr)
        assert len(max((done.stdout + done.stderr).split(b"\n"), key=len)) < 2000
    done = run_forked("verify", "--json")
    layers = {fault["layer"] for fault in json.loads(done.stdout)["faults"]}
    assert layers == {*HOSTILE.values(), media_types.SOURCE}


@pytest.mark.parametrize(
    "command", ["show", "verify", "export", "create", "rm", "cp", "mv", "tag", "du", "diff"]
)
def test_hostile_arguments_are_escaped(store: LocalStore, command: str) -> None:
    for name in HOSTILE.values():
        argument = name.replace("\x00", "")
        more = {"create": [argument], "export": ["folder"]}.get(command, [])
        more = ["second"] if command in ("cp", "mv", "tag", "diff") else more
        done = CliRunner(catch_exceptions=False).invoke(program, [command, argument, *more])
        assert done.exit_code in (1, 2, 3)
        assert_clean(done.stderr_bytes)
        assert done.stdout_bytes == b""
        assert done.stderr.count("\n") == 1


def test_messages_of_libraries_are_escaped(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(HOSTILE.values())
    fault = Fault(text, text, text, text)
    verified = Verified(models=1, blobs=1, bytes_read=1, seconds=1, faults=(fault,), damaged=())
    monkeypatch.setattr(verify, "verify_models", lambda *_, **__: verified)
    frozen.put(store, "m", {"own": 1})
    result = run("verify", exit_code=4)
    assert_clean(result.stdout_bytes)
    assert result.stdout.count("\n") == 2

    def fail(*_: object, **__: object) -> NoReturn:
        raise BlobstoreError(text)

    monkeypatch.setattr(listing, "choose_models", fail)
    result = run("list", exit_code=1)
    assert_clean(result.stderr_bytes)
    assert result.stderr.count("\n") == 1
    assert json.loads(run("list", "--json", exit_code=1).stdout)["error"]["message"] == text


def test_the_store_s_own_path_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "st\x1b[31m\nore\u202e"
    for command, code in ((["list"], 3), (["verify"], 3), (["show", "x"], 3)):
        result = run(*command, "--store", folder, exit_code=code)
        assert_clean(result.stderr_bytes)
        assert result.stderr.count("\n") == 1
        assert "st\\x1b[31m\\nore\\u202e" in result.stderr


def test_arguments_that_are_not_utf8_are_escaped(stored: LocalStore) -> None:
    done = run_process("show", "dense", b"\xff*".decode(errors="surrogateescape"), "--json")
    assert done.returncode == 3
    assert_clean(done.stderr)
    assert "\\udcff*" in json.loads(done.stdout)["error"]["message"]
