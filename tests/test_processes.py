"""Servers of tests and benchmarks end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.transcripts import ROOT

MANY_SECONDS = 120


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no signal for that")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_process_that_started_it(
    number: signal.Signals,
) -> None:
    code = """
import sys
from tests.support.processes import start

print(start(["sleep", "1000000"]).pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(number)
        assert parent.wait() == -number

    until = time.monotonic() + MANY_SECONDS
    while time.monotonic() < until and is_running(child):
        time.sleep(0.01)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    )
