"""Disks that are full: one clear error, and nothing half done."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import blobstore
from blobstore.errors import BlobstoreError, StoreError
from blobstore.planning.plan import QuantizeOptions
from blobstore.safetensors import edit, safe_open
from blobstore.safetensors.numpy import save_file
from blobstore.store.local import LocalStore
from tests.faults import disks
from tests.support.models import write_folder
from tests.support.raw_server import RawServer, reply

SHAPE = (512, 512)
SIZE = 1 << 20
"""Bytes of a tensor of that shape."""
NAMES = ("a.weight", "b.weight", "c.weight")

pytestmark = pytest.mark.skipif(bool(disks.why_not()), reason=disks.why_not() or "disks are there")


class Place(NamedTuple):
    """A folder of a model, the model in object storage, and a small disk."""

    source: Path
    remote: str
    disk: Path

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.disk / "store")


def create(place: Place) -> object:
    return blobstore.create(place.source, "q", store=place.store, quantize=QuantizeOptions("int8"))


def pull(place: Place) -> object:
    return blobstore.pull(place.remote, store=place.store)


def freeze(place: Place) -> object:
    return blobstore.freeze(["m"], store=place.store, older_than=0)


def export(place: Place) -> object:
    return blobstore.export("m", place.disk / "folder", store=place.store)


def pack(place: Place) -> object:
    return blobstore.pack(["m"], place.disk / "archive", store=place.store)


def save(place: Place) -> None:
    save_file({"n": np.ones(SHAPE, np.float32)}, place.disk / "file.safetensors")


def add(place: Place) -> object:
    return edit.edit_file(place.disk / "file.safetensors", {"n": np.ones(SHAPE, np.float32)})


def swap(place: Place) -> object:
    """Exchange two tensors of a file in place, which are copied first."""
    path = place.disk / "file.safetensors"
    with safe_open(path, "np") as file:
        one, other = (file.get_tensor(name) for name in NAMES[:2])
        return edit.edit_file(path, {NAMES[0]: other, NAMES[1]: one}, in_place=True)


def content(disk: Path) -> dict[str, bytes]:
    """Return all files but locks, by their paths."""
    files = (path for path in disk.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(disk)): path.read_bytes() for path in files}


@pytest.mark.parametrize("action", [create, pull, freeze, export, pack, save, add, swap])
def test_a_command_on_a_full_disk_fails_with_one_line_and_changes_nothing(
    tmp_path: Path, action: Callable[[Place], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit, "_IN_MEMORY", 1 << 16)
    random = np.random.default_rng(1)
    tensors = {name: random.standard_normal(SHAPE).astype(np.float32) for name in NAMES}
    source, base = write_folder(tmp_path / "source", tensors), LocalStore(tmp_path / "base")
    blobstore.create(source, "m", store=base)
    (tmp_path / "remote").mkdir()
    blobstore.push("m", f"file://{tmp_path}/remote", store=base)
    with disks.in_memory(tmp_path / "disk", len(NAMES) * SIZE + SIZE // 2) as disk:
        place = Place(source, f"file://{tmp_path}/remote/m", disk)
        if action in (save, add, swap):
            save_file(tensors, disk / "file.safetensors")
        elif action is pull:
            (disk / "filler").write_bytes(bytes(SIZE))
        else:
            shutil.copytree(base.root, place.store.root)
        before = content(disk)
        with pytest.raises(BlobstoreError, match=r"(?i)no space left|not enough space") as caught:
            action(place)
        assert len(str(caught.value).splitlines()) == 1
        assert content(disk) == before


def test_a_disk_that_fills_while_a_file_is_downloaded_gets_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: np.ones(SHAPE, np.float32) for name in NAMES}
    data = (write_folder(tmp_path / "source", tensors) / "model.safetensors").read_bytes()
    space, free_space = iter([10 * SIZE]), LocalStore.free_space  # another program takes it
    monkeypatch.setattr(LocalStore, "free_space", lambda store: next(space, free_space(store)))
    with (
        disks.in_memory(tmp_path / "disk", 2 * SIZE) as disk,
        RawServer(lambda _: reply(200, data)) as server,
    ):
        store = LocalStore(disk / "store")
        with pytest.raises(StoreError, match=r"not enough space .* are needed, and .* are free"):
            blobstore.create(f"http://{server.host}/model.safetensors", "m", store=store)
        assert not list(store.folder("downloads").iterdir())
        assert shutil.disk_usage(disk).free > SIZE
