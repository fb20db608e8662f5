from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from blobstore.manifests.descriptor import Descriptor
from blobstore.store.local import LocalStore
from blobstore.store.manifests import ManifestReader
from tests.support.frozen import put
from tests.unit.cli.running import run, run_json


@pytest.fixture
def models(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A store of three models, of which ``b`` is removed as soon as a command has looked for all of them."""
    for name in "abc":
        put(store, name, {name: ord(name)})
    found = ManifestReader.blobs_of

    def blobs_of(self: ManifestReader, reference: str) -> Sequence[Descriptor]:
        if str(reference) == "b:latest":
            store.manifest_path("b").unlink()
        return found(self, reference)

    monkeypatch.setattr(ManifestReader, "blobs_of", blobs_of)
    return store


@pytest.mark.parametrize("command", ["cp", "push", "export"])
def test_a_model_that_is_removed_after_a_glob_has_matched_it_is_skipped(
    command: str, models: LocalStore, tmp_path: Path
) -> None:
    words = {"cp": ("*", "--to", tmp_path / "to"), "push": ("*", (tmp_path / "to").as_uri())}
    result = run(command, *words.get(command, ("*", tmp_path / "to")))
    assert " 2 models" in result.stdout
    assert "; 1 model removed in the meantime; " in result.stdout


def test_a_name_that_the_user_has_given_must_be_there(models: LocalStore, tmp_path: Path) -> None:
    place = (tmp_path / "to").as_uri()
    found = run_json("push", "a", "b", place, exit_code=3)["models"]
    assert [model["error"] is None for model in found] == [True, False]


def test_a_damaged_manifest_keeps_no_other_model_from_being_copied(
    store: LocalStore, tmp_path: Path
) -> None:
    for name in "abc":
        put(store, name, {name: ord(name)})
    store.manifest_path("b").write_bytes(b"{")
    result = run("cp", "*", "--to", tmp_path / "to", exit_code=4)
    assert "copied 2 models" in result.stdout
    assert [one.model for one in LocalStore(tmp_path / "to").references()] == ["a", "c"]
