"""The unit, the container file and the proxy of docs/guides/serve.md work as they stand there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from blobstore.operations.create.create import create
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.support.clients import run_client
from tests.support.models import dense_tensors, write_folder
from tests.support.pages import ROOT, blocks
from tests.support.ports import free_port
from tests.support.processes import start
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

TOKEN = "a-token-of-the-tests"
PROGRAM = "/opt/blobstore/bin/blobstore"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def block(language: str) -> str:
    """Return the only block of the page in a language."""
    (found,) = (
        one.text
        for one in blocks(ROOT / "docs" / "guides" / "serve.md")
        if one.language == language
    )
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
    file = (ROOT / ".ci" / "release" / "Containerfile").read_text(encoding="utf-8")
    program, *arguments = json.loads(setting(file, "ENTRYPOINT")) + json.loads(setting(file, "CMD"))
    assert program == "blobstore"
    folder = setting(file, "VOLUME")
    assert f"BLOBSTORE_HOME={folder}" in setting(file, "ENV PATH")
    served([*arguments, "--store", folder], tmp_path)


@contextlib.contextmanager
def nginx(server: Serving, folder: Path) -> Iterator[str]:
    """Run nginx as on the page, with a certificate for this machine; return the address."""
    port = free_port()
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", f"{folder}/cache.key", "-out", f"{folder}/cache.pem"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, *files]
    subprocess.run(make, check=True, capture_output=True)
    text = block("nginx").replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("/etc/ssl/", f"{folder}/").replace("http://127.0.0.1:8080", server.url)
    kinds = "client_body proxy fastcgi uwsgi scgi"
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds.split())
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {folder}/pid; events {{}}\n"
        f"http {{ access_log off; {temporary} {text} }}\n",
        encoding="utf-8",
    )
    with (folder / "out").open("wb") as log:
        process = start([str(NGINX), "-c", str(config), "-e", f"{folder}/log"], stderr=log)
    try:
        for _ in range(600):
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        yield f"https://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_a_client_of_the_hub_gets_a_model_through_the_proxy(tmp_path: Path) -> None:
    files = {f"{number}.txt": b"text" for number in range(5)}
    source = write_folder(tmp_path / "model", dense_tensors(), files=files)
    store = LocalStore(tmp_path / "store")
    create(source, "org/model", store=store, source_options=SourceOptions(keep=("*.txt",)))
    program = "from huggingface_hub import snapshot_download; print(snapshot_download('org/model'))"
    pages = {"hub_files.PAGE": 2}  # the address of the next page has to be that of the proxy
    with (
        serving(store, tmp_path, "--anonymous", limits=pages) as server,
        nginx(server, tmp_path) as url,
    ):
        variables = {"HF_ENDPOINT": url, "HF_HOME": f"{tmp_path}/hub"}
        variables["SSL_CERT_FILE"] = f"{tmp_path}/cache.pem"
        result = run_client(program, environment=os.environ | variables)
        assert result.code == 0, result.stderr
    folder = Path(result.stdout.strip())
    for path in (file for file in source.rglob("*") if file.is_file()):
        assert (folder / path.relative_to(source)).read_bytes() == path.read_bytes()
