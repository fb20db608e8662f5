"""``blobstore cp``: gives a model a second name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render
from blobstore.core.escape import escape

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
    if not named.is_new and done == "copied":
        render.show(
            f"nothing to do: {render.cell(named.target)} is {render.cell(named.source)} already"
        )
        return
    replaced = ", which was the name of another model" if named.replaced else ""
    render.show(f"{done} {render.cell(named.source)} to {render.cell(named.target)}{replaced}")


@click.command("cp", short_help="Give a model a second name, or copy it to another store.")
@click.argument("source", metavar="SRC", type=options.MODEL)
@click.argument("target", metavar="[DST]", required=False, type=options.NEW_NAME)
@click.option(
    "--to",
    metavar="STORE",
    type=options.FOLDER,
    help="Copy the model to another store, under the name DST, or else under its own.",
)
@naming_options
@options.jobs_option
@click.pass_context
def command(
    ctx: click.Context,
    source: str,
    target: Reference | None,
    to: str | None,
    store: LocalStore,
    force: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Give the model SRC the additional name DST. Both names share all blobs; no data is copied.

    With --to, the blobs that the other store does not have are copied to it, and hashed on the way.
    """
    from blobstore.operations.maintenance.names import copy_model

    if to is not None:
        _copy_to_store(source, target, to, store, force=force, jobs=jobs, as_json=as_json)
        return
    if target is None:
        raise click.UsageError("missing argument 'DST'", ctx)
    with options.model(store, source) as model:
        named = copy_model(model, target, store=store, force=force)
    show_named(named, "copied", as_json=as_json)


def _copy_to_store(
    source: str,
    target: Reference | None,
    to: str,
    store: LocalStore,
    *,
    force: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    from blobstore.operations.maintenance.copy_to_store import copy_to_store

    with options.model(store, source) as model, render.progress_bar() as progress:
        copied = copy_to_store(
            model, to, target, store=store, force=force, jobs=jobs, progress=progress
        )
    if as_json:
        fields = "source name=target store digest replaced bytes_written bytes_present seconds"
        render.show_json(render.record(copied, fields))
        return
    replaced = ", which was the name of another model" if copied.replaced else ""
    render.show(
        f"copied {render.cell(copied.source)} to {render.cell(copied.target)} in "
        f"{escape(str(copied.store))}{replaced}: {render.human_bytes(copied.bytes_written)} written, "
        f"{render.human_bytes(copied.bytes_present)} already there, "
        f"{render.human_seconds(copied.seconds)}"
    )
