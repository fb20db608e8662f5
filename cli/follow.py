"""``blobstore follow``: keep a name equal to what another place has."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_lines
from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.operations.follow.follow import Followed
    from blobstore.store.local import LocalStore

_STDERR = 2
_END_SECONDS = 10
"""How long a command may take to end after this program was asked to."""


@click.command("follow", short_help="Keep a name equal to what another place has.")
@click.argument("name", type=arguments.FORMER_NAME)
@click.argument("source", metavar="FROM", type=arguments.REMOTE)
@click.option(
    "--interval",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="Time between two questions; 'blobstore serve' answers at once when there is a new version.",
)
@click.option(
    "--exec",
    "hook",
    metavar="COMMAND",
    help="Run COMMAND after each version, without a shell; it gets BLOBSTORE_NAME, BLOBSTORE_DIGEST, "
    "BLOBSTORE_PREVIOUS and BLOBSTORE_HOME.",
)
@click.option("--once", is_flag=True, help="Ask once, and exit.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Give the last N versions tags of their own, and remove the tags of older ones.",
)
@options.shared("streams", "limit-rate", "plain-http", "store", "jobs", "wait", "json")
def command(
    name: Reference,
    source: str,
    interval: float,
    hook: str | None,
    once: bool,
    keep_last: int | None,
    streams: int,
    limit_rate: int | None,
    plain_http: bool | None,
    store: LocalStore,
    jobs: int | None,
    out: Output,
) -> None:
    """Make NAME what FROM has, and again whenever that changes, until Ctrl-C.

    FROM is a tag in a registry or at 'blobstore serve' (oci://host/repository:tag), a name in object
    storage (s3://bucket/prefix/name:tag, gs://, az://, file://), a repository of the Hub
    (hf://org/name@revision), the folder of another store, or a folder that a trainer writes
    (slime:FOLDER, sglang:FOLDER, modelexpress:FOLDER). Deltas are fetched where the store has their
    bases. NAME stays the former version until the new one is complete and checked.

    Each version is a line; with --json, a line of JSON. Errors are printed, and FROM is asked again
    after a pause. With --once, an error ends the command, also that of COMMAND.
    """
    from blobstore.operations.follow.follow import follow

    words = _words(hook)
    found = follow(
        name,
        source,
        store=store,
        interval=interval,
        keep_last=keep_last,
        once=once,
        streams=streams,
        limit_rate=limit_rate,
        jobs=jobs,
        plain_http=plain_http,
        on_error=_show_error,
        # A bar would stand between the lines of versions.
        progress=None if output.is_quiet() else progress_lines(),
    )
    failed = False
    followed = None
    for followed in found:
        _show(followed, out)
        failed = bool(words) and not _run(words, followed, store)
    if once and followed is None:
        _show_unchanged(name, source, store, out)
    if once and failed:
        click.get_current_context().exit(1)


def _words(hook: str | None) -> list[str]:
    try:
        words = shlex.split(hook or "")
    except ValueError as error:
        raise UsageError(f"--exec {quote(hook)}: {error}") from None
    if hook is not None and not words:
        raise UsageError("--exec: there is no command")
    return words


def _show_error(error: BlobstoreError, seconds: float) -> None:
    output.show_error(f"{error}; asking again in {render.human_seconds(seconds)}")


def _show(followed: Followed, out: Output) -> None:
    fields = "name=reference source version digest previous bytes_fetched kept seconds"
    record = output.record(followed, fields)
    record["previous"] = followed.previous and str(followed.previous)
    what = "installed" if followed.previous is None else "replaced"
    text = (
        f"{what} {render.cell(followed.reference)}: {followed.digest.short} from "
        f"{render.cell(followed.source)}, {render.human_bytes(followed.bytes_fetched)}; "
        f"{render.human_seconds(followed.seconds)}"
    )
    out.result(record, text, notes=followed.notices if output.is_verbose() else ())


def _show_unchanged(name: Reference, source: str, store: LocalStore, out: Output) -> None:
    from blobstore.core.digest import Digest

    digest = str(Digest.of(store.read_manifest(name)))
    record = {
        "name": name,
        "source": source,
        "version": None,
        "digest": digest,
        "previous": digest,
        "bytes_fetched": 0,
        "kept": None,
        "seconds": out.seconds,
    }
    out.result(record, f"{render.cell(name)} is what {render.cell(source)} has")


def _run(words: Sequence[str], followed: Followed, store: LocalStore) -> bool:
    """Run the command of a version, and return whether it succeeded. Its output goes to standard error."""
    environment = {
        **os.environ,
        # Its commands of ours are about the store that follows, which --store may have chosen.
        "BLOBSTORE_HOME": str(store.root.absolute()),
        "BLOBSTORE_NAME": str(followed.reference),
        "BLOBSTORE_DIGEST": str(followed.digest),
        "BLOBSTORE_PREVIOUS": "" if followed.previous is None else str(followed.previous),
    }
    try:
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=_STDERR, stderr=_STDERR
        )
    except OSError as error:
        output.show_error(f"cannot run {quote(words[0])}: {error.strerror}")
        return False
    try:
        status = interrupts.call(process.wait)
    except BaseException:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if status:
        output.show_error(f"{quote(words[0])} failed with status {status}")
    return not status
