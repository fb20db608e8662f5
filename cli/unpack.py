"""``blobstore unpack``: import the models of an archive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.operations.archive.unpack import CheckedArchive, Unpacked
    from blobstore.store.local import LocalStore


@click.command("unpack", short_help="Import the models of an archive.")
@click.argument("file", metavar="FILE.bsar", type=options.FILE)
@click.argument("names", metavar="[NAME]...", nargs=-1, type=options.MODEL)
@click.option("--verify-only", is_flag=True, help="Decode and hash the models, and write nothing.")
@click.option(
    "--signature",
    "signatures",
    metavar="FILE",
    type=options.FILE,
    multiple=True,
    help="A signature of a model, which is stored with it; may be repeated.",
)
@click.option("--force", is_flag=True, help="Replace other models that have the names.")
@options.store_option
@options.jobs_option
@options.wait_option
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    file: str,
    names: tuple[str, ...],
    store: LocalStore,
    verify_only: bool,
    signatures: tuple[str, ...],
    force: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Import the models NAME, by default all, from the archive FILE.bsar.

    Blobs that the store already has are not written again. The names appear last, when all blobs are
    safe on disk. Nothing is imported from a truncated or modified archive.
    """
    if verify_only and (force or signatures):
        option = "--force" if force else "--signature"
        raise click.UsageError(f"--verify-only and {option} contradict each other", ctx)
    from blobstore.operations.archive.reader import open_archive
    from blobstore.operations.archive.unpack import check_archive, unpack_archive
    from blobstore.store.name_patterns import select_references

    chosen: Sequence[Reference] = ()
    if names:
        with open_archive(file) as archive:
            chosen = select_references(archive, names)
    with render.progress_bar() as progress:
        if verify_only:
            checked = check_archive(file, chosen, jobs=jobs, progress=progress)
        else:
            unpacked = unpack_archive(
                file,
                chosen,
                store=store,
                signatures=signatures,
                force=force,
                jobs=jobs,
                progress=progress,
            )
            for notice in unpacked.notices:
                render.show_note(notice)
    done: CheckedArchive | Unpacked = checked if verify_only else unpacked
    if as_json:
        sizes = "bytes=size" if verify_only else "bytes_written bytes_present"
        fields = f"file=path names=references blobs stored_bytes=stored seconds {sizes}"
        render.show_json(render.record(done, fields))
        return
    if verify_only:
        work = (
            f"{escape(str(checked.path))} is intact: {render.count_of(checked.blobs, 'blob')} of "
            f"{render.human_bytes(checked.size)} in {render.human_bytes(checked.stored)}"
        )
    else:
        present = unpacked.bytes_present
        already = f", {render.human_bytes(present)} already present" if present else ""
        work = (
            f"unpacked {render.count_of(len(unpacked.references), 'model')}: "
            f"{render.count_of(unpacked.blobs, 'blob')}, "
            f"{render.human_bytes(unpacked.bytes_written)} written{already}"
        )
    render.show(f"{work}; {render.human_seconds(done.seconds)}")
    for reference in done.references:
        render.show(f"  {render.cell(reference)}")
