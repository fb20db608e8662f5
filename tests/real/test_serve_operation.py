"""The unit and the container file of docs/guides/serve.md start a server that answers, and stops as systemd expects."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest

from blobstore.operations.create.create import create
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder
from tests.support.pages import ROOT, blocks

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

TOKEN = "a-token-of-the-tests"
PROGRAM = "/opt/blobstore/bin/blobstore"


def block(language: str) -> str:
    """Return the only block of the page in a language."""
    (found,) = (one.text for one in blocks(ROOT / "docs" / "guides" / "serve.md") if one.language == language)
    return found


def setting(text: str, name: str) -> str:
    """Return what follows a name at the beginning of a line."""
    found = re.search(rf"^{name}[= ](.*)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


def served(arguments: list[str], tmp_path: Path) -> int:
    """Run a server with the arguments of the page but for its paths; ask it, stop it and return its status."""
    store, tokens = tmp_path / "store", tmp_path / "tokens"
    create(write_folder(tmp_path / "model", dense_tensors()), "org/model", store=LocalStore(store))
    tokens.write_text(f"{TOKEN}\n", encoding="utf-8")
    command = [sys.executable, "-m", "blobstore", *arguments, "--port=0"]
    command[command.index("--store") + 1] = str(store)
    command[command.index("--token-file") + 1] = str(tokens)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process:
        port = int(process.stdout.readline().rpartition(":")[2].partition(";")[0])
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        for headers, status in (({}, 401), ({"Authorization": f"Bearer {TOKEN}"}, 200)):
            connection.request("GET", "/api/models/org/model", headers=headers)
            response = connection.getresponse()
            response.read()
            assert response.status == status
        connection.close()
        process.send_signal(signal.SIGTERM)
        # A shell says 128 more than the signal; systemd and Docker too.
        return process.wait(timeout=60) % 256


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "models.service"
    unit.write_text(block("ini").replace(PROGRAM, sys.executable), encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_unit_starts_a_server_and_knows_how_it_ends(tmp_path: Path) -> None:
    unit = block("ini")
    program, *arguments = shlex.split(setting(unit, "ExecStart"))
    assert program == PROGRAM
    assert served(arguments, tmp_path) == int(setting(unit, "SuccessExitStatus"))
    store = Path(arguments[arguments.index("--store") + 1])
    assert Path(setting(unit, "ReadWritePaths")) == store / ".blobstore"


def test_the_container_starts_a_server(tmp_path: Path) -> None:
    file = block("dockerfile")
    program, *arguments = json.loads(setting(file, "ENTRYPOINT")) + json.loads(setting(file, "CMD"))
    assert program == "blobstore"
    assert setting(file, "VOLUME") == arguments[arguments.index("--store") + 1]
    served(arguments, tmp_path)
