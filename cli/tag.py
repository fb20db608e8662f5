"""``blobstore tag``: gives a model another tag."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options
from blobstore.cli.cp import naming_options, show_named
from blobstore.core.escape import quote_place
from blobstore.errors import UsageError
from blobstore.manifests.reference import Reference

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.store.local import LocalStore


@click.command("tag", short_help="Give a model another tag.")
@click.argument("name", type=arguments.MODEL_OR_ADDRESS)
@click.argument("tag")
@options.shared("plain-http")
@naming_options
def command(
    name: str, tag: str, store: LocalStore, force: bool, plain_http: bool | None, out: Output
) -> None:
    """Give the model NAME the additional tag TAG, or the name MODEL:TAG.

    A tag such as run:best, whose model has a tag of its own, such as run:500, moves to NAME
    without --force.

    NAME may be the address of a model elsewhere, such as oci://host/repository:tag: the tag is added
    there.
    """
    from blobstore.remotes.addresses import is_address

    is_name = ":" in tag and not (is_address(name) or is_address(tag))
    if "/" in tag and not is_name:
        raise UsageError(
            f"{quote_place(tag)} is not a tag",
            advice="give the tag alone; 'blobstore cp' takes complete names of the store",
        )
    if is_address(name):
        from blobstore.operations.maintenance.remote_names import tag_remote

        show_named(tag_remote(name, tag, force=force, plain_http=plain_http), "copied", out)
        return
    from blobstore.operations.maintenance.names import copy_model

    model = arguments.model(store, name)
    target = Reference.parse(tag) if is_name else replace(model, tag=tag)
    named = copy_model(model, target, store=store, force=force)
    show_named(named, "copied", out)
