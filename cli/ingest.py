"""``blobstore ingest``: import many models, on this machine or on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import options, render

if TYPE_CHECKING:
    from blobstore.operations.ingest.ingest import IngestedModel, Item
    from blobstore.store.local import LocalStore


@click.command("ingest", short_help="Import the models of a list, on a cluster if you like.")
@click.argument("list_", metavar="LIST", type=click.File("r", encoding="utf-8", errors="strict"))
@click.option(
    "--to",
    "target",
    metavar="ADDRESS",
    help="Import into a store in object storage instead, such as s3://bucket/prefix.",
)
@click.option(
    "--executor",
    metavar="ENGINE",
    default="processes",
    show_default=True,
    help="threads[:N], processes[:N], dask://HOST:PORT or ray://HOST:PORT.",
)
@click.option(
    "--retries",
    metavar="N",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Try a model again after a failure that may pass.",
)
@click.option("--quantize", "quant_type", type=options.QUANT_TYPE, help="As for create.")
@click.option("--dry-run", is_flag=True, help="Import nothing; list the models and their names.")
@options.store_option
@options.wait_option
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    list_: Any,
    store: LocalStore,
    target: str | None,
    executor: str,
    retries: int,
    quant_type: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Import the models of LIST, a file or - for standard input, each as one task of an engine.

    Each line is SOURCE [NAME], quoted as in a shell; # begins a comment. SOURCE is what "blobstore
    create" takes. All workers must reach the sources and the store by the same paths. Models whose
    names are there already are skipped, so the same command continues what was interrupted.
    """
    from blobstore.operations.ingest.ingest import ingest, read_list

    try:
        items = read_list(list_)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{list_.name} is not UTF-8 at byte {error.start}", ctx) from None
    if dry_run:
        _show_items(items, as_json=as_json)
        return

    def show(model: IngestedModel, done: int, total: int) -> None:
        if not as_json:
            render.show(f"[{done}/{total}] {_as_text(model)}")

    choices = {} if quant_type is None else {"quantize": quant_type}
    models = ingest(
        items, target or store, executor=executor, retries=retries, on_done=show, **choices
    )
    failed = [model for model in models if model.error]
    if as_json:
        _show_models(models)
    else:
        written = render.human_bytes(sum(model.bytes_written for model in models))
        present = sum(model.is_present for model in models)
        render.show(
            f"{render.count_of(len(models), 'model')}, {len(failed)} failed, {present} already "
            f"there; {written} written"
        )
        for model in failed:
            render.show_error(f"{model.name}: {model.error}")
    if failed:
        ctx.exit(max(model.exit_code for model in failed))


def _show_models(models: list[IngestedModel]) -> None:
    fields = "source name present=is_present blobs bytes_written attempts seconds"
    entries = render.records(models, fields)
    for entry, model in zip(entries, models, strict=True):
        entry["error"] = None
        if model.error:
            entry["error"] = {
                "kind": model.kind,
                "message": model.error,
                "exit_code": model.exit_code,
            }
    render.show_json({"dry_run": False, "models": entries})


def _show_items(items: list[Item], *, as_json: bool) -> None:
    if as_json:
        render.show_json({"dry_run": True, "models": render.records(items, "source name")})
        return
    rows = [(render.cell(item.name), render.cell(item.source)) for item in items]
    render.show(render.table(("NAME", "SOURCE"), rows))
    render.show(f"{render.count_of(len(items), 'model')}; nothing was imported")


def _as_text(model: IngestedModel) -> str:
    name = render.cell(model.name)
    if model.error:
        return f"{name}: failed"
    if model.is_present:
        return f"{name}: already there"
    return (
        f"{name}: {render.count_of(model.blobs, 'blob')}, "
        f"{render.human_bytes(model.bytes_written)} written, {render.human_seconds(model.seconds)}"
    )
