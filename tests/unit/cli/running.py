"""The command line run in this process, or as a process of its own."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from blobstore.cli.main import program
from tests.faults.processes import LIMIT, nursery

_ROOT = Path(__file__).parents[3]
# A test run in the background of a script inherits an ignored SIGINT, which commands respect.
LAUNCHER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from blobstore.__main__ import main
main()
"""
# Signals itself when it has opened a file of a folder; a thread waits there until the main thread stops.
_INTERRUPTED = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from blobstore.core import interrupts
folder, is_stopping, stopped, opened = sys.argv.pop(1), threading.Event(), interrupts._stopped, os.open

def stop():
    is_stopping.set()
    return stopped()

def strike(path, *arguments, **options):
    descriptor = opened(path, *arguments, **options)
    if not is_stopping.is_set() and os.path.dirname(os.fsdecode(path)) == folder:
        os.kill(os.getpid(), signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            is_stopping.wait()
    return descriptor

interrupts._stopped, os.open = stop, strike
from blobstore.__main__ import main
main()
"""


def run(*arguments: object, exit_code: int = 0, stdin: str | None = None) -> Result:
    """Run a command, and check its exit code. Exceptions other than an exit are raised.

    It prints no lines of progress, however slow the machine.
    """
    words = [str(item) for item in arguments]
    with patch("blobstore.cli.progress._LINE_SECONDS", math.inf):
        result = CliRunner(catch_exceptions=False).invoke(program, words, input=stdin)
    assert not result.exc_info or result.exc_info[0] is SystemExit
    assert result.exit_code == exit_code, result.output
    return result


def run_json(*arguments: object, exit_code: int = 0, stdin: str | None = None) -> Any:
    """Run a command with ``--json``; return what it printed, which is ASCII."""
    result = run(*arguments, "--json", exit_code=exit_code, stdin=stdin)
    assert result.stdout.isascii()
    return json.loads(result.stdout)


def command_line(*arguments: object) -> list[str]:
    """Return the command line of a real process."""
    return [sys.executable, "-c", LAUNCHER, *map(str, arguments)]


def interrupted(folder: Path, *arguments: object) -> tuple[int, str]:
    """Interrupt a real process while it works on files of a folder; return its status and its errors."""
    command = [sys.executable, "-c", _INTERRUPTED, str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False, text=True)
    return done.returncode, done.stderr


def environment(**variables: str) -> Mapping[str, str]:
    """Return the environment of a real process, with this tree's packages."""
    # Buffered output, as users have it: what is left in the buffer is written at the end.
    return {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "", **variables}


def run_process(*arguments: object, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command as a process of its own, its output piped."""
    return subprocess.run(
        command_line(*arguments),
        capture_output=True,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        timeout=240,
        check=False,
    )


def run_forked(*arguments: object, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Do as :func:`run_process`, with a process that is forked from one that has imported all."""
    command = ["blobstore", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        pid = nursery().fork(command, output, errors, environment=environment(**variables))
        ended = nursery().ask({"do": "wait", "pid": pid, "seconds": LIMIT})
        assert ended["code"] is not None, f"{command} hangs"
        return subprocess.CompletedProcess(
            command, ended["code"], output.read_bytes(), errors.read_bytes()
        )


def on_terminal(code: str, *arguments: object, exit_code: int = 0, **variables: str) -> bytes:
    """Run Python code with a pseudo-terminal for input and output; return what it shows."""
    return _on_terminal(code, *arguments, is_piped=False, exit_code=exit_code, **variables)[0]


def on_terminal_with_pipe(code: str, *arguments: object) -> tuple[bytes, bytes]:
    """Do as :func:`on_terminal` with standard output piped; return what went there, too."""
    return _on_terminal(code, *arguments, is_piped=True)


def _on_terminal(
    code: str, *arguments: object, is_piped: bool, exit_code: int = 0, **variables: str
) -> tuple[bytes, bytes]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=slave,
        stdout=subprocess.PIPE if is_piped else slave,
        stderr=slave,
        env=environment(**{"TERM": "xterm", "NO_COLOR": "", **variables}),
    )
    os.close(slave)
    shown = b""
    while data := _read(master):
        shown += data
    os.close(master)
    output, _ = process.communicate(timeout=60)
    assert process.returncode in (exit_code, 4), shown
    return shown, output


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so when the other end is closed
        return b""


def need_libraries(command: str) -> None:
    """Skip the test of a command that needs an extra which is not installed."""
    if command == "sign":
        pytest.importorskip(
            "cryptography", reason="it is in the test group, and in the extra [sign]"
        )
    if command == "run" and not any(map(find_spec, ("vllm", "mlx_lm"))):
        pytest.skip("no inference server is installed")
