"""``blobstore export``: write a model as a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.operations.export.export import Exported
    from blobstore.store.local import LocalStore

_FIELDS = "folder files tensors shards bytes_written original=is_original seconds"


@click.command("export", short_help="Write the files that models were imported from.")
@click.argument(
    "names", metavar="NAME...", nargs=-1, required=True, type=arguments.MODELS_TO_FOLDER
)
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
    "--as",
    "layout",
    type=click.Choice(["folder", "ollama", "dcp", "trainer"]),
    default="folder",
    show_default=True,
    help="A new folder of files; a folder of Ollama's models, to which a model of Ollama's is added; "
    "or a new folder of torch.distributed.checkpoint, or of the Trainer with its state.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace the folder, if it has only files of a model, of this one or another.",
)
@options.shared("jobs", "json")
def command(
    names: tuple[str, ...],
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

    With several NAMEs, or a glob such as 'team/*', each model gets a folder of its own in DIR. If one
    fails, the others follow.

    They are those of the source, byte for byte. If the import converted tensors or read a PyTorch
    checkpoint, the tensors are written to new safetensors files instead.
    """
    from blobstore.operations.export.export import export_model
    from blobstore.store.name_patterns import is_pattern

    is_many = len(names) > 1 or is_pattern(names[0])
    if is_many and layout != "folder":
        raise click.UsageError(f"--layout {layout} takes one NAME")
    if layout != "folder" and (shard_size or single or dequantize):
        raise click.UsageError(f"--layout {layout} takes no other options for weight files")
    choices: dict[str, Any] = {
        "store": store,
        "shard_size": shard_size,
        "single": single,
        "dequantize": dequantize,
        "force": force,
        "jobs": jobs,
    }
    if is_many:
        _export_many(arguments.models(store, names), folder, choices, out)
        return
    model = arguments.model(store, names[0])
    with progress_bar() as progress:
        if layout == "folder":
            exported = export_model(model, folder, progress=progress, **choices)
        else:
            exported = _writer_of(layout)(
                model, folder, store=store, force=force, progress=progress
            )
    out.result({"name": model} | output.record(exported, _FIELDS), _as_text(model, exported))


def _writer_of(layout: str) -> Callable[..., Exported]:
    if layout in ("dcp", "trainer"):
        from blobstore.integrations.torch_checkpoint import export_checkpoint, export_trainer

        return export_checkpoint if layout == "dcp" else export_trainer
    from blobstore.operations.export.ollama import export_to_ollama

    return export_to_ollama


def _export_many(
    models: Sequence[Reference], folder: str, choices: dict[str, Any], out: Output
) -> None:
    from blobstore.cli.transferred import show_many
    from blobstore.operations.export.export import export_models

    with progress_bar() as progress:
        outcomes = export_models(models, folder, progress=progress, **choices)
    done = [(one.name, one.result) for one in outcomes if one.result is not None]
    show_many(
        outcomes,
        _FIELDS,
        (_as_text(name, result) for name, result in done),
        f"exported {render.count_of(len(done), 'model')} to {escape(folder)}: "
        f"{render.human_bytes(sum(result.bytes_written for _, result in done))}",
        out,
        is_resumed=False,
    )


def _as_text(model: object, exported: Exported) -> str:
    return (
        f"exported {model} to {escape(str(exported.folder))}: "
        f"{render.count_of(exported.tensors, 'tensor')} in "
        f"{render.count_of(exported.shards, 'file')} of {render.count_of(exported.files, 'file')}, "
        f"{render.human_bytes(exported.bytes_written)}, "
        f"{'as in the source, ' * exported.is_original}{render.human_seconds(exported.seconds)}"
    )
