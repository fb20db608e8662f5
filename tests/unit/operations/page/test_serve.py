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
from blobstore.operations.page.serve import live_state
from blobstore.store.local import LocalStore
from tests.support.browser import Browser
from tests.support.frozen import put
from tests.support.models import quantizable_tensors, write_folder

pytest.importorskip("starlette", reason="it is in the test group, and in the extra [page]")


@contextlib.contextmanager
def serving(store: LocalStore) -> Iterator[int]:
    """Run the command and return its port."""
    command = (sys.executable, "-m", "blobstore.cli", "page", "--serve", "--port=0")
    process = subprocess.Popen(
        [*command, "--store", str(store.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving http://127\.0\.0\.1:(\d+)/; stop with Ctrl-C\n", line)
        assert found is not None, line
        yield int(found[1])
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)


def request(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


@pytest.fixture
def models(store: LocalStore, tmp_path: Path) -> LocalStore:
    folder = write_folder(tmp_path / "plain", quantizable_tensors())
    create(folder, "plain", store=store)
    create(folder, "plain:int8", quantize="int8", store=store)
    return store


def test_a_page_of_another_site_gets_nothing(models: LocalStore) -> None:
    with serving(models) as port:
        rebound = request(port, "/", Host="evil.example")
        unasked = request(port, "/measure?model=plain:latest", "POST")
        status, headers, _ = request(port, "/")
        preflight = request(
            port,
            "/measure",
            "OPTIONS",
            Origin="http://evil.example",
            Access_Control_Request_Headers="x-blobstore",
        )

    assert rebound[0] == 400
    assert unasked[0] == 403
    assert status == 200
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers
    assert preflight[0] == 405


def test_an_unknown_model_is_not_found_and_a_damaged_one_is_an_error(models: LocalStore) -> None:
    for blob in models.resolve("plain").layers:
        Path(models.blob_path(blob.digest)).unlink(missing_ok=True)

    with serving(models) as port:
        missing = request(port, "/measure?model=%3Cscript%3E", "POST", x_blobstore="1")
        damaged = request(port, "/measure?model=plain:latest", "POST", x_blobstore="1")
        page = request(port, "/")

    assert (missing[0], damaged[0], page[0]) == (404, 500, 200)
    assert "missing" in json.loads(damaged[2])["error"]


def test_the_page_follows_the_store_and_measures_on_request(
    browser: Browser, models: LocalStore
) -> None:
    with serving(models) as port:
        browser.open(f"http://localhost:{port}/#model/plain%3Aint8")
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
    with serving(models) as port:
        done = subprocess.run(
            [sys.executable, "-m", "blobstore.cli", "page", "--serve", f"--port={port}"],
            env={**os.environ, "BLOBSTORE_HOME": str(models.root)},
            capture_output=True,
            check=False,
            text=True,
        )

    assert done.returncode == 1
    assert "cannot listen on 127.0.0.1" in done.stderr
