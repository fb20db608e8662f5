from __future__ import annotations

from pathlib import Path

from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder
from tests.support.signing import key_files
from tests.unit.cli.running import run


def test_says_which_signatures_the_hub_does_not_have(store: LocalStore, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--model" / "snapshots" / ("c" * 40)
    write_folder(snapshot, dense_tensors())
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text("c" * 40)
    run("create", tmp_path / "models--org--model", "model")
    lock = ("lock", "--out", tmp_path / "models.lock")
    assert run(*lock).stderr == ""
    run("sign", "model", "--key", key_files(tmp_path).private)
    assert run(*lock).stderr.startswith(
        "note: sync fetches 'model:latest' from the Hub, without the signatures here; "
    )
