"""Processes of tests end with the one that started them, and forked commands are as those of users."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import quick_commands
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


def test_a_forked_command_has_what_its_shell_gives_it_and_ends_as_one_that_is_started(
    tmp_path: Path,
) -> None:
    scripts = {
        "arguments and folder": "cd folder && blobstore --store . list 'x y'; echo $?",
        "environment": "BLOBSTORE_HOME=$PWD/folder blobstore show one; echo $?",
        "streams": "blobstore list '[' 2>err >out; echo $?; cat err out",
        "input": "echo secret | blobstore login 127.0.0.1:1 --username u --password-stdin; echo $?",
        "a pipe": "blobstore --help | head -n 1",
        "a signal": "rm -f said; blobstore serve --port 0 >said 2>log & "
        "until grep -qs serving said; do sleep 0.1; done; kill $!; wait $!; echo $?",
    }
    (tmp_path / "folder").mkdir()
    found: dict[str, list[str]] = {}
    with quick_commands(tmp_path) as programs:
        for place in (programs, Path(sys.executable).parent):
            path = os.pathsep.join((str(place), os.environ["PATH"]))
            home = {"HOME": str(tmp_path), "DOCKER_CONFIG": str(tmp_path), "PATH": path}
            for name, script in scripts.items():
                done = subprocess.run(
                    ["bash", "-c", script],
                    capture_output=True,
                    check=False,
                    cwd=tmp_path,
                    env=home,
                    text=True,
                )
                found.setdefault(name, []).append(done.stdout + done.stderr)

    assert {name: both for name, both in found.items() if both[0] != both[1]} == {}
    assert all(outputs[0] for outputs in found.values())
