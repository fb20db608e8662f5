"""``blobstore convert``: write a checkpoint as a safetensors file, without a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from blobstore.cli.output import Output


@click.command("convert", short_help="Write a checkpoint as a safetensors file.")
@click.argument("source", type=arguments.FILE)
@click.argument("target", metavar="OUT.safetensors", type=arguments.FILE_TO_WRITE)
@options.shared("subtree", "strip-prefix", "weights", "keep-names", "skip-unreadable")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@options.shared("jobs", "json")
def command(
    source: str,
    target: str,
    subtree: str | None,
    strip_prefix: str | None,
    weights: str | None,
    keep_names: bool,
    skip_unreadable: bool,
    force: bool,
    jobs: int | None,
    out: Output,
) -> None:
    """Write the tensors of SOURCE, a checkpoint or a model folder, to the file OUT.

    No code of the source is run. The file appears complete or not at all.
    """
    from blobstore.operations.export.convert import convert_checkpoint

    with progress_bar() as progress:
        copied = convert_checkpoint(
            source,
            target,
            subtree=subtree,
            strip_prefix=strip_prefix,
            weights=weights,
            keep_names=keep_names,
            skip_unreadable=skip_unreadable,
            force=force,
            jobs=jobs,
            progress=progress,
        )
    output.show_note(*copied.notices)
    out.result(
        output.record(copied, "file=path tensors bytes_written notices") | {"seconds": out.seconds},
        f"wrote {escape(str(copied.path))}: {render.count_of(copied.tensors, 'tensor')}, "
        f"{render.human_bytes(copied.bytes_written)}",
    )
