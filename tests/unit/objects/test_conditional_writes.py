from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore.errors import Conflict
from blobstore.objects.address import StoreAddress
from blobstore.objects.conditional_writes import ConditionalClient
from blobstore.store.local import LocalStore
from tests.support.google import GoogleStorage, running_google_storage


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleStorage]:
    """Run a server whose ETags say nothing, as the user's account says."""
    with running_google_storage() as server:
        server.write_account(tmp_path / "account.json")
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
        monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
        yield server


@pytest.mark.usefixtures("google")
def test_names_in_google_storage_are_replaced_by_generation() -> None:
    client = ConditionalClient(StoreAddress("gs", "bucket", "prefix"))
    client.replace("name", b"first", None)
    first = client.get("name", 100)
    assert first is not None
    with pytest.raises(Conflict):
        client.replace("name", b"other", None)
    client.replace("name", b"second", first.tag)
    with pytest.raises(Conflict):
        client.replace("name", b"third", first.tag)
    second = client.get("name", 100)
    assert second is not None
    assert second.data == b"second"


@pytest.mark.usefixtures("google")
def test_a_model_is_pushed_to_google_storage_again_and_pulled(
    store: LocalStore, tmp_path: Path
) -> None:
    for value in range(2):
        blobstore.save({"x": np.full(1000, value)}, "m", store=store)
        pushed = blobstore.push("m", "gs://bucket/models", store=store)
        assert pushed.bytes_sent
    other = LocalStore(tmp_path / "other")
    blobstore.pull("gs://bucket/models/m", store=other)
    assert np.asarray(blobstore.open("m", store=other)["x"]).all()
    assert blobstore.gc_remote("gs://bucket/models", older_than=0, dry_run=True).removed
