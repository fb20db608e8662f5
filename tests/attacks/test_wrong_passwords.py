"""A registry that counts how often it gets a wrong password: one attempt more may lock an account."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import RemoteError, RemoteRefused
from blobstore.http.protocol import Login
from blobstore.operations.transfer.verify_remote import verify_remote
from blobstore.registry.client import RegistryClient
from blobstore.registry.credentials import GivenLogin, LoginFiles
from blobstore.registry.store import list_tags
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob
from tests.support.raw_server import RawServer, Received, reply

WRONG = Login("alice", "wrong")
DENIED = json.dumps({"errors": [{"code": "UNAUTHORIZED", "message": "no"}]}).encode()


class Registry:
    """Rejects all passwords, itself or at its realm; it counts them. ``accepts`` decides about requests."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.attempts = 0
        self.accepts: Callable[[Received], bool] = lambda _: False
        self.lock = threading.Lock()

    def __call__(self, request: Received) -> bytes:
        with self.lock:
            self.attempts += request.headers.get("authorization", "").startswith("Basic ")
        if self.accepts(request):
            return reply(404)
        challenge = f'Bearer realm="http://{request.headers["host"]}/token",service="x"'
        asked = {} if request.path.startswith("/token") else {"www_authenticate": challenge}
        if self.scheme == "basic":
            asked = {"www_authenticate": 'Basic realm="x"'}
        return reply(401, DENIED, **asked)


@pytest.fixture(params=["basic", "bearer"])
def registry(request: pytest.FixtureRequest) -> Registry:
    return Registry(request.param)


@pytest.fixture
def server(registry: Registry) -> Iterator[RawServer]:
    with RawServer(registry) as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    add_blobs(store, "m", {f"x{n}": blob((f"x{n}", "U8", (1,), bytes([n]))) for n in range(16)})
    return store


@pytest.mark.parametrize("command", ["push", "pull", "list", "verify"])
def test_wrong_password_is_sent_once_by_a_command(
    registry: Registry,
    server: RawServer,
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    LoginFiles().store(server.host, WRONG)
    address = f"oci://{server.host}/a:v1"
    commands: dict[str, Callable[[], object]] = {
        "push": lambda: blobstore.push("m", address, store=store),
        "pull": lambda: blobstore.pull(address, "other", store=store),
        "list": lambda: list_tags(address.removesuffix(":v1")),
        "verify": lambda: verify_remote(address),
    }
    with pytest.raises(RemoteRefused, match="status 401") as caught:
        commands[command]()
    assert registry.attempts == 1
    assert caught.value.status == 401


def test_wrong_password_is_sent_once_by_threads(registry: Registry, server: RawServer) -> None:
    with RegistryClient(server.host, credentials=GivenLogin(WRONG)) as client:
        ready = threading.Barrier(8)

        def ask(number: int) -> str:
            ready.wait()
            with pytest.raises(RemoteError, match="status 401") as caught:
                client.blob_size(f"a/{number}", Digest.of(b""))
            return str(caught.value)

        with ThreadPoolExecutor(8) as threads:
            assert all("401" in text for text in threads.map(ask, range(8)))
    assert registry.attempts == 1


def test_password_that_gives_access_elsewhere_is_not_given_up() -> None:
    registry = Registry("basic")
    registry.accepts = lambda one: "authorization" in one.headers and "/denied/" not in one.path
    with (
        RawServer(registry) as server,
        RegistryClient(server.host, credentials=GivenLogin(WRONG)) as client,
    ):
        for _ in range(2):
            assert client.blob_size("a", Digest.of(b"")) is None
            with pytest.raises(RemoteRefused, match="status 401"):
                client.blob_size("denied", Digest.of(b""))
        assert not client.mount_blob("a", Digest.of(b""), "denied")


@pytest.mark.parametrize("command", ["push", "pull"])
def test_login_of_another_repository_is_never_sent(
    registry: Registry,
    server: RawServer,
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    logins = {f"{server.host}/{team}": {"auth": _packed(team)} for team in ("team-a", "team-b")}
    (tmp_path / "config.json").write_text(json.dumps({"auths": logins}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    address = f"oci://{server.host}/team-b/m:v1"
    with pytest.raises(RemoteRefused, match="status 401"):
        if command == "push":
            blobstore.push("m", address, store=store)
        else:
            blobstore.pull(address, "other", store=store)
    sent = {one.headers.get("authorization") for one in server.requests}
    assert sent == {None, f"Basic {_packed('team-b')}"}
    assert registry.attempts == 1


def _packed(user: str) -> str:
    return base64.b64encode(f"{user}:secret".encode()).decode()
