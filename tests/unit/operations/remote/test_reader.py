"""Models elsewhere, read as from a store."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.objects.source import ObjectSource
from blobstore.operations.remote.reader import RemoteReader
from blobstore.operations.transfer.push_objects import push_objects
from blobstore.store.local import LocalStore
from tests.support import frozen


def test_a_request_to_stop_ends_the_requests_for_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    frozen.put(store, "m", {f"t{number}": number for number in range(40)})
    (tmp_path / "bucket").mkdir()
    push_objects("m", f"file://{tmp_path}/bucket", store=store)
    source = ObjectSource.find(f"file://{tmp_path}/bucket/m")
    stopped, asked = threading.Event(), list[Digest]()

    def read(digest: Digest, *_: int) -> Generator[memoryview, None, None]:
        """Wait for a server that does not answer."""
        asked.append(digest)
        monkeypatch.setattr(interrupts._State, "number", signal.SIGTERM)
        stopped.wait(60)
        yield memoryview(b"")

    monkeypatch.setattr(interrupts, "_thread", interrupts._Thread())
    monkeypatch.setattr(source, "headers", lambda: None)
    monkeypatch.setattr(source, "read", read)
    monkeypatch.setattr(source, "abort", stopped.set)
    reader = RemoteReader({source.address.reference: source})
    layers = source.manifest.layers_of(media_types.TENSOR)
    with pytest.raises(interrupts.Stopped):
        list(reader.read_headers([layer.id for layer in layers]))
    assert len(asked) < len(layers)
