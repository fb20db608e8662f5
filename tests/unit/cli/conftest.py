from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.models import dense_tensors, moe_tensors, write_folder
from tests.unit.cli.running import run

DENSE_CONFIG = b'{"architectures": ["TinyForCausalLM"], "model_type": "tiny"}'


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """The store that the commands use without --store."""
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "store"))
    return LocalStore(tmp_path / "store")


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    files = {"config.json": DENSE_CONFIG, "tokenizer.json": b"{}", "merges.txt": b"a b\n"}
    return write_folder(tmp_path / "dense", dense_tensors(), files=files)


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "moe", moe_tensors(), shards=2)


@pytest.fixture
def stored(store: LocalStore, dense: Path) -> LocalStore:
    """A store with the model ``dense``."""
    run("create", dense, "dense")
    return store


@pytest.fixture
def closed(dense: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of manifests that cannot be read. The store has another model, named ``open``."""
    with sandbox.common_folder() as folder:
        monkeypatch.setenv("BLOBSTORE_HOME", str(folder))
        for name in ("open", "team/closed"):
            run("create", dense, name)
        closed = LocalStore(folder).manifest_path("team/closed").parent
        closed.chmod(0)
        yield closed
        closed.chmod(0o755)
