"""Damage done to the files of a store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore


def blob_path(store: LocalStore, layer: str, name: str = "m") -> Path:
    """Return the file of a layer by its name, or of the config by an empty one."""
    manifest = store.resolve(Reference.parse(name))
    found = {item.name: item for item in manifest.layers} | {"": manifest.config}
    return Path(store.blob_path(found[layer].digest))


def index_file(store: LocalStore) -> Path:
    """Return the only header index of a store."""
    (path,) = store.folder("headers").iterdir()
    return path


def forge_index(store: LocalStore, change: Callable[[Any], object]) -> None:
    """Change the values of the only header index, and give it a correct checksum."""
    path = index_file(store)
    value = json.loads(path.read_bytes().partition(b"\n")[2])
    change(value)
    text = json.dumps(value).encode()
    checksum = Digest.of(f"3 sha256:{path.name}\n".encode() + text)
    path.write_bytes(f"{checksum}\n".encode() + text)


def forget_manifests(store: LocalStore, *names: str) -> None:
    """Remove manifests and their second links, by default all: names that the store does not know to be lost."""
    for name in map(Reference.parse, names) if names else list(store.references()):
        store.manifest_path(name).unlink()
        store.names.published.path(name).unlink(missing_ok=True)


def write_manifest(store: LocalStore, name: str, data: bytes) -> Path:
    """Write the manifest file of a model, valid or not."""
    path = store.manifest_path(Reference.parse(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def flip(path: Path, offset: int = -1) -> None:
    """Change one bit of a file, in place."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def flip_header(path: Path) -> None:
    """Change one bit of a safetensors header, or near the beginning of another file."""
    flip(path, min(12, path.stat().st_size - 1))


def truncate(path: Path) -> None:
    """Remove the last byte of a file."""
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    """Add a byte to a file."""
    path.chmod(0o644)
    with path.open("ab") as file:
        file.write(b"?")


def empty(path: Path) -> None:
    """Remove all bytes of a file, as a power cut can."""
    path.chmod(0o644)
    os.truncate(path, 0)


def link(path: Path) -> None:
    """Replace a file by a symbolic link to the same bytes."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES: tuple[Callable[[Path], object], ...] = (
    flip,
    flip_header,
    truncate,
    lengthen,
    empty,
    link,
    Path.unlink,
)
