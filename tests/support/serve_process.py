"""Runs ``blobstore serve`` as a process, and talks to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from blobstore.store.local import LocalStore
from tests.faults.processes import Nursery, nursery
from tests.support.processes import start

SECONDS = 120
_PAUSE = 0.005


@dataclass(slots=True)
class Process:
    """A process that another one has forked, as :class:`subprocess.Popen` has it."""

    pid: int
    parent: Nursery = field(default_factory=nursery)
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it has ended, negative for a signal; None if it has not."""
        if self.returncode is None:
            self.returncode = self.parent.ask({"do": "wait", "pid": self.pid, "seconds": 0})["code"]
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        """Wait for its end. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended after {timeout:g} s")
            time.sleep(_PAUSE)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.send_signal(signal.SIGKILL)


@dataclass
class Serving:
    """A server that runs."""

    url: str
    """``http://127.0.0.1:port``, or ``https://localhost:port``."""
    process: Process | subprocess.Popen[bytes]
    log_file: Path
    tls: ssl.SSLContext | None = None
    """With it, the server is asked over TLS."""
    asked: int = 0
    """Bytes of metrics that were asked for so far."""

    @property
    def host(self) -> str:
        return self.url.partition("://")[2]

    def request(
        self, target: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers by lower-case names and the body of a response."""
        connection = (
            http.client.HTTPConnection(self.host, timeout=SECONDS)
            if self.tls is None
            else http.client.HTTPSConnection(self.host, timeout=SECONDS, context=self.tls)
        )
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, target, body=body, headers=named)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()

    def metric(self, name: str) -> float:
        """Return the sum of a metric. The answers to these questions do not count as bytes that were sent."""
        text = self.request("/metrics")[2].decode()
        found = re.findall(rf"^blobstore_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        asked, self.asked = self.asked, self.asked + len(text)
        return sum(map(float, found)) - (asked if name == "sent_bytes_total" else 0)

    def log(self) -> list[dict[str, Any]]:
        """Return what the server has logged so far."""
        text = self.log_file.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def wait_for_log(self, key: str, text: str = "") -> dict[str, Any]:
        """Return the entry that has a field with a text, once the server has written it."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for entry in self.log():
                if key in entry and text in str(entry[key]):
                    return entry
            time.sleep(0.02)
        raise AssertionError(f"no {key} with {text!r} in {self.log()}")

    def stop(self) -> int:
        """Ask the process to end, and return its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=SECONDS)


def connect(server: Serving) -> socket.socket:
    """Return a connection to a server."""
    host, _, port = server.host.partition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


@contextlib.contextmanager
def serving(
    store: LocalStore,
    folder: Path,
    *options: str,
    limits: Mapping[str, float] = MappingProxyType({}),
    is_new: bool = False,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Serving]:
    """Run the command; its log is in ``folder``. ``limits`` has other values of constants, ``tls`` asks a server with TLS.

    Their names begin with the module in blobstore.serve, or with blobstore. The server is forked from a
    process that has all imported, which takes a tenth of the time, unless ``is_new``.
    """
    log_file, output = folder / "serve.log", folder / "serve.out"
    for path in (log_file, output):
        path.write_bytes(b"")
    command = ("blobstore", "serve", "--port=0", *options, "--store", store.root)
    constants = {
        name if name.startswith("blobstore.") else f"blobstore.serve.{name}": value
        for name, value in limits.items()
    }
    process: Process | subprocess.Popen[bytes]
    if is_new:
        assert not limits
        with output.open("ab") as out, log_file.open("ab") as log:
            process = start([sys.executable, "-m", *map(str, command)], stdout=out, stderr=log)
    else:
        hooks = {"constants": constants}
        process = Process(nursery().fork(command, output, log_file, hooks=hooks))
    try:
        line = _first_line(output, process)
        found = re.fullmatch(r"serving (https?://\S+); stop with Ctrl-C\n", line)
        assert found is not None, (line, log_file.read_text(encoding="utf-8"))
        port = urlsplit(found[1]).port
        url = f"http://127.0.0.1:{port}" if tls is None else f"https://localhost:{port}"
        assert found[1].partition(":")[0] == url.partition(":")[0]
        yield Serving(url, process, log_file, tls)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(SECONDS)
        finally:
            process.kill()
            process.wait(SECONDS)
    # All that happens has a line of JSON.
    assert "Traceback" not in log_file.read_text(encoding="utf-8", errors="replace")


def _first_line(output: Path, process: Process | subprocess.Popen[bytes]) -> str:
    """Return the first line that a process writes, or less if it ends before, or hangs."""
    until = time.monotonic() + SECONDS
    while True:
        is_last = process.poll() is not None or time.monotonic() > until
        text = output.read_text(encoding="utf-8")
        if "\n" in text or is_last:
            return text
        time.sleep(_PAUSE)
