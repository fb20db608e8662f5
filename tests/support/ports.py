"""Ports for servers that take theirs from their configuration, or that are started again."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import socket
from collections.abc import Iterator

_SECOND = 10_000
"""SeaweedFS listens on its port plus this one too."""
_FIRST, _EACH = 10_000, 200


def free_port() -> int:
    """Return a port that nobody else is given; that plus 10,000 is free too.

    The system gives connections, and servers that ask for any port, only ports from 32,768 on. Of those below,
    each process that asks here has 199 of its own, and uses one after the other.
    """
    _, ports = _own_ports()
    return next(port for port in ports if _is_free(port) and _is_free(port + _SECOND))


@functools.cache
def _own_ports() -> tuple[socket.socket, Iterator[int]]:
    """Return a listener that keeps other processes, also of other runs, from ports, and these without end."""
    for first in range(_FIRST, _FIRST + _SECOND, _EACH):
        with contextlib.suppress(OSError):  # another process has them
            listener = socket.create_server(("127.0.0.1", first))
            atexit.register(listener.close)
            return listener, itertools.cycle(range(first + 1, first + _EACH))
    raise AssertionError(f"{_SECOND // _EACH} processes have all ports")


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_server(("127.0.0.1", port)).close()
        return True
    return False
