"""``blobstore repair``: rewrites damaged and missing blobs, and prints which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.cli.verify import FAULT_FIELDS, fault_line
from blobstore.core.escape import quote
from blobstore.errors import Damaged

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.cli.output import Output
    from blobstore.operations.maintenance.repair import Repaired
    from blobstore.store.local import LocalStore

_ADVICE = (
    "to rewrite damaged and missing blobs, give --from the source of the model, the folder of "
    "another store or the address of the model elsewhere"
)


@click.command("repair", short_help="Rewrite damaged and missing blobs.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=arguments.MODEL)
@click.option(
    "--from",
    "source",
    metavar="SOURCE|STORE|ADDRESS",
    type=arguments.SOURCE,
    help="The source that a model was created from, another store, or the address of models elsewhere.",
)
@click.option(
    "--quantize-override",
    "overrides",
    metavar="GLOB=TYPE",
    multiple=True,
    help="The overrides that the model was created with; other settings are detected.",
)
@options.shared("weights", "ignore-unindexed", "subtree", "strip-prefix", "keep-names")
@options.shared("skip-unreadable", "keep", "exclude")
@click.option("--dry-run", is_flag=True, help="Change nothing; report what could be rewritten.")
@options.shared("plain-http", "store", "wait", "jobs", "json")
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
    strip_prefix: str | None,
    keep_names: bool,
    skip_unreadable: bool,
    keep: tuple[str, ...],
    exclude: tuple[str, ...],
    dry_run: bool,
    plain_http: bool | None,
    jobs: int | None,
    out: Output,
) -> None:
    """Verify the models NAME, or all models, and rewrite damaged and missing blobs.

    The bytes come from SOURCE, from which the same blobs are built again, from another STORE, or from
    an ADDRESS such as oci://host/repository, s3://bucket/prefix or http://host/name. They are used
    only if their digest is right. Damaged files are moved to .blobstore/quarantine. Damaged and
    missing manifests are restored from a STORE or an ADDRESS that has the model: those of the models
    NAME, or those whose blobs are still there. Without --from, blobs are
    repaired from their other form in the store, compressed or not. The exit code is 4 if a fault
    remains.
    """
    from blobstore.operations.maintenance.repair import repair_models

    chosen = arguments.models(store, names, needs_store=True)
    with progress_bar() as progress:
        repaired = repair_models(
            chosen,
            source,
            store=store,
            overrides=overrides,
            weights=weights,
            ignore_unindexed=ignore_unindexed,
            subtree=subtree,
            strip_prefix=strip_prefix,
            keep_names=keep_names,
            skip_unreadable=skip_unreadable,
            keep=keep,
            exclude=exclude,
            dry_run=dry_run,
            plain_http=plain_http,
            jobs=jobs,
            progress=progress,
        )
    for notice in repaired.notices if repaired.verified.damaged else ():
        output.show_note(notice)
    out.result(
        {"dry_run": dry_run} | _as_json(repaired),
        _as_text(repaired, dry_run=dry_run),
    )
    if source is None and repaired.verified.damaged:
        output.show_note(_ADVICE)
    if repaired.faults:
        ctx.exit(Damaged.exit_code)


def _as_json(repaired: Repaired) -> dict[str, Any]:
    counts = "models=verified.models blobs=verified.blobs bytes_read=verified.bytes_read seconds"
    blobs = "blob=digest bytes=size layer quarantined"
    return output.record(repaired, counts) | {
        "manifests": output.records(repaired.restored, "model=reference quarantined signatures"),
        "repaired": output.records(repaired.repaired, blobs),
        "faults": output.records(repaired.faults, FAULT_FIELDS),
    }


def _as_text(repaired: Repaired, *, dry_run: bool) -> str:
    verb = "would rewrite" if dry_run else "rewrote"
    lines = [
        f"{verb} the manifest of model {render.cell(item.reference)}{_place_of(item.quarantined)}"
        + (f", with {render.count_of(item.signatures, 'signature')}" if item.signatures else "")
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
