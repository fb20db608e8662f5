from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blobstore.cli import output
from blobstore.operations.describe import find
from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_json


@pytest.fixture
def several(stored: LocalStore, moe: Path) -> LocalStore:
    run("cp", "dense", "copy")
    run("create", moe, "moe")
    return stored


def models(*arguments: str, exit_code: int = 0) -> list[str]:
    return [item["model"] for item in run_json("find", *arguments, exit_code=exit_code)["places"]]


def test_finds_the_models_that_have_a_blob(several: LocalStore) -> None:
    blob = several.resolve("dense").layers[0]

    for text in (str(blob.digest), blob.digest.hex[:8]):
        assert models(text) == ["copy:latest", "dense:latest"]
    row = run("find", blob.digest.hex[:8]).stdout.splitlines()[1].split()
    assert row[:3] == ["copy:latest", "blob", blob.name]


def test_finds_a_model_by_the_digest_of_its_manifest(several: LocalStore) -> None:
    digest = run_json("list", "moe")["models"][0]["digest"]

    (place,) = run_json("find", digest[:14])["places"]
    assert (place["model"], place["kind"], place["digest"]) == ("moe:latest", "model", digest)


def test_finds_tensors_by_name_even_in_groups(several: LocalStore) -> None:
    assert models("model.layers.0.norm.weight") == ["copy:latest", "dense:latest"]
    names = {item["name"] for item in run_json("find", "*experts.1.*")["places"]}
    assert names
    assert all(".experts.1." in name for name in names)
    assert set(models("*experts.1.*")) == {"moe:latest"}
    assert models(min(names)) == ["moe:latest"]


def test_finds_files(several: LocalStore) -> None:
    (place, _) = run_json("find", "merges.txt")["places"]
    assert (place["kind"], place["name"], place["bytes"]) == ("file", "merges.txt", 4)


def test_nothing_found_is_an_error(several: LocalStore) -> None:
    assert (
        "is called 'x', or has such a blob, tensor or file" in run("find", "x", exit_code=3).stderr
    )
    assert "'0000'" in run("find", "0000", exit_code=3).stderr


def test_what_cannot_be_read_is_an_error_after_what_was_found(several: LocalStore) -> None:
    several.manifest_path("copy").write_bytes(b"{")
    blob = several.resolve("moe").layers[0]
    (several.folder("blobs") / blob.digest.file_name).unlink()

    assert models("*merges.txt", exit_code=4) == ["dense:latest"]
    errors = run("find", "*merges.txt", exit_code=4).stderr
    assert errors.count("blobstore: error: ") == 2
    assert "model moe:latest: " in errors


def test_rows_are_printed_while_others_are_looked_for(
    several: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("cp", "dense", "a-longer-name")
    together = run("find", "merges.txt").stdout.splitlines()
    monkeypatch.setattr(output, "_ROWS_WAIT", 0)
    seen: list[int] = []
    search = find._Search.places

    def places(*arguments: Any) -> Any:
        seen.append(len(printed))
        return search(*arguments)

    printed: list[str] = []
    show = output.show

    def noting(text: str) -> None:
        printed.append(text)
        show(text)

    monkeypatch.setattr(output, "show", noting)
    monkeypatch.setattr(find._Search, "places", places)
    lines = run("find", "merges.txt").stdout.splitlines()
    assert seen == [0, 1, 2, 3]
    assert lines == together, "the first row is the widest"
