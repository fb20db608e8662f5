"""Ports for servers that take theirs from their configuration, or that are started again."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator

_SECOND = 10_000
"""SeaweedFS listens on its port plus this one too."""
_EACH = 500
_FIRST = 10_000 + _EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 20)


def free_port() -> int:
    """Return a port that nobody else is given; that plus 10,000 is free too.

    The system gives connections, and servers that ask for any port, only ports from 32,768 on. Of those below,
    each worker of the tests has its own, and uses one after the other.
    """
    return next(port for port in _numbers if _is_free(port) and _is_free(port + _SECOND))


def _all() -> Iterator[int]:
    begin = os.getpid() % _EACH  # another run of the tests on this machine may have the first ones
    for number in itertools.count(begin):
        yield _FIRST + number % _EACH


_numbers = _all()


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_server(("127.0.0.1", port)).close()
        return True
    return False
