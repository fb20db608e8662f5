"""The command line of the servers: options, errors and exit statuses."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from blobstore.core.escape import escape
from blobstore.errors import BlobstoreError, UsageError
from blobstore.models.checks import Verify
from blobstore.models.read_strategy import Read
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_INTERRUPTED = 128 + signal.SIGINT


class ServerOptions(NamedTuple):
    """The options of a server's command line."""

    name: str
    store: LocalStore
    opening: dict[str, Any]
    """``verify`` and ``read`` of :func:`blobstore.open`."""
    rest: list[str]
    """The library's own options."""


def run_server(
    module: str,
    server: str,
    command: str,
    serve: Callable[[ServerOptions], None],
    arguments: Sequence[str] | None,
) -> int:
    """Parse the command line, serve until the process is stopped, and return its exit status.

    Args:
        module: the module of the command.
        server: a description of the server.
        command: the library's own command, whose options are passed on.
        serve: runs the server.
        arguments: the command line; by default that of this process.
    """
    options, rest = _parser(module, server, command).parse_known_args(arguments)
    opening = {"read": options.read} | ({"verify": options.verify} if options.verify else {})
    try:
        if options.store == "":  # an unset variable of a script must not mean the current folder
            raise UsageError("--store must not be empty")
        serve(ServerOptions(options.name, LocalStore(options.store), opening, rest))
    except BlobstoreError as error:
        sys.stderr.write(f"blobstore: error: {escape(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _parser(module: str, server: str, command: str) -> argparse.ArgumentParser:
    """Return the parser of a server's command line; the arguments are those of :func:`run_server`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage=f"%(prog)s NAME [--store DIR] [--verify LEVEL] [--read HOW] [options of {command}]",
        description=f"Serve a model of the store with {server}.",
        epilog=f"Other options are those of {command}: see {command} --help.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="the model, [host/][namespace/]model[:tag], or its address in object storage",
    )
    parser.add_argument(
        "--store",
        metavar="DIR",
        help="folder of the store (default: $BLOBSTORE_HOME or ~/.blobstore)",
    )
    parser.add_argument(
        "--verify",
        choices=get_args(Verify),
        help="how closely to check blobs before they are used (default: $BLOBSTORE_VERIFY, or digest if "
        "the store can keep what was hashed, and else size)",
    )
    parser.add_argument(
        "--read",
        choices=get_args(Read),
        default="auto",
        help="how to read blobs (default: auto, which chooses by the file system)",
    )
    return parser
