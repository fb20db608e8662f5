"""Compressed transfers that are killed, and what compressed transfers cost on the wire."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import blobstore
from blobstore.store.local import LocalStore
from tests.faults.pushes import Proxy
from tests.support.cold import cold
from tests.support.cold_registry import ColdCase
from tests.support.frozen import layer, mixed_steps, put, tuned
from tests.support.models import add_blobs
from tests.support.registry import Server
from tests.support.serve_process import serving
from tests.support.stub_registry import StubRegistry

COUNT = 400_000
"""Elements per blob."""
LIMIT = 120
"""Seconds until a command hangs."""
NAMES = "abcdef"


class Meter(Proxy):
    """Passes connections on to a registry; counts the bytes of both directions."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.returned = 0
        self.most = math.inf
        """Bytes that are returned; more are held until there may be more."""

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(2**14):
                with self._lock:
                    self.returned += len(data)
                while self.returned > self.most:
                    time.sleep(0.001)
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def meter(server: Server) -> Iterator[Meter]:
    with Meter(server.host) as proxy:
        yield proxy


def put_base(store: LocalStore) -> None:
    put(store, "base", {name: number for number, name in enumerate(NAMES)}, count=COUNT)


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    """A store with a base model and a fine-tune."""
    store = LocalStore(tmp_path / "origin")
    put_base(store)
    add_tune(store)
    return store


def add_tune(store: LocalStore) -> None:
    blobs = {
        name: layer(name, tuned(10 + number, number, COUNT, step=1e-3))
        for number, name in enumerate(NAMES)
    }
    add_blobs(store, "tune", blobs)


@pytest.fixture
def target(tmp_path: Path) -> LocalStore:
    """A store that has the base."""
    store = LocalStore(tmp_path / "target")
    put_base(store)
    return store


def repository(remote: str) -> str:
    return remote.partition("/")[2]


def assert_equal(store: LocalStore, origin: LocalStore) -> None:
    assert store.read_manifest("tune") == origin.read_manifest("tune")
    for blob in store.resolve("tune").blobs:
        store.check_digest(*blob.id)


def frozen_size(origin: LocalStore, folder: Path) -> int:
    """Return the bytes of the model, frozen against its base, in a store of its own."""
    store = LocalStore(folder)
    put_base(store)
    add_tune(store)
    blobstore.freeze("tune", base="base", store=store)
    paths = [
        store.cold_path(blob.digest) if store.is_cold(blob.digest) else store.blob_path(blob.digest)
        for blob in store.resolve("tune").blobs
    ]
    return sum(Path(path).stat().st_size for path in paths)


def test_a_fine_tune_costs_its_cold_size_on_the_wire(
    origin: LocalStore, target: LocalStore, remote: str, meter: Meter, tmp_path: Path
) -> None:
    blobstore.push("tune", remote, store=origin, cold=True, base="base")
    blobstore.pull(f"{meter.host}/{repository(remote)}", "tune", store=target)
    assert_equal(target, origin)
    size = frozen_size(origin, tmp_path / "frozen")
    assert size < 0.7 * sum(blob.size for blob in origin.resolve("tune").blobs)
    assert meter.returned <= 1.01 * size


def command(*arguments: object) -> subprocess.Popen[bytes]:
    call = [sys.executable, "-m", "blobstore", *map(str, arguments)]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def killed_when(process: subprocess.Popen[bytes], is_time: Callable[[], bool]) -> bool:
    """Kill a command at the first instant at which something is the case; return whether it came."""
    while process.poll() is None and not is_time():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode in (0, -signal.SIGKILL), output
    return process.returncode != 0


@pytest.mark.parametrize("scheme", ["oci", "http"])
def test_opening_a_step_costs_its_delta_on_the_wire(
    tmp_path: Path, origin: LocalStore, target: LocalStore, remote: str, scheme: str
) -> None:
    """Also if the base was frozen here, so that its chunks lie elsewhere than those of the delta."""
    for name, data in zip(("first", "one", "two"), mixed_steps(), strict=True):
        add_blobs(origin, name, {"x": data})
        if name != "two":
            add_blobs(target, name, {"x": data})
    blobstore.freeze("one", base="first", store=target)
    with contextlib.ExitStack() as running:
        host, _, path = remote.partition("/")
        if scheme == "oci":
            blobstore.push("two", remote, store=origin, cold=True, base="one")
        else:
            blobstore.freeze("two", base="one", store=origin)
            host, path = running.enter_context(serving(origin, tmp_path)).host, "two"
        meter = running.enter_context(Meter(host))
        address = f"{scheme}://{meter.host}/{path}"
        with blobstore.open(address, store=target, cache="none", framework="numpy") as model:
            before = meter.returned
            found = {name: array.tobytes() for name, array in model.tensors().items()}
            fetched = meter.returned - before
    with blobstore.open("two", store=origin, framework="numpy") as expected:
        assert found == {name: array.tobytes() for name, array in expected.tensors().items()}
    (layer,) = origin.resolve("two").layers
    blobstore.freeze("two", base="one", store=origin)
    assert fetched < Path(origin.cold_path(layer.digest)).stat().st_size + 1000 < 0.02 * layer.size


