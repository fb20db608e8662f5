"""Servers of tests and benchmarks end with the process that started them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

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
        child = os.pidfd_open(int(parent.stdout.readline()))  # its number may be given to another
        parent.send_signal(number)
        assert parent.wait() == -number

    try:
        assert select.select([child], [], [], MANY_SECONDS)[0] == [child]  # it has ended
    finally:
        os.close(child)
