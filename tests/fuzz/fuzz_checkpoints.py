"""Fuzz the PyTorch checkpoint reader: it may refuse an input, but not crash, hang or grow.

In an environment with this package and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_checkpoints.py

runs for five minutes, starting from the test data. Options of libFuzzer and folders with more
inputs may follow; new inputs are kept in the first folder. An input that fails is written to
``crash-*``, ``timeout-*`` or ``oom-*``, and is run again if it is given as the only argument.

The first byte of an input states what the rest is: a complete file, or the pickle of a zip archive,
of a compressed zip archive or of a legacy stream. The target adds the container, with valid checksums.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import zipfile
from pathlib import Path

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["blobstore"]):
    from blobstore.core import strict_json
    from blobstore.errors import CheckpointRefused, UnsupportedSource
    from blobstore.sources.pytorch.checkpoint import open_checkpoint
    from blobstore.unpickler import globals as known

from tests.fuzz.harness import run
from tests.support.checkpoints import FOLDER, VALUES, deflated_file, legacy_file, zip_file

STORAGES = {"0": VALUES * 16, "1": VALUES}
FORMS = (
    lambda data: data,
    lambda data: zip_file(data, STORAGES),
    lambda data: deflated_file(data, STORAGES),
    lambda data: legacy_file(data, {"0": VALUES * 16}),
)


def read_one(data: bytes, path: Path) -> None:
    """Read all tensors of an input, from a file."""
    if not data:
        return
    path.write_bytes(FORMS[data[0] % len(FORMS)](data[1:]))
    buffer = memoryview(bytearray(1 << 16))
    try:
        with open_checkpoint(path) as checkpoint:
            text = strict_json.dumps(checkpoint.values)
            assert strict_json.dumps(strict_json.loads(text.encode())) == text
            for name in checkpoint.specs:
                read = b"".join(map(bytes, checkpoint.read(name, buffer)))
                assert read == bytes(checkpoint.view(name).data), name
    except (CheckpointRefused, UnsupportedSource) as error:
        assert str(error).isprintable(), str(error)
        assert len(str(error)) < 4000, str(error)


def write_seeds(folder: Path) -> None:
    """Write the files of the test data, and their pickles, as inputs."""
    for path in FOLDER.glob("*.[pb]*"):
        (folder / path.name).write_bytes(b"\0" + path.read_bytes())
        if not zipfile.is_zipfile(path):
            continue
        with zipfile.ZipFile(path) as archive, contextlib.suppress(zipfile.BadZipFile):
            pickles = [item for item in archive.namelist() if item.endswith("data.pkl")]
            for index, item in enumerate(pickles):
                content = archive.open(item).read(1 << 20)
                form = bytes([1 + len(content) % 3])
                (folder / f"{path.name}-{index}").write_bytes(form + content)


def main() -> None:
    """Run libFuzzer; it ends the process."""
    names = {f"c{module}\n{name}\n" for module, name in known._USES}
    words = [*sorted(names), "storage", "X\7\0\0\0storage", "ctorch\nFloatStorage\n"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.pt")
        run(lambda data: read_one(data, file), write_seeds, words=words)


if __name__ == "__main__":
    main()
