"""Export of original files with known digests, next to reading, hashing and writing the same files.

    python -m tests.benchmarks.export [--folder DIR]

Both use two threads and sync what they write. The model has four shards of 256 MiB, and its record has
their digests, as after an import from the Hub.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType, TensorSpec
from blobstore.manifests import media_types
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.benchmarks.common import GIB, arguments, rounds, table, timed, workspace
from tests.support.models import add_blob, with_layers, write_safetensors

SHARDS = 4
_BUFFER_SIZE = 4 << 20


def write_source(folder: Path, nbytes: int) -> None:
    """Write shards of matrices with random bytes."""
    folder.mkdir()
    rows = nbytes // SHARDS // 16 // 2048
    for shard in range(SHARDS):
        specs = [
            TensorSpec(f"layers.{shard}.{number}.weight", DType.BF16, (rows, 1024))
            for number in range(16)
        ]
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        write_safetensors(folder / name, specs, lambda _: [os.urandom(rows * 2048)])


def record_digests(store: LocalStore, source: Path) -> None:
    """Add the digests of the files to the record of model ``m``."""
    record = blobstore.show_source("m", store=store)
    assert record is not None
    digests = {}
    for path in source.iterdir():
        with path.open("rb") as file:
            digests[path.name] = Digest(hashlib.file_digest(file, "sha256").hexdigest())
    files = tuple(file._replace(sha256=digests[file.name]) for file in record.files)
    manifest = store.resolve("m")
    blob = add_blob(store, replace(record, files=files).to_bytes())
    layers = [
        layer._replace(digest=blob.digest, size=blob.size)
        if layer.media_type == media_types.SOURCE
        else layer
        for layer in manifest.layers
    ]
    store.names.publish(replace_any("m"), with_layers(store, manifest, layers))


def copy_with_digest(source: Path, target: Path) -> str:
    """Copy a file, sync it, and return its digest."""
    digester, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER_SIZE))
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        while count := read.readinto(buffer):
            digester.update(buffer[:count])
            write.write(buffer[:count])
        os.fsync(write.fileno())
    return digester.hexdigest()


def copy_all(source: Path, target: Path) -> None:
    """Copy the files of a folder on two threads."""
    target.mkdir()
    with ThreadPoolExecutor(2) as pool:
        paths = sorted(source.iterdir())
        list(pool.map(lambda path: copy_with_digest(path, target / path.name), paths))


def main() -> None:
    """Print the table."""
    options = arguments(__doc__)
    with workspace(options.folder) as scratch:
        source, out = scratch / "source", scratch / "out"
        nbytes = int(options.scale * GIB)
        write_source(source, nbytes)
        store = blobstore.LocalStore(scratch / "store")
        blobstore.create(source, "m", store=store)
        record_digests(store, source)

        def export(name: str) -> None:
            assert blobstore.export(name, out, store=store, jobs=2).is_original

        seconds = rounds(
            {
                "read, sha256, write": lambda: timed(partial(copy_all, source, out)),
                "blobstore export": lambda: timed(partial(export, "m")),
            },
            options.rounds,
            before=lambda: shutil.rmtree(out, ignore_errors=True),
        )
        table(seconds, "read, sha256, write", nbytes)


if __name__ == "__main__":
    main()
