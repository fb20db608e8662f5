"""What a server says of its store and its disk, without waiting for them."""

from __future__ import annotations

import re
import shutil
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.serve import store_sizes
from blobstore.serve.start import start_server
from blobstore.serve.store_sizes import StoreSizes
from blobstore.store.layout import Folder
from blobstore.store.local import LocalStore
from tests.support.models import write_folder

FOLDERS: tuple[Folder, ...] = ("blobs", "cold")


def numbers(text: str) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in re.findall(r"^blobstore_(\w+) (\S+)$", text, re.MULTILINE)
    }


def test_blobs_are_counted_and_the_disk_is_measured(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(total=10**12, free=10**11)
    disk = {"disk_size_bytes": 10**12, "disk_free_bytes": 10**11}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    sizes, now = StoreSizes(store), [1000.0]
    monkeypatch.setattr(store_sizes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert sizes.text() == ""
    sizes.measure()
    empty = {"store_blobs": 0, "store_cold_blobs": 0, "store_bytes": 0}
    assert numbers(sizes.text()) == {**disk, **empty}
    weight = np.random.default_rng(0).integers(0, 9, (256, 256)).astype(np.float32)  # compressible
    create(write_folder(tmp_path / "source", {"weight": weight}), "model", store=store)
    freeze_models(["model"], store=store, keep_hot=True)
    sizes.measure()
    assert numbers(sizes.text())["store_blobs"] == 0, "they are counted from time to time"
    now[0] += 1000
    sizes.measure()
    blobs, cold = (list(store.folder(name).iterdir()) for name in FOLDERS)
    assert len(cold) > 0
    assert numbers(sizes.text()) == {
        **disk,
        "store_blobs": len(blobs),
        "store_cold_blobs": len(cold),
        "store_bytes": sum(one.stat().st_size for one in (*blobs, *cold)),
    }


def test_metrics_do_not_wait_for_a_disk(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")
    is_asked, is_over, asking = threading.Event(), threading.Event(), list[str]()

    def hang(_: object) -> Any:
        asking.append(threading.current_thread().name)
        is_asked.set()
        is_over.wait()
        return 100, 93, 7

    def metrics(url: str) -> dict[str, float]:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            return numbers(response.read().decode())

    monkeypatch.setattr(shutil, "disk_usage", hang)
    with start_server(store=store) as server:
        try:
            is_asked.wait()
            assert "disk_free_bytes" not in metrics(server.url)
            assert metrics(server.url)["open_requests"] == 1
        finally:
            is_over.set()
        while "disk_free_bytes" not in metrics(server.url):
            time.sleep(0.01)
    assert "blobstore-server" not in asking
