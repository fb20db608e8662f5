"""Starts the inference server that is installed, for a program: ``blobstore run`` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from blobstore import errors
from blobstore.core import interrupts
from blobstore.core.arguments import one_or_more
from blobstore.errors import BlobstoreError
from blobstore.manifests.reference import Reference
from blobstore.serve.start import RunningServer
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Iterable

_SECONDS = 600.0
_END_SECONDS = 30.0
"""Seconds that a server may take to end before it is killed."""


def run_model(
    reference: str | Reference,
    arguments: str | Iterable[str] = (),
    *,
    store: StoreLike = None,
    server: str | None = None,
    timeout: float = _SECONDS,
) -> RunningServer:
    """Start an inference server with a model, as ``blobstore run`` does, and return once its port is open.

    Args:
        reference: the model.
        arguments: more words for the server, such as ``["--port", "9000"]``.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        server: ``vllm``, ``mlx-lm``, ``transformers`` or ``llama.cpp``; by default the first that is installed.
        timeout: seconds until the port must be open.

    Returns:
        the server, with its ``url``; it ends with ``close()``.

    Raises:
        ModelNotFound: the store has no such model.
        MissingLibrary: no server is installed that can serve it.
        UsageError: the model generates no text, or the server cannot read it.
        BlobstoreError: the server has ended, or does not open its port in time.
    """
    root = str(LocalStore.of(store).root)
    command = [
        sys.executable,
        "-P",  # the working directory may be a stranger's model
        "-m",
        "blobstore",
        "run",
        str(Reference.of(reference)),
        "--store",
        root,
    ]
    command += [] if server is None else ["--with", server]
    rest = ["--", *one_or_more(arguments)]
    planned = subprocess.run(
        [*command, "--dry-run", "--json", *rest], capture_output=True, check=False
    )
    found = json.loads(planned.stdout or "{}")
    if planned.returncode or "address" not in found:
        error = found.get("error", {"kind": "BlobstoreError", "message": planned.stderr.decode()})
        raise getattr(errors, error["kind"], BlobstoreError)(error["message"])
    process = subprocess.Popen([*command, *rest])

    def close() -> None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    try:
        _wait_for_port(found["address"], process, time.monotonic() + timeout)
    except BaseException:
        close()
        raise
    return RunningServer(found["address"], close)


def _wait_for_port(url: str, process: subprocess.Popen[bytes], end: float) -> None:
    address = urlsplit(url)
    while True:
        if process.poll() is not None:
            raise BlobstoreError(f"the server has ended with status {process.returncode}")
        with contextlib.suppress(OSError):
            socket.create_connection((address.hostname or "", address.port or 0), 1).close()
            return
        if time.monotonic() > end:
            raise BlobstoreError(f"the server does not answer at {url}")
        interrupts.sleep(interrupts.POLL)
