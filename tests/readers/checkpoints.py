"""A process that reads checkpoints with limited memory; see ``tests.support.checkpoints.Reader``."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

from blobstore.core.tensor import TensorSpec
from blobstore.errors import CheckpointRefused, UnsupportedSource
from blobstore.sources.pytorch.checkpoint import Checkpoint, open_checkpoint
from blobstore.sources.pytorch.inspect import inspect_checkpoint


def serve() -> None:
    """Answer requests, one per line, until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _limit(request["memory"])
            answer = (_inspect if request["inspect"] else _read)(
                request["path"], request["subtree"]
            )
        except Exception as error:  # noqa: BLE001 - the tests look for any other kind
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        _limit(None)
        print(json.dumps(answer), flush=True)  # noqa: T201 - this is the answer


def _limit(memory: int | None) -> None:
    """Let this process allocate ``memory`` more bytes; None lifts the limit."""
    status = Path("/proc/self/statm")
    if status.exists():  # elsewhere the current size is unknown
        pages = int(status.read_bytes().split()[0])
        limit = (
            resource.RLIM_INFINITY if memory is None else pages * resource.getpagesize() + memory
        )
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _read(path: str, subtree: str | None) -> dict[str, Any]:
    try:
        with open_checkpoint(path, subtree=subtree) as checkpoint:
            specs = checkpoint.specs.values()
            return {
                "tensors": {spec.name: _tensor(checkpoint, spec) for spec in specs},
                "unreadable": list(checkpoint.unreadable),
            }
    except (CheckpointRefused, UnsupportedSource) as error:
        return {"refusal": str(error)}


def _inspect(path: str, subtree: str | None) -> dict[str, Any]:
    found = inspect_checkpoint(path, subtree=subtree)
    return {
        "refusal": found.refusal or "",
        "unreadable": list(found.unreadable),
        "globals": [item.name for item in found.globals],
    }


def _tensor(checkpoint: Checkpoint, spec: TensorSpec) -> list[Any]:
    """Return type, shape and digest of a tensor; both ways to read it must agree."""
    buffer = memoryview(bytearray(1 << 16))
    digest = hashlib.sha256()
    for piece in checkpoint.read(spec.name, buffer):
        digest.update(piece)
    assert hashlib.sha256(checkpoint.view(spec.name).data).digest() == digest.digest()
    return [spec.dtype.value, list(spec.shape), digest.hexdigest()]


if __name__ == "__main__":
    serve()
