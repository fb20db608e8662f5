"""What the commands that run a library's own server on a model of the store have in common."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from blobstore.core.escape import escape
from blobstore.errors import BlobstoreError, UsageError
from blobstore.models.checks import Verify
from blobstore.models.memory import Prefetch, Read
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_INTERRUPTED = 128 + signal.SIGINT


class Asked(NamedTuple):
    """What a server is asked to serve."""

    name: str
    store: LocalStore
    opening: dict[str, Any]
    """``verify``, ``read`` and ``prefetch`` of :func:`blobstore.open`."""
    rest: list[str]
    """The library's own options."""


def run_server(
    module: str,
    server: str,
    command: str,
    serve: Callable[[Asked], None],
    arguments: Sequence[str] | None,
) -> int:
    """Serve until the process is told to end, and return its exit code.

    Args:
        module: the module of the command.
        server: what is run, for people.
        command: the library's own command, whose options are passed on.
        serve: runs it.
        arguments: those of the command line; by default those of this process.
    """
    parser = _parser(module, server, command)
    options, rest = parser.parse_known_args(arguments)
    opening = {"verify": options.verify, "read": options.read, "prefetch": options.prefetch}
    try:
        if options.store == "":  # an unset variable of a script must not mean the current folder
            raise UsageError("the store's folder is empty text")
        serve(Asked(options.name, LocalStore(options.store), opening, rest))
    except BlobstoreError as error:
        sys.stderr.write(f"blobstore: error: {escape(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _parser(module: str, server: str, command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage=f"%(prog)s NAME [--store DIR] [--verify LEVEL] [--read HOW] [--prefetch HOW] [options of {command}]",
        description=f"Serve a model of the store with {server}.",
        epilog=f"Other options are those of {command}: see {command} --help.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="the model, [host/][namespace/]model[:tag]")
    parser.add_argument("--store", metavar="DIR", help="folder of the store")
    parser.add_argument(
        "--verify",
        choices=get_args(Verify),
        default="size",
        help="how closely blobs are looked at before they are used (default: size)",
    )
    parser.add_argument(
        "--read",
        choices=get_args(Read),
        default="mmap",
        help="how blobs are read; pread suits network file systems (default: mmap)",
    )
    parser.add_argument(
        "--prefetch",
        choices=get_args(Prefetch),
        help="bring mapped blobs into memory before they are used",
    )
    return parser
