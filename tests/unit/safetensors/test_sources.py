"""Files that are not files: buffers, objects that read, and web servers, well-behaved or not."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobstore.safetensors import SafetensorError, safe_open, sources
from blobstore.safetensors.numpy import load_file, save
from tests.support.raw_server import Answer, RawServer, Received, reply

TENSORS: dict[str, Any] = {
    "a": np.arange(200_000, dtype=np.float32).reshape(500, 400),
    "b": np.arange(6, dtype=np.int8).reshape(2, 3),
}
FILE = save(TENSORS, {"x": "y"})


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.frombuffer])
def test_a_buffer_is_opened_without_a_copy(kind: Callable[[bytes], Any]) -> None:
    data = np.frombuffer(FILE, np.uint8) if kind is np.frombuffer else kind(FILE)
    with safe_open(data, "np") as file:
        assert file.metadata() == {"x": "y"}
        found = file.get_tensor("a")
        assert np.array_equal(found, TENSORS["a"])
        assert np.shares_memory(found, np.frombuffer(data, np.uint8))


def test_torch_gets_a_copy_of_a_buffer_that_must_not_change() -> None:
    data = bytes(bytearray(FILE))
    with safe_open(data, "pt") as file:
        file.get_tensor("b").add_(1)
        assert torch.equal(file.get_slice("b")[1], torch.tensor([4, 5, 6], dtype=torch.int8))
    assert data == FILE


@pytest.mark.parametrize("data", [b"", b"abc", FILE[:-1], FILE + b"x"])
def test_bytes_that_break_the_format_are_refused(data: bytes) -> None:
    for file in (data, io.BytesIO(data)):
        with pytest.raises(SafetensorError):
            safe_open(file, "np")


class Reading:
    """A file object with few methods, and short reads."""

    def __init__(self, data: bytes) -> None:
        self._inner = io.BytesIO(data)
        self.seek = self._inner.seek

    def read(self, size: int) -> Any:
        return self._inner.read(min(size, 1000))


@pytest.mark.parametrize("kind", [io.BytesIO, Reading])
def test_a_file_object_is_read_where_it_must_be(kind: Callable[[bytes], Any]) -> None:
    with safe_open(kind(FILE), "np") as file:
        assert np.array_equal(file["a"], TENSORS["a"])
        assert file.get_slice("b")[:, 1].tolist() == [1, 4]
    assert load_file(kind(FILE)).keys() == TENSORS.keys()


def test_an_open_file_is_not_closed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(FILE)
    with path.open("rb") as stream:
        with safe_open(stream, "np") as file:
            assert file.get_slice("b")[0, 0] == 0
        assert not stream.closed


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda _: "text", TypeError),
        (lambda _: b"", SafetensorError),
        (lambda size: bytes(size + 1), SafetensorError),
    ],
)
def test_a_file_object_that_lies_is_refused(read: Any, error: type[Exception]) -> None:
    stream = io.BytesIO(FILE)
    file = safe_open(stream, "np")
    stream.read = read  # type: ignore[method-assign]
    with pytest.raises(error):
        file.get_tensor("a")


class Web:
    """A web server that has the file at ``/file``, and records what it is asked for."""

    def __init__(self) -> None:
        self.data = FILE
        self.headers: dict[str, object] = {"etag": '"1"'}
        self.disturb: Callable[[Received], Answer | None] = lambda _: None
        self.ranges: list[tuple[int, int]] = []
        self.server = RawServer(self.answer)

    @property
    def url(self) -> str:
        return f"http://{self.server.host}/file"

    def answer(self, request: Received) -> Answer:
        disturbed = self.disturb(request)
        if disturbed is not None:
            return disturbed
        if request.path != "/file":
            return reply(404)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["range"])
        assert found
        begin, last = int(found[1]), min(int(found[2]), len(self.data) - 1)
        self.ranges.append((begin, last + 1))
        return part(self.data[begin : last + 1], begin, len(self.data), **self.headers)


def part(data: bytes, begin: int, size: int, **headers: object) -> bytes:
    return reply(
        206, data, content_range=f"bytes {begin}-{begin + len(data) - 1}/{size}", **headers
    )


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(sources, "_PAUSE", 0.0)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Web()
    with server.server:
        yield server


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_a_web_server_is_asked_for_what_is_read(web: Web, framework: str) -> None:
    with safe_open(web.url, framework) as file:
        assert file.keys() == ["a", "b"]
        assert web.ranges == [(0, 1 << 16)]
        row = np.asarray(file.get_slice("a")[-1])
        assert np.array_equal(row, TENSORS["a"][-1])
        assert web.ranges[1:] == [(len(FILE) - 6 - 1600, len(FILE) - 6)]
        assert np.array_equal(np.asarray(file.get_tensor("a")), TENSORS["a"])


def test_neighbouring_ranges_are_merged(web: Web) -> None:
    with safe_open(web.url, "np") as file:
        column = file.get_slice("a")[100:, 7]
        assert np.array_equal(column, TENSORS["a"][100:, 7])
        assert len(web.ranges) == 2


def test_a_web_file_is_prefetched(web: Web) -> None:
    with safe_open(web.url, "np") as file:
        found = dict(file.prefetch({"a": slice(250, None), "b": None}))
    assert np.array_equal(found["a"], TENSORS["a"][250:])
    assert np.array_equal(found["b"], TENSORS["b"])
    assert len(web.ranges) == 2


def test_redirects_are_followed_once_until_they_expire(web: Web) -> None:
    asked: list[str] = []

    def disturb(request: Received) -> Answer | None:
        asked.append(request.path)
        if request.path == "/start":
            return reply(302, location=web.url)
        return reply(403) if asked.count("/file") == 3 else None

    web.disturb = disturb
    with safe_open(web.url.replace("/file", "/start"), "np") as file:
        for _ in range(3):
            file.get_slice("a")[-1]
    assert asked == ["/start", "/file", "/file", "/file", "/start", "/file", "/file"]


@pytest.mark.parametrize(
    "failure", [reply(503), reply(429), b"", part(FILE[: 1 << 16], 0, len(FILE))[:-5]]
)
def test_failures_that_pass_are_tried_again(web: Web, failure: bytes) -> None:
    failures = [failure, failure]
    web.disturb = lambda _: failures.pop() if failures else None
    with safe_open(web.url, "np") as file:
        assert np.array_equal(file["b"], TENSORS["b"])


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (reply(404), FileNotFoundError, "No such file.*status 404"),
        (reply(403), PermissionError, "denies access"),
        (reply(401), PermissionError, "denies access"),
        (reply(500), OSError, "answers with status 500"),
        (reply(418), OSError, "answers with status 418"),
        (reply(416), SafetensorError, "is empty"),
        (b"", OSError, "cannot be read"),
        (b"\xff" * 100_000, OSError, "cannot be read"),
        (reply(200, FILE), SafetensorError, "does not support range requests"),
        (reply(206, FILE), SafetensorError, "does not support range requests"),
        (reply(206, b"x", content_range="bytes 0-0/*"), SafetensorError, "does not support"),
        (part(FILE[1:9], 1, len(FILE)), SafetensorError, "sends bytes 1 to 8"),
        (part(FILE[:9], 0, len(FILE)), SafetensorError, "sends bytes 0 to 8"),
        (part(FILE[:9], 0, 10**19), SafetensorError, "sends bytes 0 to 8"),
        (part(FILE[:70], 0, 70), SafetensorError, "header"),
        (reply(302, location="file:///etc/passwd"), OSError, "status 302|redirects to"),
        (reply(302, location="ftp://x/y"), OSError, "status 302|redirects to"),
        (reply(302, location="/file"), OSError, "cannot be read|status 302"),
    ],
)
def test_a_server_that_refuses_or_lies_gets_one_clear_line(
    web: Web, answer: bytes, error: type[Exception], message: str
) -> None:
    web.disturb = lambda _: answer
    with pytest.raises(error, match=message) as caught:
        safe_open(web.url, "np")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [reply(403), reply(404), reply(500), reply(200, FILE)])
def test_errors_do_not_show_the_signature_of_an_address(web: Web, answer: bytes) -> None:
    web.disturb = lambda _: answer
    with pytest.raises((OSError, SafetensorError)) as caught:
        safe_open(web.url + "?X-Amz-Signature=secret", "np")
    assert "secret" not in str(caught.value)
    assert web.url in str(caught.value)


@pytest.mark.parametrize("user", ["alice:secret@", "secret@", "secret:@"])
def test_an_address_with_a_user_is_refused_before_anything_is_sent(web: Web, user: str) -> None:
    with pytest.raises(SafetensorError, match="user names and passwords in addresses") as caught:
        safe_open(web.url.replace("//", f"//{user}"), "np")
    assert "secret" not in str(caught.value)
    assert not web.ranges


def test_a_malformed_address_is_refused() -> None:
    with pytest.raises(SafetensorError, match=r"is not an address: Invalid IPv6 URL"):
        safe_open("http://[/file", "np")


def test_errors_do_not_show_the_fragment_of_an_address(web: Web) -> None:
    web.disturb = lambda _: reply(404)
    with pytest.raises(FileNotFoundError) as caught:
        safe_open(web.url + "#token=secret", "np")
    assert "secret" not in str(caught.value)


def test_a_compressed_range_is_refused(web: Web) -> None:
    with safe_open(web.url, "np") as file:
        web.headers["content_encoding"] = "gzip"
        with pytest.raises(SafetensorError, match="the encoding 'gzip', which was not accepted"):
            file.get_tensor("a")


@pytest.mark.parametrize(
    "change",
    [lambda web: web.headers.update(etag='"2"'), lambda web: setattr(web, "data", FILE + b"x")],
)
def test_a_file_that_changes_is_noticed(web: Web, change: Callable[[Web], object]) -> None:
    with safe_open(web.url, "np") as file:
        change(web)
        with pytest.raises(SafetensorError, match="has changed while it was read"):
            file.get_tensor("a")


def test_a_body_without_end_is_cut_off(web: Web) -> None:
    def unending(_: Received) -> Iterator[bytes]:
        yield part(FILE[: 1 << 16], 0, len(FILE), content_length=None)
        while not web.server.closing.is_set():
            yield bytes(1 << 16)

    web.disturb = unending
    with safe_open(web.url, "np") as file:
        assert file.keys() == ["a", "b"]


def test_a_server_that_stalls_is_left(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_TIMEOUT", 0.1)
    threads = threading.active_count()

    def stall(_: Received) -> Iterator[bytes]:
        yield part(FILE[: 1 << 16], 0, len(FILE))[:300]
        web.server.closing.wait(20)

    web.disturb = stall
    with pytest.raises(OSError, match="timed out"):
        safe_open(web.url, "np")
    assert threading.active_count() >= threads


def test_no_server_is_an_error() -> None:
    with pytest.raises(OSError, match="cannot be read.*refused"):
        safe_open("http://127.0.0.1:1/x", "np")
