"""``blobstore cp``: gives a model a second name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.manifests.reference import Reference
    from blobstore.operations.maintenance.names import Named
    from blobstore.store.local import LocalStore

_force_option = click.option(
    "--force", is_flag=True, help="Take the name from another model that has it."
)


def naming_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that cp, mv and tag share."""
    for option in (options.json_option, options.wait_option, options.store_option, _force_option):
        command = option(command)
    return command


def show_named(named: Named, done: str, *, as_json: bool) -> None:
    """Print the new name of a model, and whether it belonged to another model."""
    if as_json:
        render.show_json(render.record(named, "source name=target digest replaced"))
        return
    replaced = ", which was the name of another model" if named.replaced else ""
    render.show(f"{done} {render.cell(named.source)} to {render.cell(named.target)}{replaced}")


@click.command("cp", short_help="Give a model a second name.")
@click.argument("source", metavar="SRC", type=options.MODEL)
@click.argument("target", metavar="DST", type=options.NEW_NAME)
@naming_options
def command(source: str, target: Reference, store: LocalStore, force: bool, as_json: bool) -> None:
    """Give the model SRC the additional name DST. Both names share all blobs; no data is copied."""
    from blobstore.operations.maintenance.names import copy_model

    with options.model(store, source) as model:
        named = copy_model(model, target, store=store, force=force)
    show_named(named, "copied", as_json=as_json)
