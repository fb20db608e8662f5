"""``blobstore gc``: give back the space of what no model reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import render
from blobstore.cli.options import json_option, parse_duration, store_option, wait_option

if TYPE_CHECKING:
    from blobstore.operations.maintenance.gc import Collected, Removed
    from blobstore.store.local import LocalStore


@click.command("gc", short_help="Remove blobs that no model reaches.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, and tell what would be.")
@click.option(
    "--older-than",
    metavar="TIME",
    default="1h",
    show_default=True,
    callback=parse_duration,
    help="Keep what was written later than that; 30m, 1h, 2d.",
)
@store_option
@wait_option
@json_option
def command(store: LocalStore, dry_run: bool, older_than: float, as_json: bool) -> None:
    """Remove blobs that no model reaches, what dead processes left, and empty folders.

    Other processes may go on meanwhile: what a running create, load or copy uses is kept, however
    old it is. A manifest that cannot be read stops it, for nobody knows which blobs that one needs.
    """
    from blobstore.operations.maintenance.gc import collect_garbage

    collected = collect_garbage(store, older_than=older_than, dry_run=dry_run)
    if as_json:
        render.show_json(_as_json(collected, dry_run=dry_run))
    else:
        render.show(_as_text(collected, dry_run=dry_run))


def _as_json(collected: Collected, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "bytes": collected.size,
        "blobs": [_removed(item) for item in collected.blobs],
        "leftovers": [_removed(item) for item in collected.leftovers],
        "folders": [str(folder) for folder in collected.folders],
        "kept": {"blobs": collected.kept, "bytes": collected.kept_size},
        "kept_as_bases": {"blobs": collected.bases, "bytes": collected.bases_size},
    }


def _removed(item: Removed) -> dict[str, Any]:
    return {"path": str(item.path), "bytes": item.size}


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
    lines.append(
        f"{verb} {render.count_of(len(collected.blobs), 'blob')}, "
        f"{render.human_bytes(collected.size)} in all{kept if collected.kept else ''}"
    )
    if collected.bases:
        blobs = render.count_of(collected.bases, "blob")
        lines.append(
            f"kept {blobs} of no model, {render.human_bytes(collected.bases_size)}: cold blobs of "
            'models are coded by them; "blobstore thaw" those models first to free that'
        )
    return "\n".join(lines)
