"""``blobstore convert``: write a checkpoint as a safetensors file, without a store."""

from __future__ import annotations

import time

import click

from blobstore.cli import options, render
from blobstore.core.escape import escape, quote

SUFFIX = ".safetensors"


def _parse_target(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not value.endswith(SUFFIX):
        raise click.BadParameter(f"the file must end in {SUFFIX}, got {quote(value)}", ctx, param)
    return value


@click.command("convert", short_help="Write a checkpoint as a safetensors file.")
@click.argument("source", type=options.FILE)
@click.argument("out", metavar="OUT.safetensors", type=options.FILE, callback=_parse_target)
@click.option(
    "--subtree", metavar="PATH", help="Part of a PyTorch checkpoint; '.' is the whole checkpoint."
)
@click.option(
    "--weights", metavar="PATTERN", help="File names of the weights, if a folder has several sets."
)
@click.option(
    "--keep-names", is_flag=True, help="Keep the tensor names and the row order of Meta's Llamas."
)
@click.option(
    "--skip-unreadable",
    is_flag=True,
    help="Skip tensors of a PyTorch checkpoint whose type safetensors does not have.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@options.jobs_option
@options.json_option
def command(
    source: str,
    out: str,
    subtree: str | None,
    weights: str | None,
    keep_names: bool,
    skip_unreadable: bool,
    force: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Write the tensors of SOURCE, a checkpoint or a model folder, to the file OUT.

    No code of the source is run. The file appears complete or not at all.
    """
    from blobstore.operations.export.convert import convert_checkpoint

    begin = time.monotonic()
    with render.progress_bar() as progress:
        copied = convert_checkpoint(
            source,
            out,
            subtree=subtree,
            weights=weights,
            keep_names=keep_names,
            skip_unreadable=skip_unreadable,
            overwrite=force,
            jobs=jobs,
            progress=progress,
        )
    for notice in copied.notices:
        render.show_note(notice)
    if as_json:
        shown = render.record(copied, "file=path tensors bytes_written notices")
        render.show_json(shown | {"seconds": render.since(begin)})
        return
    render.show(
        f"wrote {escape(str(copied.path))}: {render.count_of(copied.tensors, 'tensor')}, "
        f"{render.human_bytes(copied.bytes_written)}"
    )
