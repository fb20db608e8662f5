"""The server in a thread of a program."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from blobstore.errors import BlobstoreError, UsageError
from blobstore.serve import start
from blobstore.serve.library import Library
from blobstore.serve.start import start_server
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer


def get(url: str) -> HTTPResponse:
    found: HTTPResponse = urllib.request.urlopen(url, timeout=60)
    return found


def test_serves_until_it_is_closed(library: Library) -> None:
    with start_server(store=library.store) as server:
        assert repr(server) == f"RunningServer({server.url!r})"
        with get(f"{server.url}/api/models") as response:
            assert [one["id"] for one in json.load(response)] == ["org/model"]

    with pytest.raises(URLError):
        get(server.url)
    server.close()
    assert "blobstore-server" not in [thread.name for thread in threading.enumerate()]


def test_a_log_that_nobody_reads_keeps_nobody_waiting(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("httpx2", reason="it is in the extra [registry]")
    monkeypatch.setattr("blobstore.serve.server._LOOK_SECONDS", 0)
    tokens, is_read = tmp_path / "tokens", threading.Event()
    tokens.write_text("0123456789abcdef\n")
    with (
        HubServer() as hub,
        contextlib.closing(
            start_server(
                store=store, upstream=hub.url, token_file=tokens, log=lambda _: is_read.wait()
            )
        ) as server,
        contextlib.ExitStack() as last,
    ):
        last.callback(is_read.set)
        request = urllib.request.Request(f"{server.url}/org/none/resolve/main/config.json")
        request.add_header("Authorization", "Bearer 0123456789abcdef")
        for name in ("one", "two"):  # the log names a model that the upstream refuses, and faults
            tokens.write_text(f"0123456789abcdef\n{name}\n")
            request.full_url = f"{server.url}/org/{name}/resolve/main/config.json"
            with pytest.raises(HTTPError) as caught:
                urllib.request.urlopen(request, timeout=60)
            with caught.value:
                assert caught.value.code == 401


def test_two_servers_of_one_process_end_one_by_one(library: Library) -> None:
    with (
        start_server(store=library.store, allow=["none/*"]) as one,
        start_server(store=library.store.root) as two,
    ):
        one.close()
        with get(f"{two.url}/api/models/org/model") as response:
            assert response.status == 200


def test_its_options_are_those_of_serve(library: Library, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("0123456789abcdef\n")
    lines: list[str] = []
    options: dict[str, Any] = {
        "allow": ["none/*"],
        "token_file": tmp_path / "tokens",
        "log": lines.append,
    }

    with start_server(store=library.store, **options) as server:
        with pytest.raises(HTTPError) as caught:
            get(f"{server.url}/api/models")
        caught.value.close()

    assert caught.value.code == 401
    assert json.loads(lines[0])["status"] == 401


def test_what_is_wrong_is_raised_where_it_is_started(store: LocalStore) -> None:
    with pytest.raises(UsageError, match="other machines reach"):
        start_server(store=store, host="0.0.0.0")
    with start_server(store=store) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(BlobstoreError, match="cannot listen on"):
            start_server(store=store, port=port)


def test_what_ends_it_is_raised_when_it_is_closed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, on_ready: Callable[[str], None], **__: object) -> None:
        on_ready("http://127.0.0.1:1")
        raise BlobstoreError("the disk is gone")

    monkeypatch.setattr(start, "serve", fail)
    server = start_server(store=store)

    with pytest.raises(BlobstoreError, match="the disk is gone"):
        server.close()
