"""``blobstore history``: prints the models that a name had."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render

if TYPE_CHECKING:
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


@click.command("history", short_help="List the models that a name had before.")
@click.argument("name", type=options.NEW_NAME)
@options.store_option
@options.json_option
def command(name: Reference, store: LocalStore, as_json: bool) -> None:
    """List the models that NAME had before it was given to another one, latest first.

    "blobstore restore" gives them back, until "blobstore gc" removes their blobs. They keep no blob
    alive. Names that were removed with "blobstore rm" have no history of that.
    """
    from blobstore.operations.maintenance.history import model_history

    with options.models(store, [str(name)]):
        former = model_history(name, store=store)
    if as_json:
        shown = render.records(former, "digest until bytes=size restorable=is_restorable")
        for item in shown:
            item["until"] = render.timestamp(item["until"])
        render.show_json({"name": name, "former": shown})
    elif former:
        rows = [
            (
                item.digest.short,
                render.human_bytes(item.size),
                render.human_age(item.until),
                "yes" if item.is_restorable else "no: blobs are gone",
            )
            for item in former
        ]
        render.show(render.table(("ID", "SIZE", "UNTIL", "RESTORABLE"), rows, right=(1,)))
    else:
        render.show_note(f"{name} has not been another model before, as far as is known")
