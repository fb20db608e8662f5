"""Requests to the Hub: what is read, how long is waited, and what ends both."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from blobstore.core.workers import Cancelled
from blobstore.errors import DamagedSource, RemoteError, RemoteRefused
from blobstore.http.protocol import MAX_ERROR, Span, TransientError
from blobstore.http.retry import Patience
from blobstore.sources.hub_client import HubClient, _expected
from tests.support.raw_server import Answer, RawServer, Received, reply

COMMIT = "a" * 40
MIB = 1 << 20


def client_of(server: RawServer) -> HubClient:
    patience = Patience(attempts=2, first=0.001, longest=120)
    return HubClient(f"http://{server.host}", "Bearer hf_secret", patience)


def ask_for_commit(client: HubClient) -> object:
    return client.commit("org/model", None)


def ask_for_file(client: HubClient) -> object:
    read = client.retry().resumed(
        0, 10, lambda begin: client.pieces("org/model", COMMIT, "a.json", begin, 10)
    )
    return b"".join(read)


def ask_for_first_bytes(client: HubClient) -> object:
    return client.first_bytes("org/model", COMMIT, "a.json", 10)


QUESTIONS = [ask_for_commit, ask_for_file, ask_for_first_bytes]


@pytest.mark.parametrize("ask", QUESTIONS)
@pytest.mark.parametrize("status", [401, 403, 418, 429, 500])
def test_of_an_error_without_an_end_little_is_read(
    ask: Callable[[HubClient], object], status: int
) -> None:
    sent = []

    def flood(received: Received) -> Iterator[bytes]:
        del received
        yield b"HTTP/1.1 %d x\r\nconnection: close\r\n\r\n" % status
        for _ in range(256):
            sent.append(MIB)
            yield bytes(MIB)

    with RawServer(flood) as server, pytest.raises(RemoteError) as refused:
        ask(client_of(server))
    assert refused.value.status == status
    # What the sockets of both hold is sent, too.
    assert sum(sent) < len(server.requests) * (MAX_ERROR + 24 * MIB)


@pytest.mark.parametrize("ask", QUESTIONS)
def test_a_hub_that_asks_to_wait_for_a_day_is_not_waited_for(
    ask: Callable[[HubClient], object],
) -> None:
    answer = reply(429, ratelimit='"api";r=0;t=86400')
    with RawServer(lambda _: answer) as server, pytest.raises(RemoteError, match="429") as refused:
        ask(client_of(server))
    assert len(server.requests) == 1
    if ask is not ask_for_first_bytes:
        assert refused.value.advice == "try again in 86400 seconds"


@pytest.mark.parametrize("answer", [reply(503, retry_after=100), None])
def test_an_abort_ends_a_wait(answer: Answer | None) -> None:
    came, end = threading.Event(), threading.Event()

    def wait(_: Received) -> Answer:
        came.set()
        if answer is None:
            end.wait()
        return answer or reply(200)

    with RawServer(wait) as server:
        client = client_of(server)
        ended = []

        def ask() -> None:
            with pytest.raises(Cancelled):
                ask_for_file(client)
            ended.append(True)

        thread = threading.Thread(target=ask)
        thread.start()
        came.wait()
        client.abort()
        thread.join()
        end.set()
    assert ended


def test_only_the_server_gets_the_token() -> None:
    with RawServer(lambda _: reply(200, b"0123456789")) as other:
        place = f"http://localhost:{other.host.partition(':')[2]}/a"
        with RawServer(lambda _: reply(302, location=place)) as server:
            assert ask_for_file(client_of(server)) == b"0123456789"
    assert server.requests[0].headers["authorization"] == "Bearer hf_secret"
    assert "authorization" not in other.requests[0].headers


def test_a_file_of_another_size_is_damaged() -> None:
    with (
        RawServer(lambda _: reply(200, b"012345678")) as server,
        pytest.raises(DamagedSource, match="has 9 bytes, expected 10; try again"),
    ):
        ask_for_file(client_of(server))


def test_what_is_refused_has_the_code_of_the_hub() -> None:
    answer = reply(403, x_error_code="GatedRepo")
    with RawServer(lambda _: answer) as server, pytest.raises(RemoteRefused) as refused:
        ask_for_commit(client_of(server))
    assert (refused.value.status, refused.value.code) == (403, "GatedRepo")


def test_of_an_answer_that_is_too_long_one_piece_comes_too_many() -> None:
    pieces = [b"skip", b"ped one", b" two", b" three"]
    found = _expected(iter(pieces), Span(8, 3), "file")
    assert list(found) == [b"one", b" two"]  # the caller refuses the excess
    with pytest.raises(TransientError, match="ended early"):
        list(_expected(iter(pieces), Span(8, 30), "file"))


def test_a_list_without_an_end_is_left() -> None:
    numbers = itertools.count()

    def page(received: Received) -> Answer:
        path = received.path.partition("&")[0]
        return reply(200, b"[]", link=f"<{path}&cursor={next(numbers)}>; rel=next")

    with RawServer(page) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("blobstore.sources.hub_client._MAX_PAGES", 5)
        with pytest.raises(RemoteError, match="more than 5 pages"):
            client_of(server).entries("org/model", COMMIT)
    assert len(server.requests) == 5
