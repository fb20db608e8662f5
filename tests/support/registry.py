"""A real registry on loopback: Debian's ``docker-registry``, with its files in a temporary folder."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from blobstore.core import strict_json
from tests.support.ports import free_port
from tests.support.processes import start
from tests.support.token_server import ISSUER, SERVICE, TokenServer

PROGRAM = "docker-registry"
SECONDS = 120


@dataclass(frozen=True)
class Server:
    """A registry that runs."""

    host: str
    """``127.0.0.1:port``."""
    root: Path
    """Its files."""

    def blob(self, digest: str) -> Path:
        """Return the file of a blob."""
        hex_digits = digest.removeprefix("sha256:")
        blobs = self.root / "docker" / "registry" / "v2" / "blobs" / "sha256"
        return blobs / hex_digits[:2] / hex_digits / "data"

    def links(self, repository: str) -> Path:
        """Return the folder that says which blobs a repository has, a folder for each."""
        repositories = self.root / "docker" / "registry" / "v2" / "repositories"
        return repositories / repository / "_layers" / "sha256"


@contextlib.contextmanager
def running_registry(
    folder: Path, auth: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Iterator[Server]:
    """Run a registry with its files in ``folder``; ``auth`` and ``sections`` are parts of its configuration."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed (Debian: apt-get install {PROGRAM})")
    root = folder / "registry"
    root.mkdir(parents=True)
    host = f"127.0.0.1:{free_port()}"
    config = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {
            "filesystem": {"rootdirectory": str(root)},
            "delete": {"enabled": True},
            "maintenance": {"uploadpurging": {"enabled": False}},
        },
        "http": {"addr": host, "secret": "of the tests"},
        **({"auth": auth} if auth else {}),
        **sections,
    }
    path = folder / "config.yml"  # JSON is YAML
    path.write_text(strict_json.dumps(config), encoding="utf-8")
    with (folder / "log").open("wb") as log:
        process = start([PROGRAM, "serve", str(path)], stdout=log, stderr=log)
    try:
        wait_until_ready(host, process, folder / "log")
        yield Server(host, root)
    finally:
        process.kill()
        process.wait()


def wait_until_ready(host: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a registry, or a proxy in front of it, answers."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(httpx2.TransportError):
            httpx2.get(f"http://{host}/v2/", trust_env=False)
            return
        time.sleep(0.05)
    raise RuntimeError(f"{host} does not answer: {log.read_text(encoding='utf-8')}")


def proxied_registry(folder: Path, url: str) -> contextlib.AbstractContextManager[Server]:
    """Run a registry that fetches what it is asked for from another one, and keeps it."""
    return running_registry(folder, proxy={"remoteurl": url})


@contextlib.contextmanager
def htpasswd_registry(folder: Path, user: str, password: str) -> Iterator[Server]:
    """Run a registry that asks for a password."""
    if shutil.which("htpasswd") is None:
        pytest.skip("htpasswd is not installed (Debian: apt-get install apache2-utils)")
    folder.mkdir(parents=True, exist_ok=True)
    line = subprocess.run(
        ["htpasswd", "-nbB", user, password], check=True, capture_output=True
    ).stdout
    (folder / "htpasswd").write_bytes(line)
    auth = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
    with running_registry(folder, auth) as server:
        yield server


@contextlib.contextmanager
def token_registry(folder: Path, tokens: TokenServer) -> Iterator[Server]:
    """Run a registry that asks for tokens of a server."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "issuer.pem").write_bytes(tokens.certificate)
    auth = {
        "token": {
            "realm": tokens.realm,
            "service": SERVICE,
            "issuer": ISSUER,
            "rootcertbundle": str(folder / "issuer.pem"),
        }
    }
    with running_registry(folder, auth) as server:
        yield server
