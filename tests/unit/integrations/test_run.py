from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest

import blobstore
from blobstore.errors import BlobstoreError, MissingLibrary, ModelNotFound, UsageError
from blobstore.store.local import LocalStore
from tests.support.gguf_files import gguf_file

SERVER = """#!/bin/sh
while [ "$1" != --port ]; do shift; done
exec python3 -m http.server "$2" --bind 127.0.0.1
"""
"""What is under test is how a server is started and ended, and not what it answers."""


@pytest.fixture
def model(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model of a GGUF file; no server is installed."""
    (tmp_path / "m.gguf").write_bytes(gguf_file([], [("a", 0, [4], bytes(16))]))
    blobstore.create(tmp_path / "m.gguf", "m", store=store)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return "m"


def install(folder: Path, script: str) -> None:
    program = folder / "bin" / "llama-server"
    program.write_text(script)
    program.chmod(0o755)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def test_a_server_runs_until_it_is_closed(store: LocalStore, model: str, tmp_path: Path) -> None:
    install(tmp_path, SERVER)

    with (
        blobstore.run(model, ["--port", free_port()], store=store) as server,
        urllib.request.urlopen(server.url, timeout=60) as response,
    ):
        assert response.status == 200

    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(server.url, timeout=60)


def test_a_server_that_ends_at_once_is_an_error(
    store: LocalStore, model: str, tmp_path: Path
) -> None:
    install(tmp_path, "#!/bin/sh\nexit 7\n")
    with pytest.raises(BlobstoreError, match="the server has ended with status 7"):
        blobstore.run(model, ["--port", free_port()], store=store)


def test_a_server_that_opens_no_port_is_ended(
    store: LocalStore, model: str, tmp_path: Path
) -> None:
    install(tmp_path, "#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(BlobstoreError, match="does not answer at http://127.0.0.1:"):
        blobstore.run(model, ["--port", free_port()], store=store, timeout=0)


def test_errors_are_those_of_the_command(store: LocalStore, model: str) -> None:
    with pytest.raises(ModelNotFound, match="no model"):
        blobstore.run("none", store=store)
    with pytest.raises(MissingLibrary, match="no inference server is installed: llama.cpp"):
        blobstore.run(model, store=store, server="llama.cpp")
    with pytest.raises(UsageError, match="llama.cpp serves models from GGUF files"):
        blobstore.run(model, store=store, server="vllm")
    with pytest.raises(BlobstoreError, match="invalid value for '--with'"):
        blobstore.run(model, store=store, server="nothing")
