"""Runs ``blobstore serve`` as a process, and talks to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
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

SECONDS = 120


@dataclass
class Serving:
    """A server that runs."""

    url: str
    """``http://127.0.0.1:port``."""
    process: subprocess.Popen[str]
    log_file: Path
    lines: list[str] = field(default_factory=list)

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def request(
        self, target: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers by lower-case names and the body of a response."""
        connection = http.client.HTTPConnection(self.host, timeout=SECONDS)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, target, body=body, headers=named)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()

    def metric(self, name: str) -> float:
        """Return the sum of a metric."""
        text = self.request("/metrics")[2].decode()
        found = re.findall(rf"^blobstore_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

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
) -> Iterator[Serving]:
    """Run the command; its log is in ``folder``. ``limits`` has other values of constants, by module and name."""
    log_file = folder / "serve.log"
    lines = [f"import blobstore.serve.{name.partition('.')[0]}" for name in limits]
    lines += [f"blobstore.serve.{name} = {value}" for name, value in limits.items()]
    lines += ["import blobstore.__main__", "blobstore.__main__.main()"]
    start = ("-c", "\n".join(lines)) if limits else ("-m", "blobstore")
    command = (sys.executable, *start, "serve", "--port=0", *options)
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--store", str(store.root)], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving (http://\S+); stop with Ctrl-C\n", line)
        assert found is not None, (line, log_file.read_text(encoding="utf-8"))
        port = urlsplit(found[1]).port
        yield Serving(f"http://127.0.0.1:{port}", process, log_file)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=SECONDS)
            finally:
                process.kill()
        process.communicate()
    # All that happens has a line of JSON.
    assert "Traceback" not in log_file.read_text(encoding="utf-8", errors="replace")
