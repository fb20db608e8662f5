"""Servers and other processes of tests and benchmarks, which end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that the system kills when this one ends, however it ends.

    A benchmark that is terminated does not come to its ``finally``. On other systems than Linux, its
    servers stay.
    """
    parent = os.getpid()
    # Loaded here: what runs between fork and exec must not take locks.
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it has ended in the meantime
                os._exit(1)

    return subprocess.Popen(command, preexec_fn=prepare, **options)  # noqa: PLW1509 - see prepare
