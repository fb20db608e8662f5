"""``blobstore restore``: gives a name the model that it had before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render

if TYPE_CHECKING:
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


@click.command("restore", short_help="Give a name the model that it had before.")
@click.argument("name", type=options.NEW_NAME)
@click.argument("ident", metavar="[ID]", required=False)
@options.store_option
@options.wait_option
@options.json_option
def command(name: Reference, ident: str | None, store: LocalStore, as_json: bool) -> None:
    """Give NAME the model that it had before, or the one of this ID; "blobstore history" lists them.

    The model that NAME has now becomes a former one, so a restore can be undone. No data is copied.
    """
    from blobstore.operations.maintenance.history import restore_model

    with options.models(store, [str(name)]):
        restored = restore_model(name, ident, store=store)
    if as_json:
        render.show_json(render.record(restored, "name=target digest replaced"))
        return
    render.show(f"restored {render.cell(restored.target)} to {restored.digest.short}")
