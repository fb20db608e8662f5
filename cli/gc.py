"""``blobstore gc``: deletes blobs that no model references."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render

if TYPE_CHECKING:
    from blobstore.operations.maintenance.gc import Collected
    from blobstore.store.local import LocalStore


@click.command("gc", short_help="Remove blobs that no model references.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; report what would be removed.")
@click.option(
    "--older-than",
    metavar="TIME",
    default="1h",
    show_default=True,
    callback=options.parse_duration,
    help="Keep files written within TIME, such as 30m, 1h or 2d.",
)
@options.store_option
@options.wait_option
@options.json_option
def command(store: LocalStore, dry_run: bool, older_than: float, as_json: bool) -> None:
    """Remove blobs that no model references, files of dead processes, and empty folders.

    Other processes may continue to work: blobs that a running create, load or copy uses are kept,
    however old they are. If a manifest cannot be read, gc stops and removes nothing, because it
    cannot tell which blobs are in use.
    """
    from blobstore.operations.maintenance.gc import collect_garbage

    collected = collect_garbage(store, older_than=older_than, dry_run=dry_run)
    if as_json:
        result = {
            "dry_run": dry_run,
            "bytes": collected.size,
            "blobs": render.records(collected.blobs, "path bytes=size"),
            "leftovers": render.records(collected.leftovers, "path bytes=size"),
            "folders": collected.folders,
            "kept": render.record(collected, "blobs=kept bytes=kept_size"),
            "kept_as_bases": render.record(collected, "blobs=bases bytes=bases_size"),
        }
        render.show_json(result)
    else:
        render.show(_as_text(collected, dry_run=dry_run))


def _as_text(collected: Collected, *, dry_run: bool) -> str:
    verb = "would remove" if dry_run else "removed"
    lines = [
        f"{verb} {render.cell(item.path)} ({render.human_bytes(item.size)})"
        for item in (*collected.blobs, *collected.leftovers)
    ]
    lines += [f"{verb} {render.cell(folder)}" for folder in collected.folders]
    kept = (
        f"; kept {render.count_of(collected.kept, 'blob')} in use or too young, "
        f"{render.human_bytes(collected.kept_size)}"
    )
    if collected.blobs or collected.leftovers:
        blobs = render.count_of(len(collected.blobs), "blob")
        done = f"{verb} {blobs}, {render.human_bytes(collected.size)} in all"
    elif collected.folders:
        done = f"{verb} {render.count_of(len(collected.folders), 'empty folder')}"
    else:
        done = "nothing to remove"
    lines.append(f"{done}{kept if collected.kept else ''}")
    if collected.bases:
        blobs = render.count_of(collected.bases, "blob")
        lines.append(
            f"kept {blobs} of no model, {render.human_bytes(collected.bases_size)}: bases of frozen "
            'blobs; run "blobstore thaw" on their models first to free that'
        )
    return "\n".join(lines)
