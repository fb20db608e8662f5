"""A process that reads checkpoints, one line a file, within bounds on memory; see ``checkpoints``."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.errors import CheckpointRefused
from blobstore.sources.pytorch.checkpoint import Checkpoint, open_checkpoint
from blobstore.sources.pytorch.inspect import inspect_checkpoint

if TYPE_CHECKING:
    from blobstore.core.tensor import TensorSpec


def serve() -> None:
    """Answer requests until there are no more."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _limit(request["room"])
            answer = (_inspect if request["inspect"] else _read)(
                request["path"], request["subtree"]
            )
        except Exception as error:  # noqa: BLE001 - any other kind is what the tests look for
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        _limit(None)
        print(json.dumps(answer), flush=True)  # noqa: T201 - this is the answer


def _limit(room: int | None) -> None:
    """Let this process take ``room`` bytes more than it has; None lifts the limit."""
    status = Path("/proc/self/statm")
    if status.exists():  # elsewhere nothing says how much it has
        pages = int(status.read_bytes().split()[0])
        limit = resource.RLIM_INFINITY if room is None else pages * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _read(path: str, subtree: str | None) -> dict[str, Any]:
    try:
        with open_checkpoint(path, subtree=subtree) as checkpoint:
            specs = checkpoint.specs.values()
            return {
                "tensors": {spec.name: _tensor(checkpoint, spec) for spec in specs},
                "unreadable": list(checkpoint.unreadable),
            }
    except CheckpointRefused as error:
        return {"refusal": str(error)}


def _inspect(path: str, subtree: str | None) -> dict[str, Any]:
    found = inspect_checkpoint(path, subtree=subtree)
    return {
        "refusal": found.refusal or "",
        "unreadable": list(found.unreadable),
        "globals": [item.name for item in found.globals],
    }


def _tensor(checkpoint: Checkpoint, spec: TensorSpec) -> list[Any]:
    """Return type, shape and digest of a tensor, of which both ways to read it must give the same."""
    buffer = memoryview(bytearray(1 << 16))
    digest = hashlib.sha256()
    for piece in checkpoint.read(spec.name, buffer):
        digest.update(piece)
    assert hashlib.sha256(checkpoint.view(spec.name).data).digest() == digest.digest()
    return [spec.dtype.value, list(spec.shape), digest.hexdigest()]


if __name__ == "__main__":
    serve()
