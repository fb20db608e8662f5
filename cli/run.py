"""``blobstore run``: starts the server that is installed, with a model of the store."""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import click

from blobstore.cli import arguments, options, output
from blobstore.errors import MissingLibrary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.cli.output import Output
    from blobstore.store.local import LocalStore


class _Server(NamedTuple):
    library: str
    """The module that must be installed."""
    module: str
    """The program of blobstore that starts it."""
    port: int
    """By default."""


_SERVERS = {
    "vllm": _Server("vllm", "blobstore.integrations.vllm.server", 8000),
    "mlx-lm": _Server("mlx_lm", "blobstore.integrations.mlx_lm.server", 8080),
}
"""The first that is installed is started."""


@click.command(
    "run",
    short_help="Start the inference server that is installed with a model.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("name", type=arguments.MODEL)
@click.argument("rest", metavar="[-- ARGUMENT...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--with",
    "chosen",
    type=click.Choice(list(_SERVERS)),
    help="The server; by default the first of these that is installed.",
)
@click.option("--dry-run", is_flag=True, help="Start nothing; print the command.")
@options.shared("store", "json")
def command(
    name: str,
    rest: tuple[str, ...],
    chosen: str | None,
    dry_run: bool,
    store: LocalStore,
    out: Output,
) -> None:
    """Start an inference server with the model NAME, from the store itself, in place of this process.

    The server is vLLM or mlx-lm. It gets each ARGUMENT after "--", such as --port 9000. Other servers
    read the folder that "blobstore link" makes.
    """
    if out.is_json and not dry_run:
        raise click.UsageError(
            "--json needs --dry-run: without it, the output is that of the server"
        )
    model = arguments.model(store, name)
    store.resolve(model)  # an error of ours is clearer than one of the server
    server = _server(chosen)
    words = [sys.executable, "-m", server.module, str(model), "--store", str(store.root), *rest]
    address = (
        f"http://{_option(rest, '--host', '127.0.0.1')}:{_option(rest, '--port', server.port)}"
    )
    body = json.dumps({"model": str(model), "messages": [{"role": "user", "content": "Hello"}]})
    curl = [
        *("curl", f"{address}/v1/chat/completions"),
        *("-H", "Content-Type: application/json", "-d", body),
    ]
    if dry_run:
        out.result({"command": words, "address": address}, shlex.join(words))
        return
    output.show_note(f"{server.library} will serve {model} at {address}; ask it with:")
    output.show_note(shlex.join(curl))
    os.execv(words[0], words)  # noqa: S606 - the words are no shell's


def _server(chosen: str | None) -> _Server:
    for name, server in _SERVERS.items():
        if chosen in {None, name} and find_spec(server.library) is not None:
            return server
    wanted = " or ".join([chosen] if chosen else _SERVERS)
    raise MissingLibrary(
        f"no inference server is installed: {wanted}",
        advice="install 'vllm' for GPUs or 'tensor-blobstore[mlx] mlx-lm' for other machines; docs/serving "
        "has others",
    )


def _option(words: Sequence[str], name: str, default: object) -> object:
    """Return the value of an option that the server gets."""
    for at, word in enumerate(words):
        if word == name and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return default
