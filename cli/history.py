"""``blobstore history``: prints the models that a name had."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


@click.command("history", short_help="List the models that a name had before.")
@click.argument("name", type=arguments.FORMER_NAME)
@options.shared("store", "json")
def command(name: Reference, store: LocalStore, out: Output) -> None:
    """List the models that NAME had before it was given to another one or removed, latest first.

    "blobstore restore" gives them back, until "blobstore gc" removes their blobs. They keep no blob
    alive.
    """
    from blobstore.operations.maintenance.history import model_history

    arguments.models(store, [str(name)])  # notes a name that another user gave
    former = model_history(name, store=store)
    rows = [
        (
            item.digest.short,
            render.human_bytes(item.size),
            render.human_age(item.until),
            "yes" if item.is_restorable else "no: blobs are gone",
        )
        for item in former
    ]
    fields = "digest until bytes=size restorable=is_restorable"
    out.result(
        {"name": name, "former": output.records(former, fields)},
        render.table(("ID", "SIZE", "UNTIL", "RESTORABLE"), rows, right=(1,)) if rows else "",
        notes=[] if rows else [f"{name} has not been another model before, as far as is known"],
    )
