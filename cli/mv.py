"""``blobstore mv``: renames a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options
from blobstore.cli.cp import naming_options, show_named

if TYPE_CHECKING:
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


@click.command("mv", short_help="Rename a model.")
@click.argument("source", metavar="SRC", type=options.MODEL)
@click.argument("target", metavar="DST", type=options.NEW_NAME)
@naming_options
def command(source: str, target: Reference, store: LocalStore, force: bool, as_json: bool) -> None:
    """Rename the model SRC to DST. If the process is killed in between, both names remain."""
    from blobstore.operations.maintenance.names import rename_model

    with options.model(store, source, needs_name=True) as model:
        named = rename_model(model, target, store=store, force=force)
    show_named(named, "renamed", as_json=as_json)
