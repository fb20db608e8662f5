"""``blobstore tag``: give a model another tag of its name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from blobstore.cli.cp import force_option, show_named
from blobstore.cli.options import (
    json_option,
    parse_name,
    store_option,
    suggesting_names,
    wait_option,
)

if TYPE_CHECKING:
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


@click.command("tag", short_help="Give a model another tag.")
@click.argument("name", callback=parse_name)
@click.argument("tag")
@force_option
@store_option
@wait_option
@json_option
def command(name: Reference, tag: str, store: LocalStore, force: bool, as_json: bool) -> None:
    """Give the model NAME the tag TAG too, as "blobstore cp" does with a whole name."""
    from blobstore.naming import copy_model

    with suggesting_names(store, [name]):
        named = copy_model(name, replace(name, tag=tag), store=store, force=force)
    show_named(named, "copied", as_json=as_json)
