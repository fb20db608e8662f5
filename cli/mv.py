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
@click.argument("source", metavar="SRC", callback=options.parse_name)
@click.argument("target", metavar="DST", callback=options.parse_name)
@naming_options
def command(
    source: Reference, target: Reference, store: LocalStore, force: bool, as_json: bool
) -> None:
    """Rename the model SRC to DST. If the process is killed in between, both names remain."""
    from blobstore.operations.maintenance.names import rename_model

    with options.suggesting_names(store, [source]):
        named = rename_model(source, target, store=store, force=force)
    show_named(named, "renamed", as_json=as_json)
