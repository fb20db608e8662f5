"""Object storage that denies, lies, stalls or never ends. The worst that it may cause is one clear line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    ModelNotFound,
    RemoteError,
    RemoteRefused,
)
from blobstore.manifests.reference import Reference
from blobstore.objects import client
from blobstore.objects.store import ObjectStore, blob_key, manifest_key
from blobstore.operations.transfer.pull import pull_model
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.faults import disks
from tests.support import frozen, objects
from tests.support.hostile_s3 import (
    KEY,
    SECRET,
    TOKEN,
    HostileS3,
    failure,
    hostile_s3,
    listing,
)
from tests.support.models import add_blobs, blob
from tests.support.objects import no_lease
from tests.support.raw_server import Answer, Received, reply

DATA = bytes(range(256)) * 400
SIZE = len(DATA)
DIGEST = Digest.of(DATA)
NAME = Reference.parse("one")
OBJECT = {"etag": '"x"', "last_modified": "Wed, 12 Aug 2026 10:00:00 GMT"}

Action = Callable[[ObjectStore], object]


def read(store: ObjectStore, begin: int = 0, end: int = SIZE) -> bytes:
    return b"".join(store.read(DIGEST, SIZE, begin, end))


ACTIONS: dict[str, Action] = {
    "get": lambda store: store.read_manifest(NAME),
    "head": lambda store: store.exists(DIGEST, SIZE),
    "range": read,
    "put": lambda store: store.put_blob(Digest.of(b"x"), 1, [b"x"]),
    "parts": lambda store: store.put_blob(Digest.of(bytes(9 << 20)), 9 << 20, [bytes(9 << 20)]),
    "name": lambda store: store.place(NAME, b"{}", None, no_lease),
    "list": lambda store: store.references(),
    "delete": lambda store: store.remove([NAME]),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quick: Any = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(seconds=1)}
    monkeypatch.setattr(client, "_RETRIES", client._RETRIES | {"backoff": quick})
    for name in ("AWS_PROFILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileS3]:
    with hostile_s3() as running:
        running.set_environment(monkeypatch)
        running.objects[f"p/{blob_key(DIGEST)}"] = DATA
        running.objects[f"p/{manifest_key(NAME)}"] = b"{}"
        yield running


@pytest.fixture
def store(server: HostileS3) -> ObjectStore:
    return ObjectStore(server.address)


def refused(action: Callable[[], object], kind: type[BlobstoreError], message: str) -> None:
    """Check that an action fails with one kind of error, in one line without a secret."""
    with pytest.raises(kind, match=message) as caught:
        action()
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 1000
    assert not any(secret in text for secret in (KEY, SECRET, TOKEN))


def always(answer: bytes) -> Callable[[Received], Answer]:
    return lambda _: answer


def blobs_only(answer: Callable[[Received], Answer]) -> Callable[[Received], Answer | None]:
    return lambda request: answer(request) if "/blobs/" in request.path else None


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (failure(403, "AccessDenied"), RemoteRefused, "access denied"),
        (failure(401, "Unauthorized"), RemoteRefused, "access denied"),
        (failure(400, "ExpiredToken"), RemoteRefused, "expired"),
        (failure(403, "ExpiredToken"), RemoteRefused, "expired"),
        (failure(503, "SlowDown"), RemoteError, "the server is overloaded, .* 503"),
        (failure(429, "TooManyRequests"), RemoteError, "overloaded|failed .*429"),
        (failure(500, "InternalError"), RemoteError, "the request failed .status 500"),
        (failure(418, "\x1b[31mCode\nX<" * 50), RemoteError, "failed .status 418"),
        (failure(301, "PermanentRedirect"), RemoteError, "redirect.* AWS_REGION"),
        (b"hello\r\n", RemoteError, "error sending request"),
        (b"", RemoteError, "closed the connection before its answer was complete"),
    ],
    ids=[
        "403",
        "401",
        "400-expired",
        "403-expired",
        "503",
        "429",
        "500",
        "hostile",
        "redirect",
        "garbage",
        "reset",
    ],
)
def test_every_request_that_fails_is_one_line(
    server: HostileS3,
    store: ObjectStore,
    action: str,
    answer: bytes,
    kind: type[BlobstoreError],
    message: str,
) -> None:
    server.disturb = always(answer)
    refused(lambda: ACTIONS[action](store), kind, message)
    assert len(server.server.requests) <= 9


@pytest.mark.parametrize("action", ["get", "range", "put", "parts", "name", "list"])
def test_a_bucket_that_does_not_exist_is_not_a_missing_object(
    server: HostileS3, store: ObjectStore, action: str
) -> None:
    server.disturb = always(failure(404, "NoSuchBucket"))
    refused(lambda: ACTIONS[action](store), RemoteError, "there is no such bucket")


def test_a_model_in_a_bucket_that_does_not_exist_names_the_bucket(
    server: HostileS3, tmp_path: Path
) -> None:
    server.disturb = always(failure(404, "NoSuchBucket"))
    address = f"{server.address}/one"
    refused(lambda: pull_model(address, store=tmp_path), RemoteError, "no such bucket")
    refused(lambda: blobstore.open(address, store=tmp_path), RemoteError, "no such bucket")
    server.disturb = lambda _: None
    refused(lambda: pull_model(f"{server.address}/two", store=tmp_path), ModelNotFound, "no model")


def test_requests_that_are_throttled_for_a_while_succeed(
    server: HostileS3, store: ObjectStore
) -> None:
    answers = itertools.chain([failure(503, "SlowDown")] * 5, itertools.repeat(None))
    server.disturb = lambda _: next(answers)
    assert read(store) == DATA


def test_a_body_that_is_cut_goes_on_where_it_ended(server: HostileS3, store: ObjectStore) -> None:
    cuts = itertools.count()

    def cut(request: Received) -> bytes:
        answer = server.right_answer(request)
        return answer[: answer.index(b"\r\n\r\n") + 1000] if next(cuts) < 3 else answer

    server.disturb = blobs_only(cut)
    assert read(store) == DATA


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply(200, DATA, **OBJECT), "non-partial response"),
        (reply(200, DATA[:10], **OBJECT), "non-partial response"),
        (reply(206, DATA, content_range=f"bytes 100-199/{SIZE}", **OBJECT), "more bytes than"),
        (reply(206, DATA, content_range=f"bytes 0-{SIZE - 1}/{SIZE}", **OBJECT), "Requested"),
        (reply(206, DATA[100:200], **OBJECT), "Content-Range"),
        (reply(206, DATA[100:200], content_range="bytes x", **OBJECT), "CONTENT_RANGE"),
        (reply(206, DATA[:9], content_range=f"bytes 100-199/{SIZE}", **OBJECT), "ends at byte 109"),
        (
            reply(
                206, b"x", content_length=10**15, content_range=f"bytes 100-199/{SIZE}", **OBJECT
            ),
            "closed the connection before its answer was complete",
        ),
    ],
    ids=["200", "200-short", "too-many", "other-range", "no-range", "garbage", "too-few", "cut"],
)
def test_sizes_that_lie_are_refused(
    server: HostileS3, store: ObjectStore, answer: bytes, message: str
) -> None:
    server.disturb = blobs_only(always(answer))
    refused(lambda: read(store, 100, 200), BlobstoreError, message)


def test_a_body_that_stalls_is_refused(server: HostileS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_STALL", "100ms")
    monkeypatch.setattr(client, "_RETRIES", client._RETRIES | {"max_retries": 1})

    def stall(request: Received) -> Iterator[bytes]:
        yield server.right_answer(request)[:-1]
        server.server.closing.wait(10)

    server.disturb = blobs_only(stall)
    store = ObjectStore(server.address)
    # Also the head may come too late on a busy machine.
    refused(lambda: read(store), RemoteError, "body error|error sending request")


@pytest.mark.parametrize(
    "key",
    [
        "other/manifests/host/space/model/tag",
        "p/manifestsX/host/space/model/tag",
        "p/manifests/" + "x" * 5000,
        "p/manifests/registry.ollama.ai/library/-x/latest",
        "/absolute",
        "",
    ],
)
def test_keys_that_are_not_names_are_skipped(
    server: HostileS3, store: ObjectStore, key: str
) -> None:
    server.disturb = always(listing({key: 1, f"p/{manifest_key(NAME)}": 2}))
    assert store.references() == [NAME]


@pytest.mark.parametrize(
    "key", ["p/manifests/a/b/c/\x7f", "p/manifests/../../etc/passwd", "p/manifests//x"]
)
def test_a_list_with_keys_of_no_path_is_refused(
    server: HostileS3, store: ObjectStore, key: str
) -> None:
    server.disturb = always(listing({key: 1}))
    refused(store.references, RemoteError, "invalid path")


@pytest.mark.parametrize(
    "body", [b"<html>\x00\xff", b"", b"<a>" * 9, listing({"p/manifests/x": -1})[-300:]]
)
def test_a_malformed_list_is_refused(server: HostileS3, store: ObjectStore, body: bytes) -> None:
    server.disturb = always(reply(200, body))
    refused(store.references, RemoteError, "invalid list response")


def test_a_list_that_repeats_itself_is_refused(server: HostileS3, store: ObjectStore) -> None:
    page = listing({f"p/manifests/a/b/c/{number:04}": 1 for number in range(1000)}, "again")
    server.disturb = always(page)
    refused(store.references, RemoteError, "a list without end")
    assert len(server.server.requests) <= 3


def test_a_list_without_end_is_refused(
    server: HostileS3, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_MAX_LISTED", 5000)
    numbers = itertools.count()
    server.disturb = lambda _: listing(
        {f"p/manifests/a/b/c/{next(numbers):09}": 1 for _ in range(1000)}, "more"
    )
    refused(store.references, RemoteError, "a list without end")


def test_a_server_that_ignores_conditions_gets_no_name(server: HostileS3, tmp_path: Path) -> None:
    local = LocalStore(tmp_path / "store")
    frozen.put(local, "two", {"x": 1})
    server.honours_conditions = False
    before = set(server.objects)
    refused(
        lambda: push_model("two", server.address, store=local),
        RemoteError,
        "ignores conditional requests.* use a server",
    )
    assert set(server.objects) - before == {"p/.blobstore/probe"}
    store = ObjectStore(server.address)
    refused(lambda: store.place(NAME, b"[]", None, no_lease), RemoteError, "ignores conditional")
    assert store.read_manifest(NAME) == b"{}"


def test_rclone_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalStore(tmp_path / "store")
    frozen.put(local, "two", {"x": 1})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with objects.running_rclone(tmp_path / "served") as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        refused(
            lambda: push_model("two", "s3://models/p", store=local),
            RemoteError,
            "ignores conditional requests.* use a server",
        )
    assert not (tmp_path / "served/models/p/manifests").exists()


def test_conditions_are_checked_once_for_each_client(server: HostileS3, store: ObjectStore) -> None:
    for number in range(3):
        store.place(Reference.parse(f"m{number}"), b"{}", None, no_lease)
    probes = [one for one in server.server.requests if "probe" in one.path]
    assert len(probes) == 3


def write_credentials(path: Path, token: str) -> None:
    path.write_text(
        f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
        f"aws_session_token = {token}\n"
    )


@pytest.mark.parametrize("action", ["get", "head", "range", "put", "name", "list", "delete"])
@pytest.mark.parametrize("status", [400, 403])
def test_credentials_that_were_renewed_in_the_file_are_used(
    server: HostileS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    status: int,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    write_credentials(tmp_path / "credentials", "old-token")
    store = ObjectStore(server.address)

    def check(request: Received) -> Answer | None:
        is_new = request.headers.get("x-amz-security-token") == "new-token"
        return None if is_new else failure(status, "ExpiredToken")

    server.disturb = check
    refused(lambda: ACTIONS[action](store), RemoteRefused, "expired")
    write_credentials(tmp_path / "credentials", "new-token")
    ACTIONS[action](store)


def test_keys_of_the_environment_come_before_the_profile(
    server: HostileS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text("[other]\naws_access_key_id = wrong-key\n")
    monkeypatch.setenv("AWS_PROFILE", "other")
    read(ObjectStore(server.address))
    assert KEY in server.server.requests[-1].headers["authorization"]


def test_a_public_bucket_is_read_without_a_signature(
    server: HostileS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    refused(lambda: ObjectStore(server.address), RemoteRefused, "there are no credentials")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert read(ObjectStore(server.address)) == DATA
    assert "authorization" not in server.server.requests[-1].headers


def test_a_broken_credentials_file_is_named_without_its_content(
    server: HostileS3, tmp_path: Path
) -> None:
    (tmp_path / "credentials").write_text(f"[default]\n{SECRET}\n")
    refused(lambda: ObjectStore(server.address), RemoteError, "is not a valid file of AWS")


def damaged(server: HostileS3, tmp_path: Path) -> tuple[LocalStore, str]:
    """Push a model, and return its store and the key of a tensor's blob."""
    local = LocalStore(tmp_path / "local")
    frozen.put(local, "two", {"x": 1, "y": 2})
    push_model("two", server.address, store=local)
    blob = max(local.resolve("two").blobs, key=lambda item: item.size)
    return local, f"p/{blob_key(blob.digest)}"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda data: data[:-1], BlobDamaged),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), BlobDamaged),
        (lambda data: data + b"x", BlobDamaged),
        (lambda _: None, BlobMissing),
    ],
    ids=["truncated", "changed", "longer", "missing"],
)
def test_a_blob_that_is_not_what_was_pushed_is_never_kept(
    server: HostileS3, tmp_path: Path, change: Callable[[bytes], bytes | None], kind: Any
) -> None:
    local, key = damaged(server, tmp_path)
    changed = change(server.objects.pop(key))
    if changed is not None:
        server.objects[key] = changed
    other = LocalStore(tmp_path / "other")
    digest = key.rpartition("-")[2]
    address = f"{server.address}/two"
    refused(lambda: pull_model(address, store=other), kind, digest)
    assert not other.has_model("two")
    assert not other.has(Digest.parse(f"sha256:{digest}"))

    def load() -> None:
        with blobstore.open(address, store=other, framework="numpy") as model:
            for name in model:
                assert model[name] is not None

    refused(load, kind, digest)
    assert not other.has(Digest.parse(f"sha256:{digest}"))
    push_model("two", server.address, store=local)
    if change(b"ab") == b"a":  # a blob of another size is sent again
        assert pull_model(address, store=other).bytes_fetched


def test_a_redirect_takes_no_signature_to_another_host(
    server: HostileS3, store: ObjectStore
) -> None:
    with hostile_s3() as other:
        other.objects |= server.objects
        server.disturb = lambda request: reply(
            307, location=f"http://{other.server.host}{request.path}"
        )
        assert read(store) == DATA
        (received,) = other.server.requests
        assert "authorization" not in received.headers
        refused(lambda: ACTIONS["put"](store), RemoteError, "redirects")


def test_a_full_disk_keeps_nothing_and_loads_the_model(server: HostileS3, tmp_path: Path) -> None:
    if reason := disks.why_not():
        pytest.skip(reason)
    local = LocalStore(tmp_path / "local")
    add_blobs(local, "two", {"x": blob(("x", "U8", (3 << 20,), bytes(range(256)) * (3 << 12)))})
    push_model("two", server.address, store=local)
    with disks.in_memory(tmp_path / "disk", 2 << 20) as disk:
        other = LocalStore(disk / "store")
        with blobstore.open(f"{server.address}/two", store=other, framework="numpy") as model:
            assert bytes(model["x"].data) == bytes(range(256)) * (3 << 12)
        assert not any(
            other.has(item.digest) for item in local.resolve("two").blobs if item.size > 1 << 20
        )
