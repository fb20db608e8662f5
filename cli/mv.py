"""``blobstore mv``: renames a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments
from blobstore.cli.cp import naming_options, show_named

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


@click.command("mv", short_help="Rename a model.")
@click.argument("source", metavar="SRC", type=arguments.MODEL)
@click.argument("target", metavar="DST", type=arguments.NEW_NAME)
@naming_options
def command(source: str, target: Reference, store: LocalStore, force: bool, out: Output) -> None:
    """Rename the model SRC to DST. If the process is killed in between, both names remain."""
    from blobstore.operations.maintenance.names import rename_model

    model = arguments.model(store, source, needs_name=True)
    show_named(rename_model(model, target, store=store, force=force), "renamed", out)
