"""``blobstore tag``: gives a model another tag."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from blobstore.cli import options
from blobstore.cli.cp import naming_options, show_named

if TYPE_CHECKING:
    from blobstore.store.local import LocalStore


@click.command("tag", short_help="Give a model another tag.")
@click.argument("name", type=options.MODEL)
@click.argument("tag")
@naming_options
def command(name: str, tag: str, store: LocalStore, force: bool, as_json: bool) -> None:
    """Give the model NAME the additional tag TAG. "blobstore cp" does the same with complete names."""
    from blobstore.operations.maintenance.names import copy_model

    with options.model(store, name) as model:
        named = copy_model(model, replace(model, tag=tag), store=store, force=force)
    show_named(named, "copied", as_json=as_json)
