"""The parts of mlx-lm's server that serve one model of the store: where models come from, and how requests do."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
from functools import partial
from http.server import ThreadingHTTPServer
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from blobstore.core.escape import quote
from blobstore.core.libraries import optional_libraries
from blobstore.errors import BlobstoreError, InvalidReference, UsageError
from blobstore.integrations.mlx_lm import load_all
from blobstore.manifests.reference import Reference
from blobstore.remotes.addresses import is_address

with optional_libraries():
    from mlx_lm import server
    from mlx_lm.models.cache import LRUPromptCache

if TYPE_CHECKING:
    import argparse

    from blobstore.integrations.server_main import ServerOptions

_DEFAULT = "default_model"
"""The model name that mlx-lm uses if a request names none."""
_PORTS = 2**16
_TERMINATED = 128 + signal.SIGTERM


def _parsed(name: str) -> str | Reference:
    """Return a name, whose spelling may differ, or an address in object storage as it is."""
    return name if is_address(name) else Reference.parse(name)


class StoreProvider(server.ModelProvider):
    """Provides the server's only model, and reports whether it was loaded."""

    def __init__(self, cli_args: argparse.Namespace) -> None:
        if cli_args.adapter_path or cli_args.draft_model or cli_args.pipeline:
            raise UsageError("adapters, draft models and pipelines are not served from the store")
        self.reference = _parsed(cli_args.model)
        super().__init__(cli_args)
        self._is_done = Event()
        self._error: Exception | None = None

    def load_default(self) -> None:
        """Load the model. The server's thread calls this first."""
        try:
            self.load(_DEFAULT)
        except Exception as error:  # noqa: BLE001 - wait() raises it again
            self._error = error
        finally:
            self._is_done.set()

    def wait(self) -> None:
        """Wait until the model is loaded. Raises the error of :meth:`load_default`."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[Any, Any]:
        """Return the model and its tokenizer, for a request that names this model or none.

        Raises:
            UsageError: it names another model.
        """
        if adapter_path is not None or draft_model_path not in (None, _DEFAULT):
            raise UsageError("this server supports neither adapters nor draft models")
        if model_path != _DEFAULT and not self.is_served(model_path):
            raise UsageError(f"this server serves only {self.reference}, not {quote(model_path)}")
        model, tokenizer = super().load(_DEFAULT)
        return model, tokenizer

    def is_served(self, name: str) -> bool:
        """Return whether a name, in any spelling, is that of the model."""
        try:
            return _parsed(name) == self.reference
        except InvalidReference:
            return False


class _Handler(server.APIHandler):
    """Lists the one model; mlx-lm's handler would list the cache of the Hub."""

    def handle_models_request(self) -> None:
        """Answer ``/v1/models`` and ``/v1/models/NAME``."""
        provider: Any = self.response_generator.model_provider
        name = unquote(self.path.removeprefix("/v1/models").lstrip("/"))
        entry = {"id": str(provider.reference), "object": "model", "created": self.created}
        models = [entry] if not name or provider.is_served(name) else []
        self._set_completion_headers(200)
        self.end_headers()
        self.wfile.write(json.dumps({"object": "list", "data": models}).encode())
        self.wfile.flush()


def serve(options: ServerOptions) -> None:
    """Run mlx-lm's own program, with three of its parts replaced."""
    reference = _parsed(options.name)

    def load(path: str, **settings: Any) -> tuple[Any, Any, dict[str, Any]]:
        return load_all(
            path,
            store=options.store,
            tokenizer_config=settings["tokenizer_config"],
            **options.opening,
        )

    def run(host: str, port: int, provider: StoreProvider) -> None:
        if provider.reference != reference:
            raise UsageError("the model is the first argument here; do not give --model")
        if port not in range(_PORTS):  # others would be taken modulo 65536
            raise UsageError(f"port {port} is not one of 0 to {_PORTS - 1}")
        cache = LRUPromptCache(provider.cli_args.prompt_cache_size)
        generator = server.ResponseGenerator(provider, cache)
        try:
            provider.wait()
            with _listen(host, port, generator) as httpd:
                place = httpd.server_address
                logging.getLogger(__name__).info(
                    "serving %s at http://%s:%s", provider.reference, *place[:2]
                )
                httpd.serve_forever()
        finally:
            generator.stop_and_join()

    vars(server).update(load=load, run=run, ModelProvider=StoreProvider)
    sys.argv = ["mlx_lm.server", "--model", str(reference), *options.rest]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    server.main()


def _listen(host: str, port: int, generator: Any) -> ThreadingHTTPServer:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        place: Any
        family, _, _, _, place = found[0]

        class Server(ThreadingHTTPServer):
            address_family = family

        return Server(place, partial(_Handler, generator))
    except (OSError, OverflowError) as error:
        raise BlobstoreError(f"cannot listen at {quote(host)}, port {port}: {error}") from error
