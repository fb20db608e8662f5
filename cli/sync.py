"""``blobstore sync``: makes a store have the models of a lock file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import resumable_progress

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.store.local import LocalStore

_DIFFERENT = 1


@click.command("sync", short_help="Fetch exactly the models of a lock file.")
@click.argument("file", metavar="[FILE]", default="models.lock", type=arguments.FILE)
@click.option("--check", is_flag=True, help="Fetch nothing; exit with 1 if anything differs.")
@click.option("--frozen", is_flag=True, help="Replace no model that has a name of the file.")
@options.shared("streams", "limit-rate", "plain-http", "store", "jobs", "wait", "json")
def command(
    file: str,
    check: bool,
    frozen: bool,
    store: LocalStore,
    streams: int,
    limit_rate: int | None,
    plain_http: bool | None,
    jobs: int | None,
    out: Output,
) -> None:
    """Make the store have the models of the lock FILE, with the same digests.

    Models that are there stay as they are. Others are pulled, or imported from the Hub at their commit,
    and the digests of their manifests are compared. Models that the file does not list stay.
    """
    from blobstore.operations.transfer.sync import sync_models

    with resumable_progress() as progress:
        models = sync_models(
            file,
            store=store,
            check=check,
            replace_others=not frozen,
            progress=progress,
            streams=streams,
            limit_rate=limit_rate,
            plain_http=plain_http,
            jobs=jobs,
        )
    for model in models:
        output.show_note(*model.notices)
    failed = [model for model in models if model.error is not None]
    different = [model for model in models if model.state in ("missing", "other model")]
    rows = [
        (render.cell(model.reference), model.manifest.short, model.state)
        for model in models
        if model.state != "present" or output.is_verbose()
    ]
    same = sum(model.state == "present" for model in models)
    table = [render.table(("NAME", "ID", "STATE"), rows)] if rows else []
    records = output.records(models, "name=reference state error")
    for record, model in zip(records, models, strict=True):
        record |= {"manifest": str(model.manifest), "found": model.found and str(model.found)}
    out.result(
        {"models": records, "seconds": out.seconds},
        [*table, f"already there: {same} of {render.count_of(len(models), 'model')}"],
    )
    output.exit_with(
        (f"{model.reference}: {model.error}" for model in failed),
        max((model.error.exit_code for model in failed if model.error is not None), default=0),
    )
    if different:
        click.get_current_context().exit(_DIFFERENT)
