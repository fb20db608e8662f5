"""A registry that answers each request of a push and of a pull with every status, one after the other."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError, RemoteError, RemoteRefused
from blobstore.http import transport as transport_module
from blobstore.http.certificates import tls_context
from blobstore.http.retry import Patience
from blobstore.http.rules import Rule
from blobstore.operations.describe.show import describe_model
from blobstore.operations.transfer.push import Pushed
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.registry import client as client_module
from blobstore.registry import response_rules
from blobstore.registry import upload as upload_module
from blobstore.registry.client import RegistryClient
from blobstore.registry.credentials import GivenLogin
from blobstore.registry.manifest import OCI_INDEX, OCI_MANIFEST, RemoteManifest
from blobstore.registry.reference import is_tag
from blobstore.registry.store import list_tags
from blobstore.registry.upload import UploadSession
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob
from tests.support.raw_server import RawServer, Received, reply
from tests.support.signing import key_files
from tests.unit.cli.running import run

STATUSES = (200, 201, 202, 204, 308, 400, 401, 404, 413, 416, 429, 500)
"""One of each meaning, for whole commands; single requests get all statuses."""
HINT_STATUSES = (200, 201, 202, 308, 400, 401, 404, 500)
"""A hint is not sent again in another way, so fewer differ."""
HINTS = {
    "look at the tag": ("HEAD", r"/manifests/v1$"),
    "look at a blob": ("HEAD", r"/blobs/sha256:"),
    "mount": ("POST", r"mount="),
    "referrers": ("GET", r"/referrers/"),
    "tag of signatures": ("GET", r"/manifests/sha256-"),
}
NEEDED = {
    "start of an upload": ("POST", r"/uploads/$"),
    "end of an upload": ("PUT", r"/uploads/\d+"),
    "manifest": ("PUT", r"/manifests/v1$"),
}
READ = {"manifest": ("GET", r"/manifests/v1$"), "blob": ("GET", r"/blobs/sha256:")}


class Registry:
    """A registry in memory; ``override`` answers first, if it returns something."""

    def __init__(self) -> None:
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.uploads = 0
        self.override: Callable[[Received], bytes | None] = lambda _: None
        self.realm: str | None = None
        """The challenge that answers every request that ``override`` leaves."""

    def __call__(self, request: Received) -> bytes:
        if (overridden := self.override(request)) is not None:
            return overridden
        if self.realm is not None:
            return reply(401, www_authenticate=self.realm)
        return self.answer(request)

    def answer(self, request: Received) -> bytes:
        path, _, query = request.path.partition("?")
        if match := re.fullmatch(r"/v2/(.+)/blobs/uploads/(\d*)", path):
            repository, number = match.groups()
            if not number:
                self.uploads += 1
                place = f"/v2/{repository}/blobs/uploads/{self.uploads}"
                return reply(202, location=place)
            digest = query.partition("digest=")[2]
            if request.method == "GET" or str(Digest.of(request.body)) != digest:
                return reply(404)
            self.blobs[repository, digest] = request.body
            return reply(201)
        if match := re.fullmatch(r"/v2/(.+)/blobs/(.+)", path):
            data = self.blobs.get((match[1], match[2]))
            if data is None:
                return reply(404)
            if request.method == "HEAD":
                return reply(200, content_length=len(data))
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
            if found is None:
                return reply(200, data)
            begin, end = int(found[1]), int(found[2]) + 1
            return reply(206, data[begin:end], content_range=f"bytes {begin}-{end - 1}/{len(data)}")
        if match := re.fullmatch(r"/v2/(.+)/tags/list", path):
            names = [name.partition(":")[2] for name in self.manifests]
            tags = [tag for tag in names if is_tag(tag)]
            return reply(200, json.dumps({"tags": tags}).encode())
        if match := re.fullmatch(r"/v2/(.+)/manifests/(.+)", path):
            return self.manifest(request, match[1], match[2])
        return reply(404)

    def manifest(self, request: Received, repository: str, reference: str) -> bytes:
        if request.method == "PUT":
            # A subject need not be there yet, says the distribution specification.
            needed = re.sub(r'"subject":\s*\{[^}]*\}', "", request.body.decode())
            named = re.findall(r"sha256:[0-9a-f]{64}", needed)
            missing = [
                one
                for one in named
                if (repository, one) not in self.blobs
                and f"{repository}:{one}" not in self.manifests
            ]
            if missing and b'"layers"' in request.body:
                errors = [{"code": "MANIFEST_BLOB_UNKNOWN", "detail": one} for one in missing]
                return reply(400, json.dumps({"errors": errors}).encode())
            kept = request.headers["content-type"], request.body
            digest = str(Digest.of(request.body))
            self.manifests[f"{repository}:{reference}"] = kept
            self.manifests[f"{repository}:{digest}"] = kept
            return reply(201, docker_content_digest=digest)
        if f"{repository}:{reference}" not in self.manifests:
            return reply(404)
        kind, data = self.manifests[f"{repository}:{reference}"]
        digest = str(Digest.of(data))
        if request.method == "HEAD":
            return reply(
                200, content_length=len(data), content_type=kind, docker_content_digest=digest
            )
        return reply(200, data, content_type=kind, docker_content_digest=digest)


def upload(client: RegistryClient) -> None:
    client.upload_blob("a", DIGEST, len(DATA), lambda offset: (DATA[offset:],))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "Patience", lambda: Patience(attempts=2, first=0))
    # Reading all certificates takes longer than the requests, none of which is encrypted.
    monkeypatch.setattr(transport_module, "tls_context", functools.cache(tls_context))


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def server(registry: Registry) -> Iterator[RawServer]:
    with RawServer(registry) as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    add_blobs(store, "m", {"x": blob(("x", "U8", (3,), b"abc"))})
    return store


def push(server: RawServer, store: LocalStore, path: str = "a", *, mount: bool = True) -> Pushed:
    return blobstore.push(
        "m",
        f"{server.host}/{path}:v1",
        store=store,
        registry=RegistryOptions(layout="ollama", mount=mount),
    )


def answer(kind: tuple[str, str], status: int) -> Callable[[Received], bytes | None]:
    method, pattern = kind

    def override(request: Received) -> bytes | None:
        is_it = request.method == method and re.search(pattern, request.path)
        return reply(status, b"{}" * (status != 204)) if is_it else None

    return override


def model_bytes(store: LocalStore) -> int:
    return sum(item.size for item in store.resolve("m").blobs)


@pytest.mark.parametrize("kind", HINTS)
def test_hint_never_ends_a_push_or_a_pull(
    registry: Registry, server: RawServer, store: LocalStore, tmp_path: Path, kind: str
) -> None:
    push(server, store, "first")  # so that there is something to mount
    for status in HINT_STATUSES:
        if kind == "look at a blob" and status == 200:
            continue  # it has "{}" there, which is damage
        path = f"{status}"
        registry.override = answer(HINTS[kind], status)
        pushed = push(server, store, path)
        if kind != "mount" or status != 201:
            assert pushed.bytes_sent == model_bytes(store)
            assert pushed.bytes_mounted == pushed.bytes_present == 0
        else:  # it says to have mounted what it has not
            assert pushed.bytes_sent == model_bytes(store)
        if HINTS[kind][0] != "GET":
            continue  # a pull has no such request
        other = LocalStore(tmp_path / path)
        blobstore.pull(f"{server.host}/{path}:v1", "m", store=other)
        assert other.read_manifest("m") == store.read_manifest("m")


@pytest.mark.parametrize("kind", NEEDED)
def test_needed_request_of_a_push_fails_with_one_line(
    registry: Registry, server: RawServer, store: LocalStore, kind: str
) -> None:
    good = {
        "start of an upload": (),
        "end of an upload": (200, 201, 204),
        "manifest": (200, 201, 202, 204),
    }
    for status in STATUSES:
        if status in good[kind]:
            continue
        registry.override = answer(NEEDED[kind], status)
        with pytest.raises(RemoteError) as caught:
            push(server, store)
        assert str(caught.value).isprintable()
        assert status < 400 or caught.value.status == status
        assert "a:v1" not in registry.manifests
    registry.override = lambda _: None
    push(server, store)
    assert "a:v1" in registry.manifests


@pytest.mark.parametrize("kind", READ)
def test_needed_request_of_a_pull_fails_with_one_line(
    registry: Registry, server: RawServer, store: LocalStore, tmp_path: Path, kind: str
) -> None:
    push(server, store)
    other = LocalStore(tmp_path / "other")
    for status in STATUSES:
        registry.override = answer(READ[kind], status)
        with pytest.raises(BlobstoreError) as caught:
            blobstore.pull(f"{server.host}/a:v1", "m", store=other)
        assert str(caught.value).isprintable()
        assert list(other.references()) == []
    registry.override = lambda _: None
    blobstore.pull(f"{server.host}/a:v1", "m", store=other)
    assert other.read_manifest("m") == store.read_manifest("m")


@pytest.mark.parametrize("kind", ["PATCH", "GET"])
def test_part_or_status_of_an_upload_that_is_refused_lets_it_begin_again(
    registry: Registry, server: RawServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(upload_module, "PART", 100)
    data = bytes(150 if kind == "PATCH" else 50)
    session = None
    if kind == "GET":
        session = UploadSession(f"http://{server.host}/v2/a/blobs/uploads/7", 10)
    with RegistryClient(server.host, patience=Patience(attempts=3, first=0)) as client:
        for status in STATUSES:
            registry.blobs.clear()
            registry.override = answer((kind, r"/uploads/\d+"), status)
            upload = partial(
                client.upload_blob, "a", Digest.of(data), len(data), lambda at: (data[at:],)
            )
            # A part is needed: only a refusal that is final, and not of its size, leads to another way.
            if kind == "GET" or (400 <= status < 500 and status not in (404, 413, 429)):
                upload(session=session)
                assert registry.blobs == {("a", str(Digest.of(data))): data}
            else:
                with pytest.raises(RemoteError) as caught:
                    upload(session=session)
                assert str(caught.value).isprintable()
                assert not registry.blobs


DATA = bytes(range(200))
DIGEST = Digest.of(DATA)
LISTED = RemoteManifest.of(
    OCI_INDEX, b'{"schemaVersion": 2, "mediaType": "%s", "manifests": []}' % OCI_INDEX.encode()
)
ALL_STATUSES = (
    *(200, 201, 202, 203, 204, 205, 206, 300, 301, 302, 303, 304, 307, 308),
    *(400, 401, 402, 403, 404, 405, 406, 408, 409, 410, 411, 412, 413, 415, 416, 418, 422, 425),
    *(428, 429, 431, 451, 500, 501, 502, 503, 504, 505, 507, 511, 599),
)
CALLS: dict[str, tuple[Rule, tuple[str, str], Callable[[RegistryClient], object]]] = {
    "login": (response_rules.BASE, ("GET", "/v2/$"), lambda c: c.check_login()),
    "manifest": (
        response_rules.MANIFEST,
        ("GET", "/manifests/v1$"),
        lambda c: c.get_manifest("a", "v1"),
    ),
    "look at a manifest": (
        response_rules.MANIFEST_LOOK,
        ("HEAD", "/manifests/v1$"),
        lambda c: c.head_manifest("a", "v1"),
    ),
    "put of a manifest": (
        response_rules.MANIFEST_PUT,
        ("PUT", "/manifests/"),
        lambda c: c.put_manifest("a", "v1", LISTED),
    ),
    "blob": (
        response_rules.BLOB,
        ("GET", "/blobs/sha256:"),
        lambda c: b"".join(c.read_blob("a", DIGEST, 0, len(DATA), size=len(DATA))),
    ),
    "range of a blob": (
        response_rules.BLOB,
        ("GET", "/blobs/sha256:"),
        lambda c: b"".join(c.read_blob("a", DIGEST, 5, 9)),
    ),
    "size of a blob": (
        response_rules.BLOB_SIZE,
        ("HEAD", "/blobs/sha256:"),
        lambda c: c.blob_size("a", DIGEST),
    ),
    "look at a blob": (
        response_rules.BLOB_LOOK,
        ("HEAD", "/blobs/sha256:"),
        lambda c: c.blob_size("a", DIGEST, for_upload=True),
    ),
    "mount": (response_rules.MOUNT, ("POST", "mount="), lambda c: c.mount_blob("a", DIGEST, "b")),
    "start of an upload": (response_rules.UPLOAD_START, ("POST", "/uploads/$"), upload),
    "end of an upload": (response_rules.UPLOAD_END, ("PUT", "/uploads/"), upload),
    "tags": (response_rules.TAGS, ("GET", "/tags/list"), lambda c: list(c.tags("a"))),
    "referrers": (
        response_rules.REFERRERS,
        ("GET", "/referrers/"),
        lambda c: c.referrers("a", DIGEST),
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_every_status_means_what_the_table_says(
    registry: Registry, server: RawServer, kind: str
) -> None:
    rule, request, call = CALLS[kind]
    registry.blobs["a", str(DIGEST)] = DATA
    registry.manifests["a:v1"] = (LISTED.media_type, LISTED.data)
    with RegistryClient(server.host, credentials=GivenLogin(None)) as client:
        for status in ALL_STATUSES:
            if rule is response_rules.UPLOAD_END:
                registry.blobs.clear()  # otherwise an upload whose end failed is there nevertheless
            registry.override = answer(request, status)
            try:
                call(client)
            except BlobstoreError as error:
                assert not rule.is_hint, status
                assert str(error).isprintable()
                assert len(str(error)) < 1000
                is_refusal = status >= 400 and status not in rule.answers
                if is_refusal and isinstance(error, RemoteError):
                    assert error.status == status
            else:
                assert rule.is_hint or status in rule.answers, status


NONSENSE = (
    *(b"", b"<html>", b"null", b"\xff\xfe", b"[" * 5000, b'{"manifests": {}}'),
    b'{"schemaVersion": 2, "layers": 1}',
    b'{"schemaVersion": 2, "mediaType": "%s", "manifests": [{"digest": 1}]}' % OCI_INDEX.encode(),
)


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [
        ("mount", "text/html"),
        ("referrers", "text/html"),
        ("referrers", OCI_INDEX),
        ("tag of signatures", OCI_MANIFEST),
        ("tag of signatures", OCI_INDEX),
    ],
)
def test_hint_that_is_answered_with_nonsense_never_ends_a_command(
    registry: Registry,
    server: RawServer,
    store: LocalStore,
    tmp_path: Path,
    kind: str,
    media_type: str,
) -> None:
    push(server, store, "first")
    method, pattern = HINTS[kind]
    for number, body in enumerate(NONSENSE):

        def override(request: Received, body: bytes = body) -> bytes | None:
            is_it = request.method == method and re.search(pattern, request.path)
            return reply(200, body, content_type=media_type) if is_it else None

        registry.override = override
        push(server, store, f"{number}")
        if kind != "mount":
            other = LocalStore(tmp_path / f"{number}")
            blobstore.pull(f"{server.host}/{number}:v1", "m", store=other)
            assert other.read_manifest("m") == store.read_manifest("m")


@pytest.mark.parametrize("kind", ["look at the tag", "manifest", "blob"])
def test_show_and_list_need_what_they_read_alone(
    registry: Registry, server: RawServer, store: LocalStore, kind: str, tmp_path: Path
) -> None:
    push(server, store)
    address = f"oci://{server.host}/a"
    for status in (200, 308, 403, 404, 500):
        registry.override = answer((HINTS | READ)[kind], status)
        [(name, _)] = list_tags(f"{server.host}/a")
        assert name.reference == "v1"
        try:
            shown = describe_model(f"{address}:v1", store=tmp_path)
        except BlobstoreError as error:
            assert kind != "look at the tag"
            assert str(error).isprintable()
        else:
            assert kind == "look at the tag" or shown.faults


@pytest.mark.parametrize("kind", HINTS)
def test_hint_never_ends_a_push_of_signatures(
    registry: Registry, server: RawServer, store: LocalStore, tmp_path: Path, kind: str
) -> None:
    blobstore.sign("m", key_files(tmp_path).private, store=store)
    push(server, store, "first")
    for status in (400, 403, 404):
        registry.override = answer(HINTS[kind], status)
        push(server, store, f"{status}")
        registry.override = lambda _: None
        other = LocalStore(tmp_path / f"{status}")
        pulled = blobstore.pull(f"{server.host}/{status}:v1", "m", store=other)
        assert pulled.signatures


@pytest.mark.parametrize("kind", ["tags", "token", "login"])
def test_needed_request_of_a_list_or_login_fails_with_one_line(
    registry: Registry, server: RawServer, kind: str
) -> None:
    realm = f'Bearer realm="http://{server.host}/token"'
    path = {"tags": "/tags/list", "token": "/token", "login": "/v2/$"}[kind]
    for status in STATUSES:
        registry.override = answer(("GET", path), status)
        registry.realm = realm if kind == "token" else None
        with RegistryClient(server.host, credentials=GivenLogin(None)) as client:
            if kind == "login" and status == 200:
                client.check_login()
                continue
            with pytest.raises(BlobstoreError) as caught:
                client.check_login() if kind == "login" else list(client.tags("a"))
        assert str(caught.value).isprintable()
        if isinstance(caught.value, RemoteError) and status >= 400:
            assert caught.value.status == status


def test_refused_compressed_form_never_ends_a_pull(
    registry: Registry, server: RawServer, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "store")
    add_blobs(store, "m", {"x": blob(("x", "F32", (2**14,), bytes(2**16)))})
    plain = {str(item.digest) for item in store.resolve("m").blobs}
    blobstore.push(
        "m",
        f"{server.host}/a:v1",
        store=store,
        cold=True,
        registry=RegistryOptions(layout="ollama"),
    )
    whole = blobstore.pull(f"{server.host}/a:v1", "m", store=tmp_path / "whole")
    assert whole.bytes_saved > 0
    cold = {name for _, name in registry.blobs} - plain
    for pattern in ("|".join(cold), r"/manifests/(?!v1)"):
        for status in set(HINT_STATUSES) - {308}:  # which leads nowhere
            registry.override = answer(("GET", pattern), status)
            other = LocalStore(tmp_path / f"{len(pattern)}-{status}")
            blobstore.pull(f"{server.host}/a:v1", "m", store=other)
            assert other.read_manifest("m") == store.read_manifest("m")


@pytest.mark.parametrize("status", [200, 202, 204])
def test_every_success_of_a_manifest_counts(
    registry: Registry, server: RawServer, store: LocalStore, status: int
) -> None:
    def override(request: Received) -> bytes | None:
        is_put = request.method == "PUT" and "/manifests/" in request.path
        return registry.answer(request).replace(b" 201 ", b" %d " % status) if is_put else None

    registry.override = override
    push(server, store)
    assert "a:v1" in registry.manifests


def test_registry_that_stored_another_manifest_is_an_error(
    registry: Registry, server: RawServer, store: LocalStore
) -> None:
    wrong = str(Digest.of(b"other"))
    registry.override = lambda request: (
        reply(201, docker_content_digest=wrong)
        if request.method == "PUT" and "/manifests/" in request.path
        else None
    )
    with pytest.raises(BlobstoreError, match="the registry stored"):
        push(server, store)


@pytest.mark.parametrize("named", [True, False])
def test_blobs_that_a_registry_only_claims_to_have_are_sent(
    registry: Registry, server: RawServer, store: LocalStore, named: bool
) -> None:
    sizes = {str(item.digest): item.size for item in store.resolve("m").blobs}

    def override(request: Received) -> bytes | None:
        digest = request.path.rpartition("/")[2]
        if request.method == "HEAD" and digest in sizes:
            return reply(200, content_length=sizes[digest])
        if request.method == "PUT" and "/manifests/" in request.path and not named:
            answer = registry.answer(request)
            return (
                answer
                if b" 201 " in answer
                else reply(400, b'{"errors": [{"code": "MANIFEST_BLOB_UNKNOWN"}]}')
            )
        return None

    registry.override = override
    pushed = push(server, store)

    assert (pushed.bytes_sent, pushed.bytes_present) == (model_bytes(store), 0)
    assert "a:v1" in registry.manifests


def test_upload_that_is_forgotten_for_ever_is_given_up(
    registry: Registry, server: RawServer, store: LocalStore
) -> None:
    registry.override = answer(NEEDED["end of an upload"], 404)
    with pytest.raises(RemoteError, match="status 404"):
        push(server, store)


def test_start_of_an_upload_may_be_redirected_within_the_registry(
    registry: Registry, server: RawServer, store: LocalStore
) -> None:
    def override(request: Received) -> bytes | None:
        if request.method == "POST" and not request.path.endswith("?here"):
            return reply(308, location=f"{request.path.partition('?')[0]}?here")
        return None

    registry.override = override
    push(server, store)
    registry.override = lambda request: (
        reply(308, location="http://127.0.0.1:1/x") if request.method == "POST" else None
    )
    with pytest.raises(RemoteError, match="to another server"):
        push(server, store, "b")


def test_proxy_that_drops_the_port_is_named(
    registry: Registry, server: RawServer, store: LocalStore
) -> None:
    registry.override = lambda request: (
        reply(202, location="http://127.0.0.1/v2/a/blobs/uploads/1")
        if request.method == "POST"
        else None
    )
    with pytest.raises(RemoteError, match=r"Host \$http_host"):
        push(server, store)


def test_nothing_is_mounted_if_the_user_says_so(server: RawServer, store: LocalStore) -> None:
    push(server, store, "first")
    push(server, store, "second", mount=False)

    assert not [one for one in server.requests if "mount=" in one.path]


def test_small_parts_pass_a_proxy_that_limits_requests(
    server: RawServer, registry: Registry
) -> None:
    sizes: list[int] = []
    sent = bytearray()
    data = bytes(range(250))

    def override(request: Received) -> bytes | None:
        if request.method in ("PATCH", "PUT"):
            sizes.append(len(request.body))
            sent.extend(request.body)
            if len(request.body) > 100:
                return reply(413)
            last = f"0-{len(sent) - 1}"
            status = 202 if request.method == "PATCH" else 201
            return reply(status, location="/v2/a/blobs/uploads/1", range=last)
        return None

    registry.override = override
    with RegistryClient(server.host, part_size=100) as client:
        client.upload_blob("a", Digest.of(data), len(data), lambda offset: (data[offset:],))
    assert sizes == [100, 100, 50, 0]
    assert sent == data
    with (
        RegistryClient(server.host) as client,
        pytest.raises(RemoteRefused, match="--part-size 1MiB") as caught,
    ):
        client.upload_blob("a", Digest.of(data), len(data), lambda offset: (data[offset:],))
    assert caught.value.status == 413


@pytest.mark.parametrize(
    "kind", ["application/json", "application/octet-stream", "text/plain; x=y"]
)
def test_manifest_with_a_general_content_type_is_what_it_says(
    registry: Registry, server: RawServer, store: LocalStore, tmp_path: Path, kind: str
) -> None:
    blobstore.push("m", f"{server.host}/a:v1", store=store)
    registry.manifests = {name: (kind, data) for name, (_, data) in registry.manifests.items()}
    other = LocalStore(tmp_path / "other")
    [notice] = blobstore.pull(f"{server.host}/a:v1", "m", store=other).notices
    assert kind.partition(";")[0] in notice
    assert describe_model(f"oci://{server.host}/a:v1", store=other).notices == (notice,)
    shown = run("show", f"oci://{server.host}/a:v1", "--store", other.root)
    assert notice in shown.stderr
    assert other.read_manifest("m") == store.read_manifest("m")


def test_page_in_place_of_a_manifest_is_named_with_its_address_and_type(
    registry: Registry, server: RawServer, store: LocalStore
) -> None:
    registry.manifests["a:v1"] = ("text/html", b"<html>")
    with pytest.raises(BlobstoreError, match=r"manifest '127.*/a:v1': .* as 'text/html'"):
        blobstore.pull(f"{server.host}/a:v1", "m", store=store)


def test_refused_form_brings_up_the_shape_for_images(
    registry: Registry, server: RawServer, store: LocalStore
) -> None:
    body = b'{"errors": [{"code": "MANIFEST_INVALID", "message": "\\u001b[2J"}]}'
    registry.override = lambda request: (
        reply(400, body) if request.method == "PUT" and "/manifests/" in request.path else None
    )
    with pytest.raises(RemoteRefused, match="'--layout image'") as caught:
        push(server, store)
    assert (caught.value.status, caught.value.code) == (400, "MANIFEST_INVALID")


def test_list_of_referrers_is_found_by_its_tag_if_a_proxy_answers(
    registry: Registry, server: RawServer
) -> None:
    digest = Digest.of(b"x")
    index = b'{"schemaVersion": 2, "mediaType": "%s", "manifests": []}' % OCI_INDEX.encode()
    registry.manifests[f"a:{digest.file_name}"] = (OCI_INDEX, index)
    registry.override = lambda request: (
        reply(200, b"<html>") if "/referrers/" in request.path else None
    )
    with RegistryClient(server.host) as client:
        assert client.referrers("a", digest) == ()
    assert server.requests[-1].path.endswith(digest.file_name)
