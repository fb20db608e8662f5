"""Fuzz the source layer: it may be refused, but not crash, hang, grow or plan a file elsewhere.

In an environment with this package and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_source_records.py

runs for five minutes. Options of libFuzzer and folders with more inputs may follow; new inputs are kept
in the first folder. An input that fails is written to ``crash-*``, ``timeout-*`` or ``oom-*``, and is run
again if it is given as the only argument.

An input is two bytes with the size of the layer's JSON, the JSON, and the data that belongs into it. The
target compresses the data, so that the code behind the compression is reached. Then it plans the export of
a model that has the layer.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]
import zstandard

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["blobstore"]):
    from blobstore.errors import Damaged
    from blobstore.folders import original
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.source_record import SourceRecord
    from blobstore.models.contents import ModelContents
    from blobstore.models.source_layers import read_source_record
    from blobstore.operations.create.create import create
    from blobstore.operations.describe.show import check_options
    from blobstore.store.local import LocalStore

from tests.fuzz.harness import run
from tests.support.options import grouped

ROOT = Path(__file__).parents[2]

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"exclude": ["x*"]},
    "moe": {"experts": "stacked", "keep": ["*.txt"]},
    "ct-nvfp4": {},
    "mlx-mode": {},
}
"""Folders to import, with options of ``create``."""


def compose(data: bytes) -> bytes:
    """Return the layer that an input stands for; the input itself if it is not of that form."""
    end = 2 + int.from_bytes(data[:2], "little")
    try:
        value = json.loads(data[2:end])
        value["data"] = base64.b64encode(zstandard.compress(data[end:])).decode()
        return json.dumps(value).encode()
    except (ValueError, TypeError, RecursionError):
        return data


def decompose(layer: bytes) -> bytes:
    """Return the input for a layer."""
    value = json.loads(layer)
    content = zstandard.decompress(base64.b64decode(value.pop("data")))
    text = json.dumps(value).encode()
    return len(text).to_bytes(2, "little") + text + content


def read_one(data: bytes, models: list[tuple[LocalStore, Manifest]]) -> None:
    """Plan the export of each model as if it had the layer."""
    try:
        record = SourceRecord.from_bytes(compose(data))
        check_options(record)
    except Damaged as error:
        assert str(error).isprintable(), str(error)
        return
    for store, manifest in models:
        try:
            plan = original.plan_original(ModelContents(store, manifest, record=record))
        except Damaged as error:
            assert str(error).isprintable(), str(error)
            continue
        if plan is None:
            continue
        for name in (*plan.written, *plan.files, *(file.name for file in plan.weights)):
            assert not PurePosixPath(name).is_absolute(), name
            assert ".." not in PurePosixPath(name).parts, name
        names = [tensor.spec.name for tensor in plan.tensors]
        assert len(set(names)) == len(names), names
        for tensor in plan.tensors:
            found = {
                (entry.spec.name, entry.spec.dtype): entry.end - entry.begin
                for entry in tensor.header.tensors.values()
            }
            own = found.get((tensor.spec.name, tensor.spec.dtype))
            assert own in (None, tensor.spec.nbytes), tensor.spec  # None if renamed or in a stack
            assert tensor.begin + tensor.spec.nbytes <= tensor.layer.size, tensor.spec
        sizes = {file.name: file.size for file in record.files}
        for file in plan.weights:
            assert all(offset <= sizes[file.name] for offset in file.offsets.values()), file.name


def write_seeds(folder: Path, models: list[tuple[LocalStore, Manifest]]) -> None:
    """Write the records of models."""
    for (store, manifest), name in zip(models, MODELS, strict=True):
        record = read_source_record(store, manifest)
        assert record is not None
        (folder / name).write_bytes(decompose(record.to_bytes()))


def main() -> None:
    """Run libFuzzer; it ends the process."""
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder, "store"))
        for name, options in MODELS.items():
            create(
                ROOT / "tests" / "data" / "ollama" / "hf" / name,
                name,
                store=store,
                **grouped(options),
            )
        models = [(store, store.resolve(name)) for name in MODELS]
        run(lambda data: read_one(data, models), lambda seeds: write_seeds(seeds, models))


if __name__ == "__main__":
    main()
