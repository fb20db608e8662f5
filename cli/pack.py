"""``blobstore pack``: models as one file, for machines without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import render
from blobstore.cli.options import (
    jobs_option,
    json_option,
    parse_names,
    store_option,
    suggesting_names,
    wait_option,
)
from blobstore.core.escape import escape, quote

if TYPE_CHECKING:
    from blobstore.manifests.reference import Reference
    from blobstore.operations.freeze.blob_encoder import Level
    from blobstore.store.local import LocalStore

SUFFIX = ".bsar"


def parse_file(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Return the name of an archive; that of a model in its place is an error. A callback of click."""
    if not value.endswith(SUFFIX):
        raise click.BadParameter(
            f"{quote(value)} does not end in {SUFFIX}; the file comes last", ctx, param
        )
    return value


@click.command("pack", short_help="Write models to one file, an archive.")
@click.argument("names", metavar="NAME...", nargs=-1, required=True, callback=parse_names)
@click.argument("file", metavar="FILE.bsar", callback=parse_file)
@click.option(
    "--level",
    type=click.Choice(["fast", "small"]),
    default="fast",
    show_default=True,
    help="Fast to code and to decode, or as small as can be; what is frozen is taken as it is.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@store_option
@jobs_option
@wait_option
@json_option
def command(
    names: tuple[Reference, ...],
    file: str,
    store: LocalStore,
    level: Level,
    force: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Write the models NAME to the new file FILE.bsar, without loss and in little room.

    What several of them share is there once. "blobstore unpack" brings them into another store. All
    is read back and compared before the file appears.
    """
    from blobstore.operations.archive.pack import pack_models

    with suggesting_names(store, names), render.progress_bar() as progress:
        packed = pack_models(
            names,
            file,
            store=store,
            level=level,
            overwrite=force,
            jobs=jobs,
            progress=progress,
        )
    if as_json:
        render.show_json(
            {
                "file": str(packed.path),
                "names": [str(reference) for reference in packed.references],
                "blobs": packed.blobs,
                "deltas": packed.deltas,
                "bytes": packed.size,
                "stored_bytes": packed.stored,
                "seconds": round(packed.seconds, 3),
            }
        )
        return
    share = f" ({1 - packed.stored / packed.size:.1%} less)" if packed.stored < packed.size else ""
    render.show(
        f"packed {render.count_of(len(packed.references), 'model')} into "
        f"{escape(str(packed.path))}: {render.count_of(packed.blobs, 'blob')} of "
        f"{render.human_bytes(packed.size)} take {render.human_bytes(packed.stored)}{share}; "
        f"{render.human_seconds(packed.seconds)}"
    )
