"""``blobstore ingest``: import many models, on this machine or on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render

if TYPE_CHECKING:
    from blobstore.cli.output import Output
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
@click.option("--quantize", "quant_type", type=arguments.QUANT_TYPE, help="As for create.")
@click.option("--dry-run", is_flag=True, help="Import nothing; list the models and their names.")
@options.shared("store", "wait", "json")
def command(
    list_: Any,
    store: LocalStore,
    target: str | None,
    executor: str,
    retries: int,
    quant_type: str | None,
    dry_run: bool,
    out: Output,
) -> None:
    """Import the models of LIST, a file or - for standard input, each as one task of an engine.

    Each line is SOURCE [NAME], quoted as in a shell; # begins a comment. SOURCE is what "blobstore
    create" takes. All workers must reach the sources and the store by the same paths. Models whose
    names are there already are skipped, so the same command continues what was interrupted.
    """
    from blobstore.operations.ingest.ingest import ingest, read_list
    from blobstore.planning.plan import QuantizeOptions

    try:
        items = read_list(list_)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{list_.name} is not UTF-8 at byte {error.start}") from None
    if dry_run:
        _show_items(items, out)
        return

    lines = output.GrowingLines()

    def show(model: IngestedModel, done: int, total: int) -> None:
        if not out.is_json:
            lines.add([f"[{done}/{total}] {_as_text(model)}"])
            if not model.is_present:  # the next may take long
                lines.print()

    models = ingest(
        items,
        target or store,
        executor=executor,
        retries=retries,
        on_done=show,
        quantize=QuantizeOptions(quant_type),
    )
    lines.print()
    failed = [model for model in models if model.error]
    written = render.human_bytes(sum(model.bytes_written for model in models))
    present = sum(model.is_present for model in models)
    out.result(
        lambda: {"dry_run": False, "models": list(map(_as_json, models))},
        f"{render.count_of(len(models), 'model')}, {len(failed)} failed, {present} already there; "
        f"{written} written",
    )
    output.exit_with(
        (f"{model.name}: {model.error}" for model in failed),
        max((model.exit_code for model in failed), default=0),
    )


def _as_json(model: IngestedModel) -> dict[str, Any]:
    fields = "source name present=is_present blobs bytes_written attempts seconds"
    failure = None
    if model.error:
        failure = output.record(model, "kind message=error exit_code")
    return output.record(model, fields) | {"error": failure}


def _show_items(items: list[Item], out: Output) -> None:
    rows = [(render.cell(item.name), render.cell(item.source)) for item in items]
    out.result(
        {"dry_run": True, "models": output.records(items, "source name")},
        (
            render.table(("NAME", "SOURCE"), rows),
            f"{render.count_of(len(items), 'model')}; nothing was imported",
        ),
    )


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
