"""A registry behind nginx, as operators set it up: with its limit of requests, and without its port."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import blobstore
from blobstore.errors import RemoteError, RemoteRefused
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob
from tests.support.ports import free_port
from tests.support.processes import start
from tests.support.registry import running_registry, wait_until_ready

MIB = 2**20
PROGRAM = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="nginx is not installed (Debian: apt-get install nginx-light)"
)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server.host


@contextlib.contextmanager
def nginx(folder: Path, upstream: str, location: str) -> Iterator[str]:
    """Run nginx in front of a registry, with more lines for its location."""
    host = f"127.0.0.1:{free_port()}"
    kinds = "client_body proxy fastcgi uwsgi scgi"
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds.split())
    config = folder / "nginx.conf"
    config.write_text(
        f"""
        daemon off; master_process off; pid {folder}/pid; error_log {folder}/log;
        events {{ worker_connections 64; }}
        http {{
            access_log off; {temporary}
            server {{
                listen {host};
                location / {{ proxy_pass http://{upstream}; {location} }}
            }}
        }}
        """,
        encoding="utf-8",
    )
    with (folder / "out").open("wb") as log:
        process = start([str(PROGRAM), "-c", str(config), "-e", f"{folder}/log"], stderr=log)
    try:
        wait_until_ready(host, process, folder / "log")
        yield host
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    data = bytes(range(256)) * (3 * MIB // 256)
    add_blobs(store, "m", {"x": blob(("x", "U8", (3 * MIB,), data))})
    return store


def test_limit_of_a_request_is_named_and_met_by_smaller_parts(
    upstream: str, store: LocalStore, tmp_path: Path
) -> None:
    with nginx(tmp_path, upstream, "proxy_set_header Host $http_host;") as host:
        with pytest.raises(RemoteRefused, match="--part-size 1MiB") as caught:
            blobstore.push("m", f"{host}/nginx/limit", store=store)
        assert caught.value.status == 413
        blobstore.push(
            "m", f"{host}/nginx/limit", store=store, registry=RegistryOptions(part_size=MIB)
        )
        other = LocalStore(tmp_path / "other")
        blobstore.pull(f"{host}/nginx/limit", "m", store=other)
    assert other.read_manifest("m") == store.read_manifest("m")


def test_port_that_nginx_drops_is_named(upstream: str, store: LocalStore, tmp_path: Path) -> None:
    with (
        nginx(tmp_path, upstream, "proxy_set_header Host $host;") as host,
        pytest.raises(RemoteError, match=r"proxy_set_header Host \$http_host"),
    ):
        blobstore.push("m", f"{host}/nginx/port", store=store)
