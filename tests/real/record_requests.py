"""Records what a client asks ``blobstore serve``, whatever it is written in.

    python -m tests.real.record_requests NAME COMMAND...
    python -m tests.real.record_requests --answers

Runs the command with ``HF_ENDPOINT`` and ``SERVE_HOST`` set to a server of two small models, ``team/chat`` and
``team/chat-gguf``, and adds its requests to the table of :mod:`tests.support.client_requests` under the name of the
client. ``tests/real/clients`` has programs for the clients that are libraries; they need environments of their own.
With ``--answers``, no client runs: the rows get what today's responses are decided by.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.client_requests import (
    READ,
    answer_to,
    decisive,
    load_rows,
    save_rows,
    served_library,
)
from tests.support.recorded_clients import HOST
from tests.support.serve_process import serving

_SELDOM = "/api/agent-harnesses"
_HOP = ("connection", "transfer-encoding", "server", "date")


def proxy(host: str, seen: list[dict[str, Any]]) -> ThreadingHTTPServer:
    """Return a server that passes requests on to another one, and keeps them in ``seen``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: value for name in READ if (value := self._header(name))}
            if headers.get("accept") == "*/*":
                del headers["accept"]
            if not self.path.startswith(_SELDOM):
                row = {"method": self.command, "target": self.path, "headers": headers}
                seen.append(row | {"body": body.decode()})
            connection = http.client.HTTPConnection(host)
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():  # some clients send a line for each type
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.read())
            connection.close()

        do_GET = do_HEAD = do_POST = _pass_on  # noqa: N815 - the names that the library calls

        def _header(self, name: str) -> str:
            return ", ".join(self.headers.get_all(name, ()))

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def record(command: list[str], library: Any, folder: Path) -> list[dict[str, Any]]:
    """Run a client, and return what it has asked for."""
    seen: list[dict[str, Any]] = []
    with serving(library.store, folder, is_new=True) as server, proxy(server.host, seen) as between:
        thread = threading.Thread(target=between.serve_forever)
        thread.start()
        host = f"127.0.0.1:{between.server_port}"
        known = {
            "HF_ENDPOINT": f"http://{host}",
            "SERVE_HOST": host,
            "HF_HOME": str(folder / "hub"),
        }
        # The client is not the project's: it must not find its modules.
        clean = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
        try:
            subprocess.run(command, env=clean | known, cwd=folder, check=False)
        finally:
            between.shutdown()
            thread.join()
    for row in seen:
        for name in ("target", "body"):
            row[name] = row[name].replace(host, HOST)
    return seen


def main(arguments: list[str]) -> None:
    """Record a client, or what is decided by today."""
    with tempfile.TemporaryDirectory() as name:
        library = served_library(Path(name))
        rows = load_rows(library)
        if arguments[0] != "--answers":
            client, *command = arguments
            for row in rows:
                row["clients"] = [one for one in row["clients"] if one != client]
            rows = [row for row in rows if row["clients"]]
            for request in record(command, library, Path(name)):
                known = [row for row in rows if request.items() <= row.items()]
                if not known:
                    known = [request | {"clients": []}]
                    rows += known
                (row,) = known
                row["clients"] = sorted({*row["clients"], client})
        for row in rows:
            row["decides_by"] = decisive(row, answer_to(library, row))
        save_rows(rows, library)


if __name__ == "__main__":
    main(sys.argv[1:])
