"""The live page: a real server on the loopback interface, and a browser that follows the store."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.operations.create.create import create
from blobstore.pages.live_page import live_state
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support.browser import Browser
from tests.support.frozen import put
from tests.support.models import quantizable_tensors, write_folder

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [page]")


@contextlib.contextmanager
def serving(store: LocalStore) -> Iterator[str]:
    """Run the command and return the address that it prints."""
    command = (sys.executable, "-m", "blobstore.cli", "page", "--serve", "--port=0")
    process = subprocess.Popen(
        [*command, "--store", str(store.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(
            r"serving (http://127\.0\.0\.1:\d+/[\w-]{32}/); stop with Ctrl-C\n", line
        )
        assert found is not None, line
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def request(address: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    server, _, path = address.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(server, timeout=60)
    with contextlib.closing(connection):
        connection.request(
            method, f"/{path}", headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


@pytest.fixture
def models(store: LocalStore, tmp_path: Path) -> LocalStore:
    folder = write_folder(tmp_path / "plain", quantizable_tensors())
    create(folder, "plain", store=store)
    create(folder, "plain:int8", quantize=QuantizeOptions("int8"), store=store)
    return store


def test_another_user_of_the_machine_gets_nothing(models: LocalStore) -> None:
    with serving(models) as address:
        server = address.rsplit("/", 2)[0]
        for path in ("", "data", "state", "measure?model=plain:latest"):
            for token in ("", "guess/", "%C3%A9/"):
                status, _, body = request(
                    f"{server}/{token}{path}", "POST" if path.startswith("measure") else "GET"
                )
                assert status in {403, 405}, (token, path)
                assert b"plain" not in body, (token, path)


def test_a_page_of_another_site_gets_nothing(models: LocalStore) -> None:
    with serving(models) as address:
        rebound = request(address, Host="evil.example")
        caused = [
            request(address + path, Sec_Fetch_Site=site)
            for path in ("", "data", "state")
            for site in ("cross-site", "same-site")
        ]
        measured = request(
            f"{address}measure?model=plain:latest", "POST", Sec_Fetch_Site="cross-site"
        )
        status, headers, _ = request(address, Sec_Fetch_Site="none")
        own = request(f"{address}data", Sec_Fetch_Site="same-origin")
        preflight = request(f"{address}measure", "OPTIONS", Origin="http://evil.example")

    assert rebound[0] == 421
    assert {answer[0] for answer in (*caused, measured)} == {403}
    assert status == own[0] == 200
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers
    assert preflight[0] == 405


def test_each_server_has_a_token_of_its_own(models: LocalStore) -> None:
    with serving(models) as one, serving(models) as two:
        assert one.split("/")[3] != two.split("/")[3]


def test_an_unknown_model_is_not_found_and_a_damaged_one_is_an_error(models: LocalStore) -> None:
    for blob in models.resolve("plain").layers:
        Path(models.blob_path(blob.digest)).unlink(missing_ok=True)

    with serving(models) as address:
        missing = request(f"{address}measure?model=%3Cscript%3E", "POST")
        damaged = request(f"{address}measure?model=plain:latest", "POST")
        page = request(address)

    assert (missing[0], damaged[0], page[0]) == (404, 500, 200)
    assert "missing" in json.loads(damaged[2])["error"]


def test_the_page_follows_the_store_and_measures_on_request(
    browser: Browser, models: LocalStore
) -> None:
    with serving(models) as address:
        browser.open(f"{address}#model/plain%3Aint8")
        assert "no work running" in browser.run("document.querySelector('.live').textContent")
        browser.run(
            "[...document.querySelectorAll('button')].find(b => b.textContent.startsWith('Measure')).click()"
        )
        browser.wait(
            "[...document.querySelectorAll('button')].some(b => b.textContent === 'Error or change')"
        )
        browser.run("location.hash = 'store'")
        put(models, "new", {"a": 1})
        browser.wait("document.querySelector('.facts').innerText.includes('models\\n3')")

        assert not [item for item in browser.complaints if "entry" in item["params"]]
    browser.wait("document.querySelector('.live').textContent === 'the server has ended'")


def test_the_state_changes_with_the_store_and_lists_the_work(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "one", {"a": 1})
    first = live_state(store)
    same = live_state(store)
    put(store, "two", {"b": 2})
    blob = store.resolve("one").layers[0]
    with store.lease_if_writable([blob.digest]):
        monkeypatch.setattr(os, "getpid", lambda: 1)  # another process looks
        busy: Any = live_state(store)

    assert first == same
    assert first["work"] == []
    assert busy["stamp"] != first["stamp"]
    assert [item["blobs"] for item in busy["work"]] == [1]


def test_a_port_that_is_taken_is_an_error(models: LocalStore) -> None:
    with serving(models) as address:
        port = re.search(r":(\d+)/", address)
        assert port is not None
        done = subprocess.run(
            [sys.executable, "-m", "blobstore.cli", "page", "--serve", f"--port={port[1]}"],
            env={**os.environ, "BLOBSTORE_HOME": str(models.root)},
            capture_output=True,
            check=False,
            text=True,
        )

    assert done.returncode == 1
    assert "cannot listen on 127.0.0.1" in done.stderr
