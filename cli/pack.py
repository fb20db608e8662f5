"""``blobstore pack``: write models to one archive file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import escape, quote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.cli.output import Output
    from blobstore.compression.level import Level
    from blobstore.operations.archive.pack import Packed
    from blobstore.store.local import LocalStore

SUFFIX = ".bsar"


def parse_file(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Return the path of an archive, a callback of click. A model name in its place is an error."""
    if not value.endswith(SUFFIX):
        raise click.BadParameter(
            f"the last argument must be a file that ends in {SUFFIX}, got {quote(value)}",
            ctx,
            param,
        )
    return value


@click.command("pack", short_help="Write models to one archive file.")
@click.argument("names", metavar="NAME...", nargs=-1, type=arguments.MODEL)
@click.argument("file", metavar="FILE.bsar", type=arguments.FILE_TO_WRITE, callback=parse_file)
@options.level_option(
    "Fast to compress and decompress, or small. Frozen tensors are copied at either level."
)
@click.option(
    "--no-signatures",
    is_flag=True,
    help="Leave the signatures of the models out, for programs that expect none in archives.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@options.shared("store", "jobs", "wait", "json")
def command(
    names: tuple[str, ...],
    file: str,
    store: LocalStore,
    level: Level,
    no_signatures: bool,
    force: bool,
    jobs: int | None,
    out: Output,
) -> None:
    """Write the models NAME to the new archive FILE.bsar, losslessly compressed.

    Blobs that several models share are stored once. "blobstore unpack" imports the models into
    another store, with their signatures. The archive is read back and verified before the file appears.
    """
    from blobstore.operations.archive.pack import pack_models

    if not names:  # the last argument is always the file
        raise click.UsageError("missing argument 'NAME...'")
    chosen = arguments.models(store, names)
    arguments.note_states(store, chosen)
    with progress_bar() as progress:
        packed = pack_models(
            chosen,
            file,
            store=store,
            level=level,
            signatures=not no_signatures,
            force=force,
            jobs=jobs,
            progress=progress,
        )
    fields = (
        "file=path names=references blobs deltas bytes=size stored_bytes=stored fallbacks signatures "
        "notices seconds"
    )
    out.result(output.record(packed, fields), _as_text(packed), notes=packed.notices)


def _as_text(packed: Packed) -> Iterator[str]:
    share = f" ({1 - packed.stored / packed.size:.1%} less)" if packed.stored < packed.size else ""
    count = packed.signatures
    signed = f", {render.count_of(count, 'signature')}" if count else ""
    yield (
        f"packed {render.count_of(len(packed.references), 'model')} into "
        f"{escape(str(packed.path))}: {render.count_of(packed.blobs, 'blob')} of "
        f"{render.human_bytes(packed.size)} take {render.human_bytes(packed.stored)}{share}{signed}; "
        f"{render.human_seconds(packed.seconds)}"
    )
    if packed.fallbacks:
        yield (
            f"  {render.count_of(packed.fallbacks, 'blob')} compressed without a base: "
            "the delta could not be verified"
        )
