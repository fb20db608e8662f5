"""Servers of tests that run at the same time on one machine have different ports."""

from __future__ import annotations

import contextlib
import subprocess
import sys

from tests.support.transcripts import ROOT

PORTS = """
from tests.support.ports import free_port
print(*(free_port() for _ in range(250)), flush=True)
input()
"""


def test_no_two_processes_get_the_same_port() -> None:
    command = [sys.executable, "-c", PORTS]
    found = []
    with contextlib.ExitStack() as running:
        for _ in range(3):
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            running.enter_context(process)
            running.callback(process.kill)
            assert process.stdout is not None
            found.append({int(port) for port in process.stdout.readline().split()})
    assert all(len(ports) > 100 for ports in found)
    assert len(set().union(*found)) == sum(map(len, found))
