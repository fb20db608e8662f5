"""``blobstore repair``: rewrites damaged and missing blobs, and prints which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render
from blobstore.cli.verify import FAULT_FIELDS, fault_line
from blobstore.core.escape import quote
from blobstore.errors import Damaged, NotFound

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.operations.maintenance.repair import Repaired
    from blobstore.store.local import LocalStore

_ADVICE = (
    "to rewrite damaged and missing blobs, give --from the source of the model or the folder of "
    "another store"
)


@click.command("repair", short_help="Rewrite damaged and missing blobs.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=options.MODEL)
@click.option(
    "--from",
    "source",
    metavar="SOURCE|STORE",
    type=options.FILE,
    help="The source that a model was created from, or the folder of another store.",
)
@click.option(
    "--quantize-override",
    "overrides",
    metavar="GLOB=TYPE",
    multiple=True,
    help="The overrides that the model was created with; other settings are detected.",
)
@click.option("--weights", metavar="PATTERN", help="As for create.")
@click.option("--ignore-unindexed", is_flag=True, help="As for create.")
@click.option("--subtree", metavar="PATH", help="As for create.")
@click.option("--keep-names", is_flag=True, help="As for create.")
@click.option("--skip-unreadable", is_flag=True, help="As for create.")
@click.option("--keep", metavar="GLOB", multiple=True, help="As for create.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="As for create.")
@click.option("--dry-run", is_flag=True, help="Change nothing; report what could be rewritten.")
@options.store_option
@options.wait_option
@options.jobs_option
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[str, ...],
    store: LocalStore,
    source: str | None,
    overrides: tuple[str, ...],
    weights: str | None,
    ignore_unindexed: bool,
    subtree: str | None,
    keep_names: bool,
    skip_unreadable: bool,
    keep: tuple[str, ...],
    exclude: tuple[str, ...],
    dry_run: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Verify the models NAME, or all models, and rewrite damaged and missing blobs.

    The bytes come from SOURCE, from which the same blobs are built again, or from another STORE.
    They are used only if their digest is right. Damaged files are moved to .blobstore/quarantine.
    Damaged manifests are restored from a STORE that has the same model. Without --from, blobs are
    repaired from their other form in the store, compressed or not. The exit code is 4 if a fault
    remains.
    """
    from blobstore.operations.maintenance.repair import repair_models

    store.check_root()
    if not store.root.exists():
        raise NotFound(f"there is no store at {quote(store.root)}")
    with options.models(store, names) as chosen, render.progress_bar() as progress:
        repaired = repair_models(
            chosen,
            source,
            store=store,
            overrides=overrides,
            weights=weights,
            ignore_unindexed=ignore_unindexed,
            subtree=subtree,
            keep_names=keep_names,
            skip_unreadable=skip_unreadable,
            keep=keep,
            exclude=exclude,
            dry_run=dry_run,
            jobs=jobs,
            progress=progress,
        )
    for notice in repaired.notices if repaired.verified.damaged else ():
        render.show_note(notice)
    if as_json:
        counts = (
            "models=verified.models blobs=verified.blobs bytes_read=verified.bytes_read seconds"
        )
        result = (
            {"dry_run": dry_run}
            | render.record(repaired, counts)
            | {
                "manifests": render.records(repaired.restored, "model=reference quarantined"),
                "repaired": render.records(
                    repaired.repaired, "blob=digest bytes=size layer quarantined"
                ),
                "faults": render.records(repaired.faults, FAULT_FIELDS),
            }
        )
        render.show_json(result)
    else:
        render.show(_as_text(repaired, dry_run=dry_run))
    if source is None and repaired.verified.damaged:
        render.show_note(_ADVICE)
    if repaired.faults:
        ctx.exit(Damaged.exit_code)


def _as_text(repaired: Repaired, *, dry_run: bool) -> str:
    verb = "would rewrite" if dry_run else "rewrote"
    lines = [
        f"{verb} the manifest of model {render.cell(item.reference)}{_place_of(item.quarantined)}"
        for item in repaired.restored
    ]
    lines += [
        f"{verb} layer {render.cell(item.layer)}, blob {item.digest} "
        f"({render.human_bytes(item.size)}){_place_of(item.quarantined)}"
        for item in repaired.repaired
    ]
    lines += map(fault_line, repaired.faults)
    counts = {"manifest": len(repaired.restored), "blob": len(repaired.repaired)}
    what = " and ".join(render.count_of(number, kind) for kind, number in counts.items() if number)
    count, left = sum(counts.values()), len(repaired.faults)
    done = f"{verb} {what}; " if count else ""
    state = (
        f"{render.count_of(left, 'fault')} left"
        if left
        else "all would be intact"
        if count and dry_run
        else "ok"
    )
    models = render.count_of(repaired.verified.models, "model")
    lines.append(f"{done}{state}: {models}, {render.human_seconds(repaired.seconds)}")
    return "\n".join(lines)


def _place_of(quarantined: Path | None) -> str:
    return f"; the damaged file is now {quote(quarantined)}" if quarantined is not None else ""
