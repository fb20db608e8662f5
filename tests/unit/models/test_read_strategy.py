from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.core.mounts import FileSystem
from blobstore.errors import BlobDamaged, UsageError
from blobstore.manifests.descriptor import Descriptor
from blobstore.models import read_strategy
from blobstore.models.read_strategy import Read, ReadFacts, choose
from blobstore.store.local import LocalStore
from tests.support import fuse_mount
from tests.support.damage import flip
from tests.support.fuse_mount import Mounted
from tests.support.gguf_files import gguf_file
from tests.support.models import write_folder
from tests.support.page_cache import dropped

MIB = 1 << 20
EXT4, NFS = FileSystem("ext4"), FileSystem("nfs4", is_remote=True)
TMPFS = FileSystem("tmpfs", is_memory=True)
TENSORS = {
    f"layer.{number}.weight": np.random.default_rng(number).integers(
        0, 2**31, (3, MIB // 4), np.int32
    )
    for number in range(8)
}

needs_fuse = pytest.mark.skipif(
    bool(fuse_mount.why_not()), reason=fuse_mount.why_not() or "FUSE is there"
)


@pytest.mark.parametrize(
    ("facts", "how", "reason"),
    [
        ({"file_system": EXT4}, "mmap", "ext4 is local, and not all tensors are wanted yet"),
        (
            {"file_system": EXT4, "is_cached": True},
            "mmap",
            "the blobs on ext4 are in the page cache",
        ),
        (
            {"file_system": EXT4, "is_cached": False, "available": 9},
            "populate",
            "ext4 is local, and the page cache lacks blobs",
        ),
        (
            {"file_system": EXT4, "is_cached": False, "available": 8},
            "mmap",
            "memory is too small for all that lies on ext4",
        ),
        ({"file_system": TMPFS, "is_cached": False}, "mmap", "tmpfs is memory"),
        (
            {"file_system": NFS, "available": 9},
            "pread",
            "maps are slow on nfs4, so large requests are made of it",
        ),
        (
            {"file_system": NFS, "available": 8},
            "mmap",
            "memory is too small for a copy of what lies on nfs4",
        ),
        (
            {"file_system": NFS, "available": 17, "ranks": 2},
            "mmap",
            "memory is too small for 2 copies of what lies on nfs4",
        ),
        ({"file_system": NFS, "available": 18, "ranks": 2}, "pread", "maps are slow"),
        ({"file_system": FileSystem("")}, "mmap", "an unknown file system is local"),
    ],
)
def test_chooses_by_the_facts(facts: dict[str, Any], how: str, reason: str) -> None:
    chosen = choose(ReadFacts(size=9, **facts))
    assert chosen.how == how
    assert chosen.reason.startswith(reason)


def make_store(folder: Path) -> LocalStore:
    store = LocalStore(folder / "store")
    blobstore.create(write_folder(folder / "model", TENSORS), "m", store=store)
    return store


# Local


@pytest.fixture
def cold(disk_path: Path) -> LocalStore:
    """Return a store whose blobs are not in the page cache."""
    store = make_store(disk_path)
    if not all(dropped(path) for path in store.folder("blobs").iterdir()):
        pytest.skip("the file system keeps its files in memory")
    return store


def cached(store: LocalStore) -> list[bool]:
    layers = store.resolve("m").layers
    return [store.is_cached(layer.digest, layer.size) for layer in layers if layer.size > MIB]


def wait_for_population() -> None:
    for thread in threading.enumerate():
        if thread.name == "blobstore-populate":
            thread.join()


@pytest.mark.parametrize("whole", ["state_dict", "iter_tensors", "tensors"])
def test_all_of_a_local_model_is_populated_in_the_background(cold: LocalStore, whole: str) -> None:
    with blobstore.open("m", store=cold) as model:
        assert model.reading.how == "mmap"
        found = getattr(model, whole)()
        kept = next(found) if whole == "iter_tensors" else found
    wait_for_population()
    assert all(cached(cold))
    del kept


def test_what_is_not_in_the_page_cache_is_hashed_while_it_is_populated(cold: LocalStore) -> None:
    with blobstore.open("m", store=cold, verify="digest") as model:
        assert all(cached(cold))
        np.testing.assert_array_equal(model["layer.7.weight"], TENSORS["layer.7.weight"])
    for layer in tensor_layers(cold.root):
        path = Path(cold.blob_path(layer.digest))
        flip(path)
        assert dropped(path)
        with pytest.raises(BlobDamaged, match=f"^m:latest: layer '{layer.name}': blob "):
            blobstore.open("m", store=cold, verify="digest")
        flip(path)


def test_one_tensor_reads_no_other_blob(cold: LocalStore) -> None:
    with blobstore.open("m", store=cold) as model:
        assert not any(cached(cold))
        model["layer.3.weight"].sum()
    wait_for_population()
    assert cached(cold) == [number == 3 for number in range(8)]


def test_tensors_in_order_are_read_ahead(cold: LocalStore) -> None:
    with blobstore.open("m", store=cold) as model:
        assert all(model[f"layer.{number}.weight"] is not None for number in (2, 3, 4))
        wait_for_population()
        assert cached(cold) == [number > 4 for number in range(8)]


@pytest.mark.parametrize("memory", [0, 1 << 40])
def test_what_memory_is_too_small_for_is_not_populated(
    cold: LocalStore, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_strategy, "available_memory", lambda: memory)
    with blobstore.open("m", store=cold) as model:
        assert model.read_ahead().how == ("populate" if memory else "mmap")


def test_nothing_is_populated_that_is_in_the_page_cache(disk_path: Path) -> None:
    store = make_store(disk_path)
    for path in store.folder("blobs").iterdir():
        path.read_bytes()
    with blobstore.open("m", store=store) as model:
        assert model.read_ahead().how == "mmap"


def test_an_unknown_way_is_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with pytest.raises(UsageError, match="read must be auto, mmap, populate or pread, got 'copy'"):
        blobstore.open("m", store=store, read="copy")  # type: ignore[call-overload]


# Through FUSE, as on a network


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store, with a GGUF file in it, too."""
    store = make_store(tmp_path_factory.mktemp("shown"))
    tensors = [(name, 26, [MIB // 4, 3], array.tobytes()) for name, array in TENSORS.items()]
    (store.root / "file.gguf").write_bytes(gguf_file([], tensors))
    return store.root


@pytest.fixture
def remote(shown: Path, tmp_path: Path) -> Iterator[Mounted]:
    (tmp_path / "mount").mkdir()
    with fuse_mount.mounted(shown, tmp_path / "mount") as found:
        yield found


@needs_fuse
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("whole", ["state_dict", "iter_tensors", "items"])
def test_a_remote_model_is_copied_by_large_requests_once(
    remote: Mounted, framework: Any, whole: str
) -> None:
    with blobstore.open("m", store=LocalStore(remote.path), framework=framework) as model:
        assert model.reading.how == "pread"
        assert remote.bytes_read < MIB
        found = dict(getattr(model, whole)())
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(found[name], array)
    size = sum(array.nbytes for array in TENSORS.values())
    assert size <= remote.bytes_read < size + MIB
    assert remote.bytes_read / remote.requests > 64 << 10


@needs_fuse
@pytest.mark.parametrize("name", ["m", "file.gguf"])
def test_opening_a_remote_model_and_one_tensor_reads_little_more_than_that(
    remote: Mounted, name: str
) -> None:
    subject = str(remote.path / name) if name == "file.gguf" else name
    with blobstore.open(subject, store=LocalStore(remote.path)) as model:
        array = model["layer.3.weight"]
    np.testing.assert_array_equal(array, TENSORS["layer.3.weight"])
    assert array.nbytes <= remote.bytes_read <= array.nbytes + 8 * MIB


@needs_fuse
def test_a_rank_reads_its_slices_alone(remote: Mounted) -> None:
    with blobstore.open("m", store=LocalStore(remote.path)) as model:
        parts = list(model.read_parts([(name, np.s_[1:2]) for name in TENSORS]))
    for array, part in zip(TENSORS.values(), parts, strict=True):
        np.testing.assert_array_equal(part, array[1:2])
    assert sum(part.nbytes for part in parts) <= remote.bytes_read < 12 * MIB


@pytest.fixture
def damaged(shown: Path, remote: Mounted) -> Iterator[Mounted]:
    """Flip a bit in the last blob of a tensor."""
    path = Path(LocalStore(shown).blob_path(tensor_layers(shown)[-1].digest))
    flip(path)
    yield remote
    flip(path)


def tensor_layers(root: Path) -> list[Descriptor]:
    return [layer for layer in LocalStore(root).resolve("m").layers if layer.size > MIB]


@needs_fuse
@pytest.mark.parametrize("read", ["auto", "pread"])
def test_a_remote_model_is_hashed_by_what_reads_it(remote: Mounted, read: Any) -> None:
    store = LocalStore(remote.path)
    with blobstore.open("m", store=store, verify="digest", read=read) as model:
        found = model.state_dict()
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(found[name], array)
    size = sum(array.nbytes for array in TENSORS.values())
    assert size <= remote.bytes_read < size + MIB


@needs_fuse
def test_a_blob_of_a_remote_model_is_hashed_before_its_first_use(damaged: Mounted) -> None:
    last = f"m:latest: layer '{list(TENSORS)[-1]}': blob .* its bytes have digest"
    with blobstore.open("m", store=LocalStore(damaged.path), verify="digest") as model:
        np.testing.assert_array_equal(model["layer.3.weight"], TENSORS["layer.3.weight"])
        for use in (
            lambda: model["layer.7.weight"],
            lambda: model["layer.7.weight"],  # nor later
            lambda: model.view("layer.7.weight"),
            lambda: model.get_slice("layer.7.weight")[:1],
            lambda: list(model.read_parts([("layer.7.weight", 0)])),
            lambda: dict(model.iter_tensors()),
            model.state_dict,
        ):
            with pytest.raises(BlobDamaged, match=last):
                use()
    with pytest.raises(BlobDamaged, match=last):
        blobstore.open("m", store=LocalStore(damaged.path), verify="digest", read="pread")


@needs_fuse
def test_a_map_that_was_asked_for_stays_one(remote: Mounted) -> None:
    reads: list[Read] = ["mmap", "populate"]
    for read in reads:
        with blobstore.open("m", store=LocalStore(remote.path), read=read) as model:
            assert model.reading == (read, "it was asked for")


@needs_fuse
def test_processes_of_a_machine_read_once(remote: Mounted) -> None:
    code = (
        "import sys, blobstore\n"
        "with blobstore.open('m', store=sys.argv[1]) as model:\n"
        "    print(model.reading.how, sum(int(array[0, 0]) for array in model.state_dict().values()))"
    )
    command = [sys.executable, "-c", code, str(remote.path)]
    loads = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    total = sum(int(array[0, 0]) for array in TENSORS.values())
    for load in loads:
        assert load.communicate()[0] == f"pread {total}\n"
    size = sum(array.nbytes for array in TENSORS.values())
    assert size <= remote.bytes_read < size + MIB
