"""The program ``blobstore`` for scripts of shells, without the start of an interpreter for each command.

A process that has all imported forks a child for each command, as :mod:`tests.faults.nursery` does. The child
has the arguments, the environment, the folder and the streams of a program that only passes these on, with
the signals that it gets.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.faults.processes import nursery, wait_for

_PROGRAM = """#!{python} -IS
import marshal, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({place!r})
    said = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ)))
    socket.send_fds(server, [said], [0, 1, 2])
    server.shutdown(socket.SHUT_WR)
    if not (pid := int.from_bytes(server.recv(4), "little")):
        sys.exit("the server of commands has ended")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = server.recv(1)[0]
sys.exit(code)
"""


@contextlib.contextmanager
def quick_commands(folder: Path) -> Iterator[Path]:
    """Give a folder for ``PATH`` whose ``blobstore`` starts at once, until the block ends."""
    place = folder / "socket"
    programs = folder / "bin"
    programs.mkdir()
    program = programs / "blobstore"
    program.write_text(_PROGRAM.format(python=sys.executable, place=str(place)), encoding="utf-8")
    program.chmod(0o755)
    server = nursery().start("commands", place)
    try:
        wait_for(place.exists)
        yield programs
    finally:
        server.kill()  # with the commands that still run
        server.wait()


def serve(place: str) -> None:
    """Fork a child for each program that connects; only a signal ends this."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}.new")
        listener.listen()
        Path(f"{place}.new").rename(place)  # who sees it can connect
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
        while True:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _keep(connection)


def _keep(connection: socket.socket) -> None:
    """Be the keeper of one command: fork it, and say its number and how it has ended, as shells do."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        said, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
        while more := connection.recv(1 << 20):
            said += more
        if (child := os.fork()) == 0:
            words, folder, environment = marshal.loads(said)
            _run(words, folder, environment, descriptors)
        connection.send(child.to_bytes(4, "little"))
        for descriptor in descriptors:
            os.close(descriptor)  # who reads a pipe sees its end when the command ends
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.send(bytes([code if code >= 0 else 128 - code]))
    finally:
        os._exit(0)


def _run(
    words: list[str], folder: str, environment: dict[str, str], descriptors: list[int]
) -> None:
    """Be the command."""
    from tests.faults.nursery import call, open_streams

    code = 70
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        open_streams()
        code = call(["blobstore", *words])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)
