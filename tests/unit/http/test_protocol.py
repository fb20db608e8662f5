"""Every decision about requests and responses, without a socket."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import BlobDamaged, BlobstoreError, RemoteError, RemoteRefused
from blobstore.http import protocol
from blobstore.http.protocol import Challenge, Span, TransientError

BASE = "https://registry.example/v2/a/blobs/uploads/"
NOW = datetime(2026, 11, 23, 3, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "127.0.0.1", "127.9.8.7", "::1", "[::1]"]
)
def test_addresses_of_this_machine_are_loopback(host: str) -> None:
    assert protocol.is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["", "127.0.0.1.example", "localhost.example", "128.0.0.1", "::2", "0127.0.0.1", "127.1"],
)
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not protocol.is_loopback(host)


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/v2/x?y=z", "https://registry.example/v2/x?y=z"),
        ("x", "https://registry.example/v2/a/blobs/uploads/x"),
        ("//cdn.example/x", "https://cdn.example/x"),
        ("https://cdn.example:444/x?a=%2F", "https://cdn.example:444/x?a=%2F"),
    ],
)
def test_location_is_resolved(location: str, url: str) -> None:
    assert protocol.resolve(location, BASE) == url


@pytest.mark.parametrize(
    "location",
    [
        None,
        "",
        "ftp://cdn.example/x",
        "file:///etc/passwd",
        "javascript:x",
        "https://evil.example\\@registry.example/",
        "https://registry.example\\.evil.example/",
        "https://user@cdn.example/",
        "https://user:password@cdn.example/",
        "https://@cdn.example/",
        "https://cdn.example:0/",
        "https://:5/x",
        "https://cdn.example:99999/",
        "https://cdn.example:x/",
        "https://[::1/",
        "https://cdn.example/\r\nHost: evil",
        "https://cdn.example/ x",
        "https://cdn.exämple/",
        "https://cdn.example/\x1b[2J",
        "/" + "x" * 20_000,
        "http://registry.example/v2/x",
        "http://127.0.0.1/x",
    ],
)
def test_wrong_location_is_refused_and_escaped(location: str | None) -> None:
    with pytest.raises(RemoteError) as caught:
        protocol.resolve(location, BASE)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.slow
@given(st.text(max_size=60), st.sampled_from([BASE, "http://127.0.0.1:5000/v2/"]))
def test_any_location_is_a_sound_url_or_an_error(location: str, base: str) -> None:
    try:
        url = protocol.resolve(location, base)
    except RemoteError:
        return
    assert url.startswith(("https://", base[:7]))
    assert url.isascii()
    assert url.isprintable()
    assert "@" not in url.split("/")[2]


@pytest.mark.parametrize(
    "location",
    [
        "https://evil.example/v2/a/blobs/uploads/1",
        "https://registry.example:444/v2/a",
        "//evil.example/v2",
        "https://registry.example.evil.example/",
    ],
)
def test_upload_never_goes_to_another_server(location: str) -> None:
    with pytest.raises(RemoteError, match="wants an upload to go to another server"):
        protocol.resolve_upload(location, BASE)


@pytest.mark.parametrize(
    ("base", "address"),
    [
        ("http://localhost:5000", "localhost:5000"),
        ("https://localhost:5000", "https://localhost:5000"),
        ("https://ghcr.io", "ghcr.io"),
        ("http://cache:8080", "http://cache:8080"),
    ],
)
def test_addresses_of_servers_have_a_scheme_that_is_not_the_default(
    base: str, address: str
) -> None:
    assert protocol.address_of(base) == address


def test_default_port_is_the_same_server() -> None:
    url = "https://registry.example:443/v2/a"
    assert protocol.resolve_upload(url, BASE) == url


def test_parameters_of_a_location_stay() -> None:
    assert (
        protocol.with_query("https://a/x?_state=1", "digest=d") == "https://a/x?_state=1&digest=d"
    )
    assert protocol.with_query("https://a/x", "digest=d") == "https://a/x?digest=d"


@pytest.mark.parametrize(
    ("link", "page"),
    [
        (None, None),
        ("", None),
        ('</v2/a?last=x>; rel="prev"', None),
        ('</v2/a?last=x>; rel="next"', "https://registry.example/v2/a?last=x"),
        ("</v2/a?last=x>;rel=next", "https://registry.example/v2/a?last=x"),
    ],
)
def test_next_page_of_a_list_is_found(link: str | None, page: str | None) -> None:
    assert protocol.next_page(link, BASE) == page


@pytest.mark.parametrize("url", ["https://evil.example/", BASE, "http://registry.example/x"])
def test_list_that_goes_on_elsewhere_or_at_itself_is_refused(url: str) -> None:
    with pytest.raises(RemoteError):
        protocol.next_page(f'<{url}>; rel="next"', BASE)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "1e3", "²", "9" * 20, "1, 1"])
def test_malformed_length_is_refused(text: str) -> None:
    with pytest.raises(RemoteError, match="malformed Content-Length"):
        protocol.content_length(text)
    assert protocol.content_length(None) is None
    assert protocol.content_length("17") == 17


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "deflate"])
def test_compressed_body_is_refused(encoding: str) -> None:
    with pytest.raises(RemoteError, match="which was not accepted"):
        protocol.check_encoding({"content-encoding": encoding})
    protocol.check_encoding({})
    protocol.check_encoding({"content-encoding": "Identity"})


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (5, 5), (5, 4), (-1, 4)])
def test_range_of_no_bytes_is_never_asked_for(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="range of no bytes"):
        protocol.range_of(begin, end)
    assert protocol.range_of(0, 5) == "bytes=0-4"


@pytest.mark.parametrize(
    ("status", "headers", "span"),
    [
        (206, {"content-range": "bytes 10-19/100", "content-length": "10"}, Span(0, 10)),
        (206, {"content-range": "bytes 10-19/*"}, Span(0, 10)),
        (200, {"content-length": "100"}, Span(10, 10)),
        (200, {}, Span(10, 10)),
    ],
)
def test_bytes_of_a_response_are_found(status: int, headers: dict[str, str], span: Span) -> None:
    assert protocol.span_of(status, headers, 10, 20) == span
    assert protocol.span_of(status, headers, 10, 20, 100) == span


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (206, {}),
        (206, {"content-range": "bytes 0-9/100"}),
        (206, {"content-range": "bytes 10-18/100"}),
        (206, {"content-range": "bytes 10-20/100"}),
        (206, {"content-range": "bytes 10-19/100", "content-length": "11"}),
        (206, {"content-range": "bytes 10-19/100", "content-length": "x"}),
        (206, {"content-range": "bytes */100"}),
        (206, {"content-range": "items 10-19/100"}),
        (206, {"content-range": "bytes 10-19/100, bytes 30-39/100"}),
        (206, {"content-range": "bytes 10-9/100"}),
        (206, {"content-range": "bytes -10-19/100"}),
    ],
)
def test_response_with_other_bytes_than_asked_for_is_refused(
    status: int, headers: dict[str, str]
) -> None:
    with pytest.raises(RemoteError):
        protocol.span_of(status, headers, 10, 20)


@pytest.mark.parametrize(
    ("status", "headers", "size"),
    [
        (206, {"content-range": "bytes 10-19/100"}, 99),
        (206, {"content-range": "bytes 10-14/15"}, None),
        (200, {"content-length": "19"}, None),
        (200, {"content-length": "101"}, 100),
    ],
)
def test_blob_of_another_length_is_damaged(
    status: int, headers: dict[str, str], size: int | None
) -> None:
    with pytest.raises(BlobDamaged, match=r"has \d+ bytes, expected"):
        protocol.span_of(status, headers, 10, 20, size)


@pytest.mark.parametrize(
    ("text", "count"), [("0-9", 10), ("bytes=0-9", 10), ("0-0", 0), (None, 0), ("0-1", 2)]
)
def test_bytes_of_an_upload_are_counted(text: str | None, count: int) -> None:
    assert protocol.bytes_received(text) == count


@pytest.mark.parametrize("text", ["", "x", "5-9", "0--1", "0-", "bytes 0-9/10", "9" * 30])
def test_malformed_status_of_an_upload_is_refused(text: str) -> None:
    with pytest.raises(RemoteError, match="malformed Range"):
        protocol.bytes_received(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, 0),
        ("17", 17),
        (" 17 ", 17),
        (format_datetime(NOW + timedelta(seconds=30), usegmt=True), 30),
        (format_datetime(NOW - timedelta(seconds=30), usegmt=True), 0),
        ("soon", 0),
        ("-5", 0),
        ("", 0),
        ("1.5", 0),
        ("Mon, 23 Nov 2026 03:00:30", 0),
        ("Mon, 99 Foo 99999 99:99:99 GMT", 0),
        ("9" * 19, 1e19),
    ],
)
def test_time_to_wait_is_read_in_seconds_and_as_a_date(text: str | None, seconds: float) -> None:
    headers = {} if text is None else {"retry-after": text}
    assert protocol.retry_after(headers, NOW) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [('"api";r=0;t=55', 55), ('"api"; r=0; t=86400', 86400), ('"api";r=9;t=55', 1), ("r=0", 1)],
)
def test_the_hub_says_how_long_to_wait_by_its_limit(text: str, seconds: float) -> None:
    headers = {"ratelimit": text, "retry-after": "1"}
    assert protocol.retry_after(headers, NOW) == seconds


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_overload_is_transient(status: int) -> None:
    error = protocol.failure("x", status, {"retry-after": "7"}, b"", NOW)

    assert isinstance(error, TransientError)
    assert error.retry_after == 7


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RemoteRefused),
        (401, RemoteRefused),
        (403, RemoteRefused),
        (404, RemoteRefused),
        (405, RemoteRefused),
        (413, RemoteRefused),
        (416, RemoteRefused),
        (501, RemoteError),
        (505, RemoteError),
        (204, RemoteError),
        (302, RemoteError),
    ],
)
def test_other_failures_are_final(status: int, kind: type[BlobstoreError]) -> None:
    assert type(protocol.failure("x", status, {}, b"", NOW)) is kind


def test_document_of_an_error_is_shown_escaped_and_shortened() -> None:
    body = (
        b'{"errors": [{"code": "DENIED", "message": "no \\u001b[31maccess"}, {"code": "B"}, 7,'
        b'{"code": "C", "message": null}, {"code": "D"}]}'
    )

    text = str(protocol.failure("pull of 'a'", 403, {}, body, NOW))

    assert text == (r"pull of 'a': status 403: 'DENIED no \x1b[31maccess', 'B', 'C' and 1 more")
    long = b'{"errors": [{"code": "%s"}]}' % (b"x" * 50_000)
    assert len(protocol.explanation(long)) < 300


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"errors": {}}',
        b'{"errors": 1}',
        b'{"errors": [{}]}',
        b"\xff",
    ],
)
def test_document_of_another_form_is_not_shown(body: bytes) -> None:
    assert str(protocol.failure("x", 404, {}, body, NOW)) == "x: status 404"


@pytest.mark.parametrize(
    ("text", "challenge"),
    [
        (
            'Bearer realm="https://a/t",service="s",scope="repository:a/b:pull,push"',
            Challenge("bearer", "https://a/t", "s", frozenset({"repository:a/b:pull,push"})),
        ),
        (
            'bearer realm="https://a/t" , scope="repository:a:pull repository:b:pull"',
            Challenge(
                "bearer", "https://a/t", "", frozenset({"repository:a:pull", "repository:b:pull"})
            ),
        ),
        ('Bearer realm="https://a/\\"t"', Challenge("bearer", 'https://a/"t')),
        ("Bearer realm=https://a/t", Challenge("bearer", "https://a/t")),
        ('Basic realm="x"', Challenge("basic")),
        ("Basic", Challenge("basic")),
        ('Negotiate, Basic realm="x"', Challenge("basic")),
        ('Basic realm="x", Bearer realm="https://a/t"', Challenge("bearer", "https://a/t")),
        ("Negotiate", None),
        ('Digest realm="x", nonce="y"', None),
        ("", None),
        (", , =", None),
    ],
)
def test_challenge_is_parsed(text: str, challenge: Challenge | None) -> None:
    assert protocol.challenge_of(text) == challenge


def test_first_value_of_a_parameter_counts() -> None:
    challenge = protocol.challenge_of('Bearer realm="https://a/",realm="https://evil/"')
    assert challenge == Challenge("bearer", "https://a/")


def test_huge_challenge_is_refused() -> None:
    with pytest.raises(RemoteError, match="a challenge of 8193 characters"):
        protocol.challenge_of("x" * 8193)


@pytest.mark.slow
@given(st.text(max_size=200))
def test_any_challenge_is_parsed_or_ignored(text: str) -> None:
    protocol.challenge_of(text)
    protocol.challenge_of("Bearer " + text)
