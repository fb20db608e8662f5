"""``blobstore link``: create a Hugging Face folder of links to a model's blobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.cli.output import Output
    from blobstore.operations.export.link import Linked
    from blobstore.store.local import LocalStore


@click.command("link", short_help="Create a Hugging Face folder of links to a model's blobs.")
@click.argument("name", type=arguments.MODEL)
@click.argument("folder", metavar="DIR", type=arguments.FOLDER)
@options.shared("store")
@click.option(
    "--hard",
    is_flag=True,
    help="Make hard links, which stay valid if the store removes a blob, instead of symbolic links.",
)
@click.option(
    "--old-keys",
    is_flag=True,
    help="Repeat values in config.json under the keys of transformers 4, which mlx-lm needs.",
)
@click.option("--thaw", is_flag=True, help="Thaw the model first, if it is frozen.")
@click.option(
    "--force",
    is_flag=True,
    help="Replace the folder, if it has only files of a model, of this one or another.",
)
@options.shared("jobs", "wait", "json")
def command(
    name: str,
    folder: str,
    store: LocalStore,
    hard: bool,
    old_keys: bool,
    thaw: bool,
    force: bool,
    jobs: int | None,
    out: Output,
) -> None:
    """Create the new folder DIR, from which servers load the model NAME as from an export.

    Its weight files are links to blobs. Only blobs whose tensors have other names in such a folder
    become files, such as those of quantized weights. A frozen model has to be thawed first, with --thaw or
    "blobstore thaw".
    """
    from blobstore.cli.thaw import thaw_whole
    from blobstore.operations.export.link import link_model

    model = arguments.model(store, name)
    with progress_bar() as progress:
        if thaw:
            thaw_whole(model, store, progress)
        linked = link_model(
            model,
            folder,
            store=store,
            hard=hard,
            old_keys=old_keys,
            force=force,
            jobs=jobs,
            progress=progress,
        )
    output.show_note(*linked.notices)
    fields = "folder files tensors links bytes_linked shared bytes_shared copied bytes_copied notices seconds"
    out.result(
        {"name": model} | output.record(linked, fields),
        f"linked {model} in {escape(str(linked.folder))}: "
        f"{render.count_of(linked.tensors, 'tensor')} in {', '.join(_kinds(linked))}; "
        f"{render.human_seconds(linked.seconds)}",
    )


def _kinds(linked: Linked) -> Iterator[str]:
    """Yield the number and the size of each kind of weight file."""
    if linked.links:
        yield f"{render.count_of(linked.links, 'link')} ({render.human_bytes(linked.bytes_linked)})"
    if linked.shared:
        size = render.human_bytes(linked.bytes_shared)
        yield f"{render.count_of(linked.shared, 'file')} sharing {size} with blobs"
    if linked.copied:
        size = render.human_bytes(linked.bytes_copied)
        yield f"{render.count_of(linked.copied, 'file')} copied ({size})"
