"""Bodies that are cut, ranges, and headers that must not be split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.digest import Digest
from blobstore.serve.messages import (
    UNSATISFIABLE,
    BlobPart,
    Content,
    Part,
    Request,
    Response,
    content_response,
    requested_range,
)

BLOB = bytes(range(200))
DIGEST = Digest.of(BLOB)


def read(parts: list[Part] | tuple[Part, ...]) -> bytes:
    return b"".join(
        part if isinstance(part, bytes) else BLOB[part.begin : part.begin + part.length]
        for part in parts
    )


@st.composite
def contents(draw: st.DrawFn) -> Content:
    def part(number: int) -> Part:
        begin = number % 150
        return BLOB[begin : begin + number % 40] if number % 2 else BlobPart(DIGEST, 200, begin, 50)

    numbers = draw(st.lists(st.integers(0, 10**6), max_size=8))
    return Content([part(number) for number in numbers])


@given(contents(), st.data())
def test_a_cut_has_the_bytes_of_the_range(content: Content, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, content.size))
    end = data.draw(st.integers(begin, content.size))
    cut = content.cut(begin, end)
    assert read(cut) == read(list(content.parts))[begin:end]
    assert all(not isinstance(part, BlobPart) or part.length for part in cut)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=5-", (5, 100)),
        ("bytes=5-1000", (5, 100)),
        ("bytes=-7", (93, 100)),
        ("bytes=-700", (0, 100)),
        (" bytes=99-99 ", (99, 100)),
        ("bytes=100-", UNSATISFIABLE),
        ("bytes=-0", UNSATISFIABLE),
        ("bytes=5-4", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("bytes=0x1-2", None),
        ("bytes=٣-", None),
        ("bytes=" + "9" * 40 + "-", None),
        ("bytes=" + "0-0," * 5000, None),
    ],
)
def test_a_range_is_one_range_or_ignored(text: str, expected: tuple[int, int] | None) -> None:
    assert requested_range(text, 100) == expected


def test_no_range_of_nothing_can_be_satisfied() -> None:
    assert requested_range("bytes=0-", 0) == UNSATISFIABLE
    assert requested_range("bytes=-1", 0) == UNSATISFIABLE


def content_of(method: str = "GET", **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return content_response(
        Request(method, "/", named), Content([b"abc", BlobPart(DIGEST, 200, 3, 5)]), "tag", {}
    )


def test_content_is_sent_with_its_length_and_validator() -> None:
    response = content_of()
    assert response.status == 200
    assert response.headers == {
        "ETag": '"tag"',
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
        "Content-Length": "8",
    }
    assert read(list(response.parts)) == b"abc" + BLOB[3:8]
    head = content_of("HEAD")
    assert (head.status, head.headers, head.parts) == (200, response.headers, ())


def test_a_range_is_partial_content() -> None:
    response = content_of(range="bytes=2-4")
    assert response.status == 206
    assert response.headers["Content-Range"] == "bytes 2-4/8"
    assert response.headers["Content-Length"] == "3"
    assert read(list(response.parts)) == b"c" + BLOB[3:5]


def test_a_range_of_another_version_is_ignored() -> None:
    assert content_of(range="bytes=2-4", if_range='"tag"').status == 206
    assert content_of(range="bytes=2-4", if_range='"older"').status == 200


def test_a_range_behind_the_end_says_where_the_end_is() -> None:
    response = content_of(range="bytes=8-")
    assert (response.status, response.parts) == (416, ())
    assert response.headers["Content-Range"] == "bytes */8"
    assert response.headers["Content-Length"] == "0"


@pytest.mark.parametrize("tags", ['"tag"', '"a", W/"tag"', "*"])
def test_content_that_the_client_has_is_not_sent(tags: str) -> None:
    response = content_of(if_none_match=tags)
    assert (response.status, response.parts) == (304, ())
    assert content_of(if_none_match='"a", "b"').status == 200


@pytest.mark.parametrize("value", ["a\r\nSet-Cookie: b", "a\nb", "\0", "é"])
def test_a_header_cannot_be_split(value: str) -> None:
    with pytest.raises(ValueError, match="not a header"):
        Response(200, {"X-Name": value})
    with pytest.raises(ValueError, match="not a header"):
        Response(200, {value: "a"})
