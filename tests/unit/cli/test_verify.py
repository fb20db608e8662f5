from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.manifests.reference import Reference
from tests.unit.cli.running import run, run_json

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.store.local import LocalStore


def flip_last_byte(store: LocalStore, layer_name: str) -> None:
    manifest = store.resolve(Reference.parse("dense"))
    layer = next(layer for layer in manifest.layers if layer.name == layer_name)
    path = store.layout.blobs / layer.digest.file_name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_says_that_all_is_well(stored: LocalStore) -> None:
    result = run("verify")

    assert result.exit_code == 0
    assert result.stdout.startswith("ok: 1 model, 13 blobs, ")
    assert result.stdout.count("\n") == 1
    verified = run_json("verify", "dense", "--jobs", 1)
    assert verified["models"] == 1
    assert verified["bytes_read"] == sum(p.stat().st_size for p in stored.layout.blobs.iterdir())
    assert verified["faults"] == []


def test_prints_one_line_a_fault_and_exits_with_4(stored: LocalStore, moe: Path) -> None:
    assert run("create", moe, "moe").exit_code == 0
    flip_last_byte(stored, "model.embed_tokens.weight")
    flip_last_byte(stored, "merges.txt")
    result = run("verify")
    lines = result.stdout.splitlines()

    assert result.exit_code == 4
    assert lines[0].startswith(
        "model dense:latest, layer model.embed_tokens.weight, tensor model.embed_tokens.weight: "
    )
    assert lines[1].startswith("model dense:latest, layer merges.txt: ")
    assert lines[2].startswith("2 faults: 2 models, ")
    assert len(lines) == 3
    faults = run_json("verify", exit_code=4)["faults"]
    assert [fault["layer"] for fault in faults] == ["model.embed_tokens.weight", "merges.txt"]


def test_verifies_only_what_is_named(stored: LocalStore, moe: Path) -> None:
    assert run("create", moe, "moe").exit_code == 0
    flip_last_byte(stored, "merges.txt")

    assert run("verify", "moe").exit_code == 0
    assert run("verify", "moe", "dense").exit_code == 4


def test_a_damaged_manifest_is_a_fault(stored: LocalStore) -> None:
    stored.layout.manifest(Reference.parse("dense")).write_bytes(b"{}")
    result = run("verify")

    assert result.exit_code == 4
    assert result.stdout.startswith("model dense:latest: ")
    assert "\n1 fault: 1 model, 0 blobs, " in result.stdout


def test_an_absent_store_is_not_found(store: LocalStore) -> None:
    result = run("verify")

    assert result.exit_code == 3
    assert result.stderr.startswith("blobstore: error: there is no store at ")
