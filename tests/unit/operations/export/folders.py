"""Models to write as folders, and what the tests look for in the folders."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.planning.grouping import ExpertForm
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import add_blobs, blob, with_layers

NAME = Reference.parse("m")
FORMS: list[ExpertForm] = ["packed", "stacked"]


def raw_tensors(*paths: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return type, shape and bytes of the tensors of files or folders, each of which must be new."""
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for file in (
        f for path in paths for f in (path.glob("*.safetensors") if path.is_dir() else [path])
    ):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                assert name not in found
                begin, end = entry["data_offsets"]
                found[name] = entry["dtype"], entry["shape"], data[start + begin : start + end]
    return found


def add_layers(store: LocalStore, *layers: tuple[str, str, bytes]) -> None:
    """Add layers (media type, name, content) to model ``m``, whose record of the source they do not fit."""
    added = []
    with store.ingest() as ingest:
        for media_type, name, content in layers:
            item = ingest.add(len(content), partial(list, [content]))
            added.append(
                Descriptor(media_type=media_type, digest=item.digest, size=item.size, name=name)
            )
        ingest.publish()
    remove_layers(store, media_types.SOURCE)
    manifest = store.resolve(NAME)
    store.names.publish(replace_any(NAME), with_layers(store, manifest, (*manifest.layers, *added)))


def remove_layers(store: LocalStore, media_type: str) -> None:
    """Remove the layers of a media type from model ``m``."""
    manifest = store.resolve(NAME)
    layers = [layer for layer in manifest.layers if layer.media_type != media_type]
    store.names.publish(replace_any(NAME), with_layers(store, manifest, layers))


def add_old_model(store: LocalStore) -> dict[str, bytes]:
    """Add model ``m`` of two blobs that call their tensor ``data``, as old Ollama did, and another."""
    tensors = {name: bytes([number]) * 30_000 for number, name in enumerate("abc")}
    names = {"a": "data", "b": "data", "c": "c"}
    add_blobs(
        store,
        "m",
        {name: blob((names[name], "U8", (30_000,), data)) for name, data in tensors.items()},
    )
    return tensors


def assert_holds(folder: Path, names: Iterable[str]) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
