"""``blobstore export``: write a model as a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.store.local import LocalStore


@click.command("export", short_help="Write the files that a model was imported from.")
@click.argument("name", type=arguments.MODEL)
@click.argument("folder", metavar="DIR", type=arguments.FOLDER)
@options.shared("store")
@click.option(
    "--shards",
    "--shard-size",
    "shard_size",
    metavar="SIZE",
    callback=options.parse_size,
    help="Write new weight files of at most SIZE, such as 5GB, instead of those of the source.",
)
@click.option(
    "--single", is_flag=True, help="Write one new weight file instead of those of the source."
)
@click.option(
    "--dequantize", is_flag=True, help="Write quantized weights as plain values, not packed."
)
@click.option(
    "--layout",
    type=click.Choice(["folder", "ollama"]),
    default="folder",
    show_default=True,
    help="A new folder of files, or a folder of Ollama's models, to which a model of Ollama's is added.",
)
@click.option("--force", is_flag=True, help="Replace an older folder of this model.")
@options.shared("jobs", "json")
def command(
    name: str,
    folder: str,
    store: LocalStore,
    shard_size: int | None,
    single: bool,
    dequantize: bool,
    layout: str,
    force: bool,
    jobs: int | None,
    out: Output,
) -> None:
    """Write the files that the model NAME was imported from to the new folder DIR.

    They are those of the source, byte for byte. If the import converted tensors or read a PyTorch
    checkpoint, the tensors are written to new safetensors files instead.
    """
    from blobstore.operations.export.export import export_model
    from blobstore.operations.export.ollama import export_to_ollama

    model = arguments.model(store, name)
    if layout == "ollama" and (shard_size or single or dequantize):
        raise click.UsageError("--layout ollama writes the files that Ollama had, and no others")
    with progress_bar() as progress:
        if layout == "ollama":
            exported = export_to_ollama(model, folder, store=store, force=force, progress=progress)
        else:
            exported = export_model(
                model,
                folder,
                store=store,
                shard_size=shard_size,
                single=single,
                dequantize=dequantize,
                force=force,
                jobs=jobs,
                progress=progress,
            )
    fields = "folder files tensors shards bytes_written original=is_original seconds"
    out.result(
        {"name": model} | output.record(exported, fields),
        f"exported {model} to {escape(str(exported.folder))}: "
        f"{render.count_of(exported.tensors, 'tensor')} in "
        f"{render.count_of(exported.shards, 'file')} of {render.count_of(exported.files, 'file')}, "
        f"{render.human_bytes(exported.bytes_written)}, "
        f"{'as in the source, ' * exported.is_original}{render.human_seconds(exported.seconds)}",
    )
