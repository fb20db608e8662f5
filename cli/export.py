"""``blobstore export``: write a model as a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


@click.command("export", short_help="Write a model as a Hugging Face folder.")
@click.argument("name", callback=options.parse_name)
@click.argument("folder", metavar="DIR")
@options.store_option
@click.option(
    "--shard-size",
    callback=options.parse_size,
    default="5GB",
    show_default=True,
    help="Bytes of tensors per file; larger models become several files with an index.",
)
@click.option(
    "--dequantize", is_flag=True, help="Write quantized weights as plain values, not packed."
)
@options.jobs_option
@options.json_option
def command(
    name: Reference,
    folder: str,
    store: LocalStore,
    shard_size: int,
    dequantize: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Write the model NAME to the new folder DIR, in the layout of Hugging Face's libraries.

    Tensors have the names and the bytes that they had in the source.
    """
    from blobstore.operations.export.export import export_model

    with options.suggesting_names(store, [name]), render.progress_bar() as progress:
        exported = export_model(
            name,
            folder,
            store=store,
            shard_size=shard_size,
            dequantize=dequantize,
            jobs=jobs,
            progress=progress,
        )
    if as_json:
        fields = "folder files tensors shards bytes_written seconds"
        render.show_json({"name": name} | render.record(exported, fields))
        return
    render.show(
        f"exported {name} to {escape(str(exported.folder))}: "
        f"{render.count_of(exported.tensors, 'tensor')} in "
        f"{render.count_of(exported.shards, 'file')} of {render.count_of(exported.files, 'file')}, "
        f"{render.human_bytes(exported.bytes_written)}, {render.human_seconds(exported.seconds)}"
    )
