"""What the answers to the requests of commands mean: one server that gives every answer to every request."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError, Conflict, RemoteError, RemoteRefused
from blobstore.manifests.reference import Reference
from blobstore.objects import client, conditional_writes
from blobstore.objects.address import StoreAddress
from blobstore.objects.source import ObjectSource
from blobstore.objects.store import ObjectStore, manifest_key
from blobstore.operations.describe.show import describe_model
from blobstore.operations.maintenance.gc_objects import collect_objects
from blobstore.operations.transfer.pull import pull_model
from blobstore.operations.transfer.push import push_model
from blobstore.remotes.catalog import read_remote_catalog
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.hostile_s3 import DATE, Disturb, HostileS3, action_of, failure, hostile_s3
from tests.support.objects import no_lease
from tests.support.raw_server import Received, reply

ROOT = Path(__file__).parents[3]
NAME = Reference.parse("one")
KEY = f"p/{manifest_key(NAME)}"
ANSWERS = {
    **{str(status): failure(status, "Code") for status in (307, 400, 401, 403, 404)},
    **{str(status): failure(status, "Code") for status in (405, 406, 409, 412, 413)},
    **{str(status): failure(status, "Code") for status in (416, 429, 500, 503)},
    "no answer": b"",
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_RETRIES", {"max_retries": 0})
    monkeypatch.setattr(conditional_writes, "_PAUSE", 0)
    # The keys are in the environment; without botocore, these commands take a third of the time.
    monkeypatch.setitem(sys.modules, "botocore.session", None)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileS3]:
    with hostile_s3() as running:
        running.set_environment(monkeypatch)
        yield running


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "local")
    frozen.put(store, "one", {"x": 1})
    store.keep_signature(Digest.of(store.read_manifest("one")), b"signature", is_verified=True)
    return store


Command = Callable[[HostileS3, LocalStore, Path], object]


def push(server: HostileS3, local: LocalStore, _: Path) -> object:
    return push_model("one", server.address, store=local)


def pull(server: HostileS3, _: LocalStore, folder: Path) -> object:
    done = pull_model(f"{server.address}/one", store=folder)
    assert LocalStore(folder).has_model(NAME)
    return done


def load(server: HostileS3, _: LocalStore, folder: Path) -> object:
    with blobstore.open(f"{server.address}/one", store=folder) as model:
        return {name: tensor.tobytes() for name, tensor in model.tensors().items()}


def show(server: HostileS3, _: LocalStore, folder: Path) -> object:
    return describe_model(f"{server.address}/one", store=folder)


def remove(server: HostileS3, *_: object) -> None:
    found = ObjectSource.locate(f"{server.address}/one")
    found[0].remove([found[1].reference])


def kind_of(request: Received) -> str:
    """Return the method and the kind of key of a request."""
    url = urlsplit(request.path)
    key = unquote(url.path).removeprefix("/models").removeprefix("/p/")
    if "list-type" in url.query:
        key = url.query.partition("prefix=")[2].partition("&")[0]
        return f"LIST {unquote(key).removeprefix('p/').partition('/sha')[0].rstrip('/')}"[:30]
    if url.query == "delete":
        return "DELETE"
    folder = key.rpartition("/")[0] if key.startswith(".blobstore/") else key.partition("/")[0]
    condition = {"if-match", "if-none-match"} & request.headers.keys()
    name = "note of gc" if key == ".blobstore/gc" else folder if folder != ".blobstore" else key
    if name.startswith(".blobstore/signatures"):
        name = ".blobstore/signatures"
    return f"{request.method} {name}{' on condition' if condition else ''}"


NEEDED = {
    "push": {
        "PUT .blobstore/probe on condition",
        "PUT .blobstore/leases",
        "HEAD .blobstore/leases",
        "HEAD note of gc",
        "PUT blobs",
        "PUT manifests on condition",
        "PUT .blobstore/signatures",
        "GET manifests",
    },
    "pull": {"GET manifests", "GET blobs"},
    "load": {"GET manifests", "GET blobs"},
    "show": {"GET manifests"},
}
"""The requests whose failure ends a command; all others are hints."""
COMMANDS: dict[str, Command] = {"push": push, "pull": pull, "load": load, "show": show}
MAY_BE_ABSENT = {"GET manifests", "HEAD note of gc"}
"""What ``push`` needs unless it is absent or denied."""


def always(answer: bytes) -> Disturb:
    return lambda _: answer


def answering(kind: str, answer: bytes) -> Disturb:
    return lambda request: answer if kind_of(request) == kind else None


def kinds(server: HostileS3, run: Callable[[], object]) -> list[str]:
    """Return the kinds of the requests of a command that succeeds."""
    server.server.requests.clear()
    run()
    return sorted(set(map(kind_of, server.server.requests)))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_request_may_get_every_answer(
    server: HostileS3, local: LocalStore, tmp_path: Path, command: str
) -> None:
    if command != "push":
        push(server, local, tmp_path)
    numbers = itertools.count()

    def run() -> object:
        return COMMANDS[command](server, local, tmp_path / str(next(numbers)))

    before = dict(server.objects)
    seen = kinds(server, run)
    needed = NEEDED[command]
    assert needed <= set(seen)
    assert set(seen) - needed, "every command has hints"
    turn = list(COMMANDS).index(command)
    for number, (kind, (label, answer)) in enumerate(itertools.product(seen, ANSWERS.items())):
        if kind not in needed and number % len(COMMANDS) != turn:
            continue  # the commands share the answers to hints
        server.objects = dict(before)
        server.disturb = answering(kind, answer)
        is_absent = label[:3] in {"401", "403", "404"}
        may_fail = kind in needed
        must_fail = may_fail and not (is_absent and command == "push" and kind in MAY_BE_ABSENT)
        if kind == "PUT .blobstore/probe on condition" and label in {"304", "404", "409", "412"}:
            must_fail = False  # what a server answers that refuses the condition
        try:
            run()
        except BlobstoreError as error:
            text = str(error)
            assert may_fail, f"{kind} was answered with {label}: {text}"
            assert text.isprintable()
            assert len(text) < 1000
        else:
            assert not must_fail, f"{kind} was answered with {label}"
    server.disturb = lambda _: None
    run()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hint_that_is_answered_with_nonsense_never_ends_a_command(
    server: HostileS3, local: LocalStore, tmp_path: Path, command: str
) -> None:
    push(server, local, tmp_path)
    numbers = itertools.count()

    def run() -> object:
        return COMMANDS[command](server, local, tmp_path / str(next(numbers)))

    hints = set(kinds(server, run)) - NEEDED[command]
    for kind, body in itertools.product(sorted(hints), (b"", b"<html>", b"null", b"[" * 5000)):
        server.disturb = answering(kind, reply(200, body, etag='"x"', last_modified=DATE))
        run()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hint_does_not_hide_that_nothing_can_succeed(
    server: HostileS3, local: LocalStore, tmp_path: Path, command: str
) -> None:
    push(server, local, tmp_path)
    for code, message in {
        "NoSuchBucket": "there is no such bucket",
        "InvalidAccessKeyId": "does not accept the credentials",
        "SignatureDoesNotMatch": "does not accept the credentials",
        "ExpiredToken": "the credentials have expired",
        "RequestTimeTooSkewed": "the clock of this machine .*; set the clock",
    }.items():
        server.disturb = always(failure(403, code))
        with pytest.raises(RemoteError, match=message):
            COMMANDS[command](server, local, tmp_path / code)
    with pytest.raises(RemoteError, match="the clock"):
        push_model("one", server.address, store=local, dry_run=True)


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_every_write_that_succeeds_may_be_answered_with_any_2xx(
    server: HostileS3, local: LocalStore, tmp_path: Path, status: int
) -> None:
    def answer(request: Received) -> bytes | None:
        if request.method != "PUT":
            return None
        right = server.right_answer(request)
        return reply(status) if right.startswith(b"HTTP/1.1 200") else right

    server.disturb = answer
    push(server, local, tmp_path)
    server.disturb = lambda _: None
    pull(server, local, tmp_path / "pulled")


# Rights

RIGHTS: dict[str, tuple[Command, set[str]]] = {
    "show": (show, {"s3:GetObject"}),
    "open": (load, {"s3:GetObject"}),
    "pull": (pull, {"s3:GetObject"}),
    "push": (push, {"s3:GetObject", "s3:PutObject"}),
    "list": (
        lambda server, *_: read_remote_catalog(str(server.address)),
        {"s3:ListBucket", "s3:GetObject"},
    ),
    "rm": (remove, {"s3:GetObject", "s3:DeleteObject"}),
    "gc --remote": (
        lambda server, *_: collect_objects(str(server.address), older_than=0),
        {"s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket"},
    ),
}


@pytest.mark.parametrize("command", RIGHTS)
def test_a_command_needs_these_rights_and_no_others(
    server: HostileS3, local: LocalStore, tmp_path: Path, command: str
) -> None:
    run, rights = RIGHTS[command]
    push(server, local, tmp_path)
    if command == "push":
        frozen.put(local, "one", {"x": 3})
    server.allow(*rights)
    run(server, local, tmp_path / "all")
    server.disturb = lambda _: None
    push(server, local, tmp_path)
    for missing in rights:
        server.allow(*(rights - {missing}))
        with pytest.raises(RemoteRefused, match=f"access denied.*{missing}"):
            frozen.put(local, "one", {"x": 4})
            run(server, local, tmp_path / "fewer")


def test_the_documented_rights_are_those() -> None:
    text = (ROOT / "docs/guides/object-storage.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*) \| (`s3:[^|]*) \|", text, re.MULTILINE)
    documented = {
        command: set(re.findall(r"`(s3:\w+)`", rights))
        for commands, rights in rows
        for command in re.findall(r"`([^`]+)`", commands)
    }
    for command, (_, rights) in RIGHTS.items():
        assert documented[command] == rights, command


def test_a_push_without_the_right_to_list_does_not_overwrite_what_it_cannot_see(
    server: HostileS3, local: LocalStore, tmp_path: Path
) -> None:
    push(server, local, tmp_path)
    frozen.put(local, "one", {"x": 3})
    former = server.objects[KEY]

    def deny(request: Received) -> bytes | None:
        is_name = request.method in {"GET", "HEAD"} and "/manifests/" in request.path
        return failure(403, "AccessDenied") if is_name else None

    server.disturb = deny
    with pytest.raises(RemoteError, match="although nobody else has written it.*s3:GetObject"):
        push(server, local, tmp_path)
    assert server.objects[KEY] == former


# Conditions


def test_a_conditional_write_that_must_be_repeated_is_repeated(
    server: HostileS3, local: LocalStore, tmp_path: Path
) -> None:
    left = [3]

    def busy(request: Received) -> bytes | None:
        if request.method == "PUT" and "/manifests/" in request.path and left[0]:
            left[0] -= 1
            return failure(409, "ConditionalRequestConflict")
        return None

    server.disturb = busy
    push(server, local, tmp_path)
    assert server.objects[KEY] == local.read_manifest("one")
    left[0] = 3
    frozen.put(local, "one", {"x": 3})
    push(server, local, tmp_path)
    assert server.objects[KEY] == local.read_manifest("one")


@pytest.mark.parametrize("status", [409, 412])
def test_a_write_that_is_refused_again_and_again_is_no_conflict(
    server: HostileS3, local: LocalStore, tmp_path: Path, status: int
) -> None:
    server.disturb = lambda request: (
        failure(status) if request.method == "PUT" and "/manifests/" in request.path else None
    )
    with pytest.raises(RemoteError, match="although nobody else has written it") as caught:
        push(server, local, tmp_path)
    assert not isinstance(caught.value, Conflict)


@pytest.mark.parametrize("theirs", [b"[]", b"x" * 100_000])
def test_a_write_of_another_process_is_a_conflict_whatever_its_size(
    server: HostileS3, theirs: bytes
) -> None:
    store = ObjectStore(server.address)
    store.place(NAME, b"{}", None, no_lease)
    _, tag = store.read_version(NAME)
    server.objects[KEY] = theirs
    with pytest.raises(Conflict, match="was written by another process"):
        store.place(NAME, b"[1]", tag, no_lease)
    assert server.objects[KEY] == theirs


def test_a_write_whose_answer_was_lost_succeeds(server: HostileS3) -> None:
    def lose(request: Received) -> bytes | None:
        if request.method == "PUT" and "/manifests/" in request.path:
            server.right_answer(request)
            return failure(412, "PreconditionFailed")
        return None

    server.disturb = lose
    ObjectStore(server.address).place(NAME, b"{}", None, no_lease)


def test_tags_that_a_proxy_has_weakened_are_compared_as_the_server_does(
    server: HostileS3, local: LocalStore, tmp_path: Path
) -> None:
    def weaken(request: Received) -> bytes | None:
        if request.method == "PUT":
            return None
        return re.sub(rb'\r\netag: (")', rb"\r\netag: W/\1", server.right_answer(request))

    server.disturb = weaken
    for number in range(3):
        frozen.put(local, "one", {"x": number})
        push(server, local, tmp_path)
        assert server.objects[KEY] == local.read_manifest("one")


# What is read


def test_signatures_are_read_as_they_were_kept(server: HostileS3) -> None:
    store = ObjectStore(server.address)
    manifest = Digest.of(b"manifest")
    kept = [b"one", b"two"]
    for data in kept:
        store.keep_signature(manifest, data)
    store.keep_signature(Digest.of(b"other"), b"three")
    assert sorted(store.read_signatures(manifest)) == kept
    for key in server.objects:
        if server.objects[key] == b"one":
            server.objects[key] = b"altered"
    assert list(store.read_signatures(manifest)) == [b"two"]


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, "KMS.DisabledException", "the key that encrypts.*400, KMS.DisabledException"),
        (403, "RequestTimeTooSkewed", "the clock of this machine"),
        (403, "AccessDenied", "s3:GetObject .*AWS_REQUEST_PAYER"),
        (418, "A.B-c_1", r"418, A\.B-c_1"),
        (400, "", "access denied"),
        (401, "", "access denied"),
        (429, "SlowDown", "overloaded"),
        (503, "SlowDown", "overloaded"),
        (500, "InternalError", "the request failed"),
        (307, "", "redirects to another place"),
        (404, "NoSuchBucket", "no such bucket"),
        (404, "NoSuchKey", "has no model"),
    ],
)
def test_a_refusal_to_read_says_what_to_do(
    server: HostileS3, status: int, code: str, message: str
) -> None:
    server.disturb = lambda _: failure(status, code)
    with pytest.raises(BlobstoreError, match=message):
        ObjectStore(server.address).read_manifest(NAME)


def test_more_bytes_than_were_asked_for_are_refused(server: HostileS3) -> None:
    server.disturb = lambda _: reply(206, b"x" * 20, content_range="bytes 0-9/30", etag='"x"')
    with pytest.raises(RemoteError, match="more bytes than asked for"):
        ObjectStore(server.address).client.read("x", 0, 10)


def test_an_object_that_is_larger_than_expected_is_refused(server: HostileS3) -> None:
    server.objects["p/x"] = b"123"
    with pytest.raises(RemoteError, match="3 bytes, expected at most 2"):
        ObjectStore(server.address).client.get("x", 2)


def test_names_in_a_folder_are_replaced_only_if_they_are_those_that_were_read(
    tmp_path: Path,
) -> None:
    store = ObjectStore(StoreAddress.parse(f"file://{tmp_path}/objects"))
    store.place(NAME, b"{}", None, no_lease)
    _, tag = store.read_version(NAME)
    store.place(NAME, b"[1]", tag, no_lease)
    for old in (tag, None):
        with pytest.raises(Conflict):
            store.place(NAME, b"[2]", old, no_lease)
    assert store.read_manifest(NAME) == b"[1]"


def test_a_refusal_to_write_names_encryption(server: HostileS3) -> None:
    server.disturb = lambda _: failure(403, "AccessDenied")
    with pytest.raises(RemoteRefused, match="s3:PutObject; .*AWS_SERVER_SIDE_ENCRYPTION"):
        ObjectStore(server.address).client.put("x", b"")


def test_the_server_of_these_tests_knows_the_rights_of_requests(server: HostileS3) -> None:
    store = ObjectStore(server.address)
    store.client.put("x", b"1")
    store.client.get("x", 1)
    store.references()
    store.client.delete(["x"])
    found: list[Any] = [action_of(request) for request in server.server.requests]
    assert found == ["s3:PutObject", "s3:GetObject", "s3:ListBucket", "s3:DeleteObject"]
