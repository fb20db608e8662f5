"""``blobstore unpack``: import the models of an archive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.cli.show_path import show_archive
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.operations.archive.unpack import CheckedArchive, Unpacked
    from blobstore.store.local import LocalStore


@click.command("unpack", short_help="Import the models of an archive.")
@click.argument("file", metavar="FILE.bsar", type=arguments.FILE)
@click.argument("names", metavar="[NAME]...", nargs=-1, type=arguments.MODEL)
@click.option(
    "--list",
    "is_list",
    is_flag=True,
    help="List the models, their sizes, IDs and signers; import nothing.",
)
@click.option("--verify-only", is_flag=True, help="Decode and hash the models, and import nothing.")
@click.option(
    "--signature",
    "signatures",
    metavar="FILE",
    type=arguments.FILE,
    multiple=True,
    help="One more signature of a model, which is stored with it; may be repeated.",
)
@options.shared("as")
@click.option("--force", is_flag=True, help="Replace other models that have the names.")
@options.shared("store", "jobs", "wait", "json")
def command(
    file: str,
    names: tuple[str, ...],
    store: LocalStore,
    is_list: bool,
    verify_only: bool,
    signatures: tuple[str, ...],
    prefix: str | None,
    force: bool,
    jobs: int | None,
    out: Output,
) -> None:
    """Import the models NAME, by default all, from the archive FILE.bsar.

    Blobs that the store already has are not written again. The names appear last, when all blobs are
    safe on disk. Nothing is imported from a truncated or modified archive.
    """
    given = {
        "--list": is_list,
        "--verify-only": verify_only,
        "--as": prefix,
        "--force": force,
        "--signature": signatures,
    }
    options_given = [option for option, value in given.items() if value]
    if (is_list or verify_only) and len(options_given) > 1:
        raise click.UsageError(f"{' and '.join(options_given[:2])} contradict each other")
    if is_list:
        show_archive(file, names, out, store)
        return
    from blobstore.archives.reader import open_archive
    from blobstore.operations.archive.unpack import check_archive, unpack_archive
    from blobstore.store.name_patterns import select_references

    chosen: Sequence[Reference] = ()
    if names:
        with open_archive(file) as archive:
            chosen = select_references(archive, names)
    fields = "file=path names=references blobs stored_bytes=stored seconds"
    with progress_bar() as progress:
        if verify_only:
            checked = check_archive(file, chosen, jobs=jobs, progress=progress)
        else:
            unpacked = unpack_archive(
                file,
                chosen,
                store=store,
                signatures=signatures,
                prefix=prefix,
                force=force,
                jobs=jobs,
                progress=progress,
            )
    if verify_only:
        work = (
            f"{escape(str(checked.path))} is intact: {render.count_of(checked.blobs, 'blob')} of "
            f"{render.human_bytes(checked.size)} in {render.human_bytes(checked.stored)}"
        )
        out.result(output.record(checked, f"{fields} bytes=size"), _as_text(checked, work))
        return
    output.show_note(*unpacked.notices)
    present = unpacked.bytes_present
    signed = f", {render.count_of(unpacked.signatures, 'signature')}" if unpacked.signatures else ""
    already = f", {render.human_bytes(present)} already present" if present else ""
    work = (
        f"unpacked {render.count_of(len(unpacked.references), 'model')}: "
        f"{render.count_of(unpacked.blobs, 'blob')}, "
        f"{render.human_bytes(unpacked.bytes_written)} written{already}{signed}"
    )
    data = output.record(unpacked, f"{fields} bytes_written bytes_present signatures")
    out.result(data, _as_text(unpacked, work))


def _as_text(done: CheckedArchive | Unpacked, work: str) -> list[str]:
    names = [f"  {render.cell(reference)}" for reference in done.references]
    return [f"{work}; {render.human_seconds(done.seconds)}", *names]
