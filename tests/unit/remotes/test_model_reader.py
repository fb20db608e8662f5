"""Remote models, read as from a store."""

from __future__ import annotations

import hashlib
import signal
import struct
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.objects.source import ObjectSource
from blobstore.operations.transfer.push import push_model
from blobstore.remotes.model_reader import RemoteReader, pack_headers, unpack_headers
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.samples import samples


@pytest.mark.slow
def test_a_request_to_stop_ends_the_requests_for_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    frozen.put(store, "m", {f"t{number}": number for number in range(40)})
    (tmp_path / "bucket").mkdir()
    push_model("m", f"file://{tmp_path}/bucket", store=store)
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


@pytest.mark.slow
@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
@settings(max_examples=samples(1000), deadline=None)
def test_packed_headers_of_any_bytes_give_none_that_are_longer_than_these(
    data: bytes, length: int
) -> None:
    wanted = [Digest.of(b"a"), Digest.of(b"b")]
    entry = bytes.fromhex(wanted[0].hex) + struct.pack("<Q", length)
    for packed in (data, entry + data, data + entry):
        assert unpack_headers(packed, wanted) == {}  # without the checksum
        found = unpack_headers(hashlib.sha256(packed).digest() + packed, wanted)
        assert found.keys() <= set(wanted)
        assert all(len(start) <= len(data) for start in found.values())


def test_packed_headers_come_back() -> None:
    starts = {Digest.of(b"a"): b"header", Digest.of(b"b"): b""}
    packed = pack_headers(starts)
    assert unpack_headers(packed, starts) == starts
    assert unpack_headers(packed, [Digest.of(b"a"), Digest.of(b"c")]) == {
        Digest.of(b"a"): b"header"
    }
    assert unpack_headers(None, starts) == {}
