from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.errors import UsageError
from blobstore.operations.transfer.registry_target import (
    RegistryOptions,
    check_options,
    check_unused,
)
from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.options import grouped


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "origin")
    put(store, "m", {"a": 1, "b": 2})
    return store


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RegistryOptions(mount_from=("a/b",), mount=False), "mount_from cannot be combined"),
        (RegistryOptions(part_size=0), "at least 1 byte, got 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: RegistryOptions, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_options(options)
    check_options(RegistryOptions())


@pytest.mark.parametrize(
    "option",
    [
        {"layout": "image"},
        {"max_layers": 3},
        {"mount_from": ["team/model"]},
        {"mount": False},
        {"part_size": 10**6},
        {"sign_key": "key.pem"},
        {"plain_http": True},
    ],
    ids=lambda option: str(*option),
)
def test_object_storage_refuses_options_of_registries(
    origin: LocalStore, tmp_path: Path, option: dict[str, Any]
) -> None:
    address = f"file://{tmp_path}/objects"
    (name,) = option
    with pytest.raises(UsageError, match=f"^{name} is for registries, and .* is object storage$"):
        blobstore.push("m", address, store=origin, **grouped(option))
    assert not (tmp_path / "objects").exists()


def test_object_storage_accepts_the_defaults_of_these_options(
    origin: LocalStore, tmp_path: Path
) -> None:
    check_unused(RegistryOptions(passphrase=lambda: b""), "s3://bucket")
    address = f"file://{tmp_path}/objects"
    assert blobstore.push(
        "m", address, store=origin, registry=RegistryOptions(mount_from=())
    ).bytes_sent
