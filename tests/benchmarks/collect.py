"""Garbage collection of 1,000 models of 300 layers each, compared with listing and reading the files.

No blob is shared, and one model in ten has no name any more. The limit is the work of any collector:
list the blobs, read all manifests as JSON, and remove the same files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import Manifest, ModelConfig
from blobstore.manifests.reference import Reference
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.store.local import LocalStore
from tests.benchmarks.common import arguments, rounds, table, timed, workspace

_MODELS, _LAYERS, _UNNAMED = 1000, 300, 10


def fill(store: LocalStore, models: int) -> None:
    """Give a store models of tiny blobs, the last tenth without a name."""
    for folder in (store.folder("blobs"), store.folder("temporary")):
        folder.mkdir(parents=True, exist_ok=True)
    for model in range(models):
        digests = [Digest(f"{model * 1000 + layer:064x}") for layer in range(_LAYERS)]
        for digest in digests:
            with open(store.blob_path(digest), "wb") as file:  # noqa: PTH123 - a text
                file.write(b"x")
        if model % _UNNAMED:
            layers = [
                Descriptor(
                    media_type=media_types.TENSOR, digest=digest, size=1, name=f"l{number}.weight"
                )
                for number, digest in enumerate(digests)
            ]
            content = ModelConfig(layers_digest=layers_digest(layers)).to_bytes()
            digest = Digest.of(content)
            Path(store.blob_path(digest)).write_bytes(content)
            config = Descriptor(media_type=media_types.CONFIG, digest=digest, size=len(content))
            path = store.manifest_path(Reference.parse(f"m{model}"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(Manifest(config=config, layers=tuple(layers)).to_bytes())


def limit(store: LocalStore) -> object:
    """Find and remove garbage without locks, as a simple script would."""
    reached: set[str] = set()
    for path in store.folder("manifests").rglob("latest"):
        manifest = json.loads(path.read_bytes())
        blobs = [manifest["config"], *manifest["layers"]]
        reached.update(blob["digest"].replace(":", "-") for blob in blobs)
    garbage = [path for path in store.folder("blobs").iterdir() if path.name not in reached]
    for path in garbage:
        path.stat()
        path.unlink()
    return len(garbage)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__)
    models = int(_MODELS * options.scale)
    with workspace(options.folder) as folder:

        def case(number: int) -> LocalStore:
            return LocalStore(folder / f"store{number}")

        def collect(number: int) -> float:
            store = case(number)
            fill(store, models)
            work = (
                (lambda: collect_garbage(store=store, older_than=0, force=True)) if number else None
            )
            taken = timed(work or (lambda: limit(store)))
            shutil.rmtree(store.root)
            return taken

        print(f"{models:,} models of {_LAYERS} layers, {models // _UNNAMED:,} without a name\n")
        cases = {"a script without locks": lambda: collect(0), "gc": lambda: collect(1)}
        table(rounds(cases, options.rounds), "a script without locks")


if __name__ == "__main__":
    main()
