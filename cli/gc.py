"""``blobstore gc``: deletes blobs that no model references."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.cli.output import Output
    from blobstore.operations.maintenance.collected import Collected, KeptBlob
    from blobstore.operations.maintenance.gc_objects import CollectedObjects
    from blobstore.store.local import LocalStore


@click.command("gc", short_help="Remove blobs that no model references.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; report what would be removed.")
@options.older_than_option(
    "Keep files written within TIME, such as 30m, 1h or 2d; 1h by default, and 7d for unfinished downloads."
)
@click.option(
    "--force",
    is_flag=True,
    help="Remove blobs even if these are all or nearly all of the store, or of models whose manifests are lost.",
)
@click.option(
    "--remote",
    metavar="ADDRESS",
    help="Collect a store in object storage instead, such as s3://bucket/prefix; there, TIME is 1d by default.",
)
@options.shared("store", "wait", "json")
def command(
    store: LocalStore,
    dry_run: bool,
    older_than: float | None,
    force: bool,
    remote: str | None,
    out: Output,
) -> None:
    """Remove blobs that no model references, files of dead processes, and empty folders.

    Other processes may continue to work: blobs that a running create, load or copy uses are kept,
    however old they are. If a manifest cannot be read, gc stops and removes nothing, because it
    cannot tell which blobs are in use. It does the same if there are blobs but no manifests, or if
    it would remove over 90 % of all blobs, unless --force is given. Blobs of a model whose manifest
    was lost and not removed are kept, unless --force is given. Each file is listed with -v and with
    --dry-run.
    """
    if remote is not None:
        _collect_objects(remote, older_than, out, dry_run=dry_run, force=force)
        return
    from blobstore.operations.maintenance.gc import collect_garbage

    notes = arguments.store_notes(store)
    collected = collect_garbage(store=store, older_than=older_than, dry_run=dry_run, force=force)
    out.result(
        lambda: {"dry_run": dry_run} | _as_json(collected) | {"seconds": out.seconds},
        _as_text(collected, dry_run=dry_run),
        notes=notes,
    )
    _note_refusal(collected.refusal)


def _collect_objects(
    remote: str, older_than: float | None, out: Output, *, dry_run: bool, force: bool
) -> None:
    from blobstore.operations.maintenance.gc_objects import GRACE, collect_objects

    grace = GRACE if older_than is None else older_than
    collected = collect_objects(remote, older_than=grace, dry_run=dry_run, force=force)
    data = {
        "dry_run": dry_run,
        "bytes": collected.size,
        "blobs": output.records(collected.removed, "path=key bytes=size"),
        "young": collected.young,
        "leased": collected.leased,
        "complete": collected.is_complete,
        "refusal": collected.refusal or None,
        "seconds": out.seconds,
    }
    out.result(data, _objects_as_text(collected, dry_run=dry_run))
    if not collected.is_complete:
        output.show_note("time was up; run it again")
    _note_refusal(collected.refusal)


def _note_refusal(refusal: str) -> None:
    if refusal:
        output.show_note(f"gc refuses to do this without --force: {refusal}")


def _as_json(collected: Collected) -> dict[str, Any]:
    return {
        "bytes": collected.size,
        "blobs": output.records(collected.blobs, "path bytes=size"),
        "leftovers": output.records(collected.leftovers, "path bytes=size"),
        "folders": collected.folders,
        "kept": output.record(collected, "blobs=kept bytes=kept_size"),
        "kept_as_bases": output.record(collected, "blobs=bases bytes=bases_size"),
        "kept_blobs": output.records(
            collected.kept_blobs, "path bytes=size reason processes removable"
        ),
        "refusal": collected.refusal or None,
    }


def _objects_as_text(collected: CollectedObjects, *, dry_run: bool) -> Iterator[str]:
    verb = "would remove" if dry_run else "removed"
    if dry_run or output.is_verbose():
        for item in collected.removed:
            yield f"{verb} {render.cell(item.key)} ({render.human_bytes(item.size)})"
    blobs = sum(item.key.startswith("blobs/") for item in collected.removed)
    yield _total(verb, blobs, len(collected.removed) - blobs, collected.size)
    for count, why in (
        (collected.young, "too young; with --older-than 0s at once"),
        (collected.leased, "imports may need them, for a day if they were killed"),
    ):
        if count:
            yield f"kept {render.count_of(count, 'blob')}: {why}"


def _as_text(collected: Collected, *, dry_run: bool) -> Iterator[str]:
    verb = "would remove" if dry_run else "removed"
    if dry_run or output.is_verbose():
        for item in (*collected.blobs, *collected.leftovers):
            yield f"{verb} {render.cell(item.path)} ({render.human_bytes(item.size)})"
        for folder in collected.folders:
            yield f"{verb} {render.cell(folder)}"
        for kept in collected.kept_blobs:
            size = render.human_bytes(kept.size)
            yield f"kept {render.cell(kept.path)} ({size}): {_reason([kept])}"
    if collected.folders and not (collected.blobs or collected.leftovers):
        yield f"{verb} {render.count_of(len(collected.folders), 'empty folder')}"
    else:
        yield _total(verb, len(collected.blobs), len(collected.leftovers), collected.size)
    groups: dict[tuple[str, tuple[int, ...]], list[KeptBlob]] = {}
    for kept in collected.kept_blobs:
        groups.setdefault((kept.reason, kept.processes), []).append(kept)
    for group in groups.values():
        size = render.human_bytes(sum(kept.size for kept in group))
        yield f"kept {render.count_of(len(group), 'blob')}, {size}: {_reason(group)}"


def _total(verb: str, blobs: int, others: int, size: int) -> str:
    if not blobs and not others:
        return "nothing to remove"
    more = f" and {render.count_of(others, 'other file')}" if others else ""
    return f"{verb} {render.count_of(blobs, 'blob')}{more}, {render.human_bytes(size)} in all"


def _reason(blobs: Sequence[KeptBlob]) -> str:
    """Return the reason that these blobs were kept for, which all of them have."""
    reason, processes = blobs[0].reason, blobs[0].processes
    if reason == "young":
        wait = max(blob.removable for blob in blobs) - time.time()
        return f"too young, removable in {render.human_wait(wait)}; with --older-than 0s at once"
    if reason == "partial":
        wait = max(blob.removable for blob in blobs) - time.time()
        return (
            f"partial download, removable in {render.human_wait(wait)}; the same pull continues it"
        )
    if reason == "in use":
        return f"in use by PID {', '.join(map(str, processes))}" if processes else "in use"
    if reason == "base":
        return (
            'bases of frozen blobs; "blobstore rm" or "blobstore thaw" of their models frees that'
        )
    if reason == "lost manifest":
        return "of models whose manifests are lost; 'blobstore repair' restores them"
    return "perhaps configs of damaged manifests; repair these"
