"""The import of one model by a worker."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from blobstore.errors import BlobstoreError, RemoteError, RemoteRefused, SourceError, StoreBusy
from blobstore.operations.ingest import task
from blobstore.operations.ingest.task import import_model
from blobstore.store import spellings
from blobstore.store.local import LocalStore
from blobstore.store.scan import each_name
from tests.support.models import write_folder


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (StoreBusy("busy"), False),
        (RemoteError("lost"), False),
        (OSError(5, "Input/output error"), False),
        (RemoteRefused("denied"), True),
        (SourceError("no model"), True),
        (BlobstoreError("other"), True),
    ],
)
def test_failures_that_may_pass_are_not_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_final: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(task, "create", fail)
    found = import_model("source", "name", LocalStore(tmp_path / "store"), {})
    assert found.is_final is is_final
    assert found.error == str(error)


def test_a_model_is_imported_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {"a": np.arange(8, dtype=np.float32)})
    first = import_model(str(folder), "m", LocalStore(tmp_path / "store"), {})
    again = import_model(str(folder), "m", LocalStore(tmp_path / "store"), {})
    assert (first.is_present, again.is_present) == (False, True)
    assert first.bytes_written > 0
    assert again.bytes_written == 0


def test_the_tasks_of_a_worker_list_the_names_of_a_namespace_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []

    def noted(folder: str | Path) -> list[str]:
        listed.append(str(folder))
        return each_name(folder)

    monkeypatch.setattr(spellings, "each_name", noted)
    sent = pickle.dumps(LocalStore(tmp_path / "store"))  # as a worker gets it for each task
    for number in range(3):
        folder = write_folder(tmp_path / f"m{number}", {"a": np.full(8, number, np.float32)})
        import_model(str(folder), f"org/m{number}", pickle.loads(sent), {})
    assert len(listed) == len(set(listed))
    assert LocalStore(tmp_path / "store").has_model("org/m2")
