"""``blobstore restore``: gives a name the model that it had before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


@click.command("restore", short_help="Give a name the model that it had before.")
@click.argument("name", type=arguments.FORMER_NAME)
@click.argument("ident", metavar="[ID]", required=False, type=arguments.FORMER_ID)
@options.shared("store", "wait", "json")
def command(name: Reference, ident: str | None, store: LocalStore, out: Output) -> None:
    """Give NAME the model that it had before, or the one of this ID; "blobstore history" lists them.

    That undoes "blobstore rm", too. The model that NAME has now becomes a former one, so a restore can be undone. No data is copied.
    """
    from blobstore.operations.maintenance.history import restore_model

    arguments.models(store, [str(name)])  # notes a name that another user gave
    restored = restore_model(name, ident, store=store)
    out.result(
        output.record(restored, "name=target digest replaced"),
        f"restored {render.cell(restored.target)} to {restored.digest.short}",
    )