def test_a_killed_push_sends_only_the_rest(
    origin: LocalStore, target: LocalStore, remote: str, meter: Meter
) -> None:
    through = f"{meter.host}/{repository(remote)}"
    arguments = ("push", "tune", through, "--cold", "--base", "base", "--store", origin.root)
    meter.pause = 0.001
    size = sum(blob.size for blob in origin.resolve("tune").blobs)
    kills = 0
    for share in (0.5, 1.05, 1.1, 1.2):
        before = size * share
        kills += killed_when(command(*arguments), lambda: meter.received >= before)  # noqa: B023
    assert kills >= 2
    pushed = blobstore.push("tune", through, store=origin, cold=True, base="base", verify=True)
    assert pushed.cold_blobs == len(NAMES)
    pulled = blobstore.pull(remote, "tune", store=target)
    assert_equal(target, origin)
    assert (
        pulled.bytes_saved == sum(b.size for b in origin.resolve("tune").layers) - pushed.bytes_cold
    )


def test_a_push_that_ends_before_the_list_sends_no_form_again(
    origin: LocalStore, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            "blobstore.operations.transfer.registry_target.send_cold_manifests", interrupt
        )
        blobstore.push("tune", remote, store=origin, cold=True, base="base")
    assert not list(origin.folder("temporary").iterdir())
    pushed = blobstore.push("tune", remote, store=origin, cold=True, base="base")
    assert (pushed.bytes_sent, pushed.cold_blobs) == (0, len(NAMES))


def test_a_killed_pull_leaves_no_name_and_goes_on(
    origin: LocalStore, target: LocalStore, remote: str, meter: Meter
) -> None:
    pushed = blobstore.push("tune", remote, store=origin, cold=True, base="base")
    through = f"{meter.host}/{repository(remote)}"
    for share in (0.2, 0.5, 0.8, 0.95):
        meter.most = pushed.bytes_cold * share
        process = command("pull", through, "tune", "--store", target.root)
        assert killed_when(process, lambda: meter.returned > meter.most)
        assert not target.has_model("tune")
    meter.most = math.inf
    blobstore.pull(through, "tune", store=target)
    assert_equal(target, origin)
    assert not list(target.folder("partial").glob("*"))


def test_forms_that_were_decoded_before_a_kill_are_not_fetched_again(tmp_path: Path) -> None:
    goes_on = threading.Event()
    with StubRegistry() as registry:
        case = ColdCase(tmp_path, registry)
        form = case.form(case.layers["x"], cold(case.data("x")))
        case.offer(form)
        other = str(case.layers["y"].digest)

        def wait(digest: str, _: int, data: bytes) -> bytes:
            if digest == other:
                goes_on.wait(LIMIT)
            return data

        def is_decoded() -> bool:
            for path in case.store.folder("temporary").glob("*"):
                with contextlib.suppress(FileNotFoundError):  # it is gone by now
                    if path.stat().st_size == case.layers["x"].size:
                        return True
            return False

        registry.alter = wait
        process = command("pull", case.remote, "tune", "--store", case.store.root)
        assert killed_when(process, is_decoded)
        goes_on.set()
        blobstore.pull(case.remote, "tune", store=case.store)
        assert_equal(case.store, case.origin)
        assert case.sent(form) == [form["size"]]
        assert not list(case.store.folder("partial").iterdir())


def test_memory_stays_flat(tmp_path: Path, remote: str) -> None:
    origin, target = LocalStore(tmp_path / "origin"), LocalStore(tmp_path / "target")
    size = 2**25
    for store in (origin, target):
        put(store, "base", {"a": 1}, count=size // 2)
    add_blobs(origin, "tune", {"a": layer("a", tuned(2, 1, size // 2))})
    tracemalloc.start()
    try:
        blobstore.push("tune", remote, store=origin, cold=True, base="base")
        blobstore.pull(remote, "tune", store=target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert_equal(target, origin)
    assert peak < size
