"""mlx-lm's OpenAI-compatible server for one model of the store.

Usage: ``python -m blobstore.integrations.mlx_lm.server NAME``. The model is loaded before the port is
opened, in the thread that generates text: lazy MLX arrays belong to the thread that made them. The
options are those of ``mlx_lm.server``, except the ones that name another model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from blobstore.integrations.server_main import ServerOptions, run_server

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a model until the process is stopped, and return its exit status."""
    name = "blobstore.integrations.mlx_lm.server"
    own = "mlx-lm's OpenAI-compatible server"
    return run_server(name, own, "python -m mlx_lm server", _serve, arguments)


def _serve(options: ServerOptions) -> None:
    from blobstore.integrations.mlx_lm.provider import serve  # imports mlx-lm

    serve(options)


def _exit(code: int) -> NoReturn:
    """End the process at once. Everything that must be closed or removed has been.

    MLX sometimes aborts a process that exits normally after a thread has computed something.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as ended:  # by a signal, or by the parser after its message
        status = ended.code if isinstance(ended.code, int) else 0
    _exit(status)
