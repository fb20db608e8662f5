"""``blobstore cp``: gives a model a second name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.operations.maintenance.names import Named
    from blobstore.operations.maintenance.remote_names import RemoteTag
    from blobstore.store.local import LocalStore

_force_option = click.option(
    "--force", is_flag=True, help="Take the name from another model that has it."
)


def naming_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that cp, mv and tag share."""
    return _force_option(options.shared("store", "wait", "json")(command))


def show_named(named: Named | RemoteTag, done: str, out: Output) -> None:
    """Print the new name of a model, and whether it belonged to another model."""
    source, target = render.cell(named.source), render.cell(named.target)
    replaced = ", which was the name of another model" if named.replaced else ""
    text = f"{done} {source} to {target}{replaced}"
    if not named.is_new and done == "copied":
        text = f"nothing to do: {target} is {source} already"
    data = output.record(named, "digest replaced")
    out.result({"source": str(named.source), "name": str(named.target)} | data, text)


@click.command("cp", short_help="Give a model a second name, or copy it to another store.")
@click.argument("source", metavar="SRC", type=arguments.MODEL)
@click.argument("target", metavar="[DST]", required=False, type=arguments.NEW_NAME)
@click.option(
    "--to",
    metavar="STORE",
    type=arguments.FOLDER,
    help="Copy the model to another store, under the name DST, or else under its own. SRC may match several.",
)
@naming_options
@options.shared("jobs")
def command(
    source: str,
    target: Reference | None,
    to: str | None,
    store: LocalStore,
    force: bool,
    jobs: int | None,
    out: Output,
) -> None:
    """Give the model SRC the additional name DST. Both names share all blobs; no data is copied.

    A tag such as run:best, whose model has a tag of its own, such as run:500, moves without --force.

    With --to, the blobs that the other store does not have are copied to it, and hashed on the way.
    Without DST, SRC may be a glob such as 'team/*' then. If a model fails, the others follow.
    """
    from blobstore.operations.maintenance.names import copy_model

    if to is not None:
        names = arguments.models(store, [source]) if target is None else ()
        if len(names) > 1:
            _copy_many(names, to, store, force=force, jobs=jobs, out=out)
        else:
            _copy_to_store(source, target, to, store, force=force, jobs=jobs, out=out)
        return
    if target is None:
        raise click.UsageError("missing argument 'DST'")
    named = copy_model(arguments.model(store, source), target, store=store, force=force)
    show_named(named, "copied", out)


def _copy_to_store(
    source: str,
    target: Reference | None,
    to: str,
    store: LocalStore,
    *,
    force: bool,
    jobs: int | None,
    out: Output,
) -> None:
    from blobstore.operations.maintenance.copy_to_store import copy_to_store

    model = arguments.model(store, source)
    arguments.note_states(store, [model])
    with progress_bar() as progress:
        copied = copy_to_store(
            model, to, target, store=store, force=force, jobs=jobs, progress=progress
        )
    replaced = ", which was the name of another model" if copied.replaced else ""
    out.result(
        output.record(
            copied, "source name=target store digest replaced bytes_written bytes_present seconds"
        ),
        f"copied {render.cell(copied.source)} to {render.cell(copied.target)} in "
        f"{escape(str(copied.store))}{replaced}: {render.human_bytes(copied.bytes_written)} written, "
        f"{render.human_bytes(copied.bytes_present)} already there, "
        f"{render.human_seconds(copied.seconds)}",
    )


def _copy_many(
    names: Sequence[Reference],
    to: str,
    store: LocalStore,
    *,
    force: bool,
    jobs: int | None,
    out: Output,
) -> None:
    from blobstore.cli.transferred import show_many
    from blobstore.operations.maintenance.copy_to_store import copy_models

    arguments.note_states(store, names)
    with progress_bar() as progress:
        models = copy_models(names, to, store=store, force=force, jobs=jobs, progress=progress)
    done = [model.result for model in models if model.result is not None]
    written, present = (
        render.human_bytes(sum(getattr(one, key) for one in done))
        for key in ("bytes_written", "bytes_present")
    )
    show_many(
        models,
        "digest replaced bytes_written bytes_present",
        (f"copied {render.cell(one.target)}" for one in done),
        f"copied {render.count_of(len(done), 'model')} to {escape(to)}: {written} written, "
        f"{present} already there",
        out,
    )
