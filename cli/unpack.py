"""``blobstore unpack``: import the models of an archive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import render
from blobstore.cli.options import (
    jobs_option,
    json_option,
    parse_names,
    store_option,
    wait_option,
)
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from blobstore.manifests.reference import Reference
    from blobstore.operations.archive.unpack import CheckedArchive, Unpacked
    from blobstore.store.local import LocalStore


@click.command("unpack", short_help="Import the models of an archive.")
@click.argument("file", metavar="FILE.bsar")
@click.argument("names", metavar="[NAME]...", nargs=-1, callback=parse_names)
@click.option("--verify-only", is_flag=True, help="Decode and hash the models, and write nothing.")
@click.option("--force", is_flag=True, help="Replace other models that have the names.")
@store_option
@jobs_option
@wait_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    file: str,
    names: tuple[Reference, ...],
    store: LocalStore,
    verify_only: bool,
    force: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Import the models NAME, by default all, from the archive FILE.bsar.

    Blobs that the store already has are not written again. The names appear last, when all blobs are
    safe on disk. Nothing is imported from a truncated or modified archive.
    """
    if verify_only and force:
        raise click.UsageError("--verify-only and --force contradict each other", ctx)
    from blobstore.operations.archive.unpack import check_archive, unpack_archive

    with render.progress_bar() as progress:
        if verify_only:
            checked = check_archive(file, names, jobs=jobs, progress=progress)
        else:
            unpacked = unpack_archive(
                file, names, store=store, force=force, jobs=jobs, progress=progress
            )
    if verify_only:
        _show_checked(checked, as_json=as_json)
    else:
        _show_unpacked(unpacked, as_json=as_json)


def _show_checked(checked: CheckedArchive, *, as_json: bool) -> None:
    if as_json:
        sizes = {"bytes": checked.size, "stored_bytes": checked.stored}
        render.show_json(_common(checked) | sizes)
        return
    render.show(
        f"{escape(str(checked.path))} is intact: {render.count_of(checked.blobs, 'blob')} of "
        f"{render.human_bytes(checked.size)} in {render.human_bytes(checked.stored)}; "
        f"{render.human_seconds(checked.seconds)}"
    )
    _show_names(checked)


def _show_unpacked(unpacked: Unpacked, *, as_json: bool) -> None:
    if as_json:
        written = {
            "bytes_written": unpacked.bytes_written,
            "bytes_present": unpacked.bytes_present,
        }
        render.show_json(_common(unpacked) | written)
        return
    present = unpacked.bytes_present
    already = f", {render.human_bytes(present)} already present" if present else ""
    render.show(
        f"unpacked {render.count_of(len(unpacked.references), 'model')}: "
        f"{render.count_of(unpacked.blobs, 'blob')}, {render.human_bytes(unpacked.bytes_written)} "
        f"written{already}; {render.human_seconds(unpacked.seconds)}"
    )
    _show_names(unpacked)


def _show_names(result: CheckedArchive | Unpacked) -> None:
    for reference in result.references:
        render.show(f"  {render.cell(reference)}")


def _common(result: CheckedArchive | Unpacked) -> dict[str, Any]:
    return {
        "file": str(result.path),
        "names": [str(reference) for reference in result.references],
        "blobs": result.blobs,
        "seconds": round(result.seconds, 3),
    }
