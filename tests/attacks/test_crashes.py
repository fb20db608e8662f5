"""Imports that are killed, or run out of disk space or descriptors: a name is complete or absent."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import ModelNotFound, StoreError
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.models import dense_tensors, write_folder

NAME = Reference.parse("m")
CREATE = """
import signal, sys, time
import blobstore
source, store, when = sys.argv[1], sys.argv[2], float(sys.argv[3])
is_interrupted = False

def interrupt(*_):
    global is_interrupted
    is_interrupted = True
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)

def progress(what, done, total):
    if done >= total * when:
        print("ready", flush=True)
        while not is_interrupted:  # the handler might come while an event is being waited for, and need its lock
            time.sleep(0.01)

try:
    blobstore.create(source, "m", store=blobstore.LocalStore(store), jobs=2, progress=progress)
except KeyboardInterrupt:
    sys.exit(130)
"""


def model(folder: Path) -> Path:
    return write_folder(
        folder, {f"t{number}": np.full(50_000, number) for number in range(12)} | dense_tensors()
    )


@pytest.mark.parametrize("when", [0, 0.5, 1])
def test_a_killed_import_leaves_no_name_and_the_next_succeeds(tmp_path: Path, when: float) -> None:
    source, store = model(tmp_path / "model"), LocalStore(tmp_path / "store")
    with sandbox.start(CREATE, source, store.root, when) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(ModelNotFound):
        store.resolve(NAME)
    for path in store.folder("blobs").iterdir():  # every named blob matches its name
        assert Digest.of(path.read_bytes()).file_name == path.name
    blobstore.create(source, "m", store=store)
    blobstore.open("m", store=store, verify="digest").close()


def test_an_interrupted_import_leaves_nothing(tmp_path: Path) -> None:
    source, store = model(tmp_path / "model"), LocalStore(tmp_path / "store")
    with sandbox.start(CREATE, source, store.root, 0.3) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate()
    assert child.returncode == 130, errors
    assert list(store.references()) == []
    assert list(store.folder("temporary").iterdir()) == []
    assert list(store.folder("blobs").iterdir()) == []


def test_a_full_disk_leaves_no_name_and_frees_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(tmp_path / "model")
    small = write_folder(tmp_path / "small", dense_tensors())
    with sandbox.small_disk(tmp_path / "disk", 2 * 2**20) as disk:
        store = LocalStore(disk / "store")
        with monkeypatch.context() as patch:
            # As if another program took the space after the check.
            patch.setattr(LocalStore, "free_space", lambda _: 2**40)
            with pytest.raises(StoreError, match=f"space .*for the store '{disk}/store'"):
                blobstore.create(source, "m", store=store)
        assert list(store.references()) == []
        assert list(store.folder("temporary").iterdir()) == []
        assert list(store.folder("blobs").iterdir()) == []
        blobstore.create(small, "m", store=store)
        with blobstore.open("m", store=store, verify="digest") as opened:
            assert set(opened) == set(dense_tensors())


def test_a_file_size_limit_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    source, store = model(tmp_path / "model"), LocalStore(tmp_path / "store")
    outcome = sandbox.call(
        lambda: blobstore.create(source, "m", store=store), limits={resource.RLIMIT_FSIZE: 100_000}
    )
    assert outcome.startswith(f"StoreError: writing to the store '{store.root}' failed: File")
    assert list(store.references()) == []
    assert list(store.folder("temporary").iterdir()) == []


def test_a_store_without_permission_is_an_error() -> None:
    with sandbox.common_folder() as folder:
        source = write_folder(folder / "model", dense_tensors())
        (source / "model.safetensors").chmod(0o644)  # its writer closes it to others
        (folder / "closed").mkdir(mode=0o755)
        store = LocalStore(folder / "closed")
        outcome = sandbox.call(
            lambda: blobstore.create(source, "m", store=store), unprivileged=True
        )
        place = folder / "closed"
        assert outcome == (
            f"StoreError: no permission to write to the store '{place}' ('{place}/blobs')"
        )
        assert list((folder / "closed").iterdir()) == []


def test_a_read_only_store_can_be_loaded_from() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        blobstore.create(write_folder(folder / "model", dense_tensors()), "m", store=store)
        for path in store.folder("headers").iterdir():
            path.unlink()
        for path in (store.root, *store.root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)

        def load() -> int:
            with blobstore.open("m", store=store, verify="digest") as opened:
                return int(opened["position_ids"].sum())

        assert sandbox.call(load, unprivileged=True) == "10"
        assert list(store.folder("headers").iterdir()) == []


def test_a_thousand_blobs_need_few_descriptors(tmp_path: Path) -> None:
    count = 1000
    tensors = {f"t{number}": np.array([number], np.int32) for number in range(count)}
    source, store = write_folder(tmp_path / "model", tensors), LocalStore(tmp_path / "store")

    def use() -> str:
        blobstore.create(source, "m", store=store)
        before = len(os.listdir("/dev/fd"))
        total = 0
        for framework in ("numpy", "torch", "numpy"):
            with blobstore.open("m", store=store, framework=framework) as opened:  # type: ignore[arg-type]
                total += sum(int(tensor[0]) for tensor in opened.state_dict().values())
                assert len(os.listdir("/dev/fd")) == before
            for path in store.folder("headers").iterdir():
                path.unlink()
        return str(total)

    outcome = sandbox.call(use, limits={resource.RLIMIT_NOFILE: 256})
    assert outcome == str(3 * sum(range(count)))
