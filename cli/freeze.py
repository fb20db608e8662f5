"""``blobstore freeze``: keep models in less room until they are used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import render
from blobstore.cli.options import (
    jobs_option,
    json_option,
    parse_duration,
    parse_name,
    parse_names,
    store_option,
    suggesting_names,
    wait_option,
)
from blobstore.errors import Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.manifests.reference import Reference
    from blobstore.operations.freeze.blob_encoder import Level
    from blobstore.operations.freeze.freeze import Frozen
    from blobstore.store.local import LocalStore

_KEPT = {
    "shared": "that models which are not frozen need",
    "in use": "that other processes use",
    "no gain": "that would not take less room",
}


def parse_age(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return the seconds that ``30d`` spells; a callback of click."""
    return None if value is None else parse_duration(ctx, param, value)


def parse_base(ctx: click.Context, param: click.Parameter, value: str | None) -> Reference | None:
    """Return the reference that an option spells; a callback of click."""
    return None if value is None else parse_name(ctx, param, value)


@click.command("freeze", short_help="Keep models in less room, without loss.")
@click.argument("names", metavar="[NAME]...", nargs=-1, callback=parse_names)
@click.option(
    "--level",
    type=click.Choice(["fast", "small"]),
    default="fast",
    show_default=True,
    help="Fast to code and to decode, or as small as can be.",
)
@click.option(
    "--base",
    metavar="NAME",
    callback=parse_base,
    help="The model by which the others are coded; by default it is found, if there is one.",
)
@click.option(
    "--no-base",
    is_flag=True,
    help="Code every blob by itself, also one that has the tensors of another.",
)
@click.option(
    "--keep-hot", is_flag=True, help="Leave the files that are there beside what is coded."
)
@click.option(
    "--older-than",
    metavar="TIME",
    callback=parse_age,
    help="Only models that were created, copied and thawed longer ago; 12h, 30d. Without NAMEs, all.",
)
@click.option("--dry-run", is_flag=True, help="Write nothing, and estimate the gain from samples.")
@store_option
@jobs_option
@wait_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[Reference, ...],
    store: LocalStore,
    level: Level,
    base: Reference | None,
    no_base: bool,
    keep_hot: bool,
    older_than: float | None,
    dry_run: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Code the tensors of the models NAME, and remove the files that they were in.

    Frozen models are used as before: what reads them decodes them. Each blob is decoded again and
    compared before its file goes. Blobs that a model shares with one that is not frozen stay.
    Tensors that are equal under different names are stored once, unless --no-base is given.
    """
    from blobstore.operations.freeze.freeze import freeze_models

    if base is not None and no_base:
        raise click.UsageError("--base and --no-base contradict each other", ctx)
    with suggesting_names(store, names), render.progress_bar() as progress:
        frozen = freeze_models(
            names,
            store=store,
            level=level,
            base=base,
            find_base=not no_base,
            keep_hot=keep_hot,
            older_than=older_than,
            dry_run=dry_run,
            jobs=jobs,
            progress=progress,
        )
    if as_json:
        render.show_json(_as_json(frozen, dry_run=dry_run))
    else:
        render.show("\n".join(_as_text(frozen, dry_run=dry_run)))
    for fault in frozen.faults:
        render.show_error(str(fault))
    if frozen.faults:
        ctx.exit(Damaged.exit_code)


def _as_json(frozen: Frozen, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "names": [str(reference) for reference in frozen.references],
        "bases": {str(name): str(base) for name, base in frozen.bases},
        "bytes": frozen.size,
        "stored_bytes": frozen.stored,
        "blobs": [
            {
                "digest": str(blob.digest),
                "name": blob.name,
                "bytes": blob.size,
                "stored_bytes": blob.stored,
                "outcome": blob.outcome,
                "base": str(blob.base) if blob.base is not None else None,
            }
            for blob in frozen.blobs
        ],
        "faults": list(map(str, frozen.faults)),
        "seconds": round(frozen.seconds, 3),
    }


def _as_text(frozen: Frozen, *, dry_run: bool) -> Iterator[str]:
    fresh = [blob for blob in frozen.blobs if blob.outcome == "frozen"]
    before, after = sum(blob.size for blob in fresh), sum(blob.stored for blob in fresh)
    done, about = ("would freeze", "about ") if dry_run else ("froze", "")
    share = f" ({1 - after / before:.1%} less)" if before else ""
    yield (
        f"{done} {render.count_of(len(fresh), 'blob')} of "
        f"{render.count_of(len(frozen.references), 'model')}: {render.human_bytes(before)} "
        f"{'would take' if dry_run else 'take'} {about}{render.human_bytes(after)}{share}; "
        f"{render.human_seconds(frozen.seconds)}"
    )
    for name, base in frozen.bases:
        if any(blob.base is not None for blob in fresh):
            yield f"  {render.cell(name)} is coded by {render.cell(base)}, whose blobs stay for it"
    if count := frozen.count("cold"):
        yield f"  {render.count_of(count, 'blob')} {'was' if count == 1 else 'were'} frozen already"
    for outcome, meaning in _KEPT.items():
        kept = [blob for blob in frozen.blobs if blob.outcome == outcome]
        if kept:
            size = render.human_bytes(sum(blob.size for blob in kept))
            yield (
                f"  {'would leave' if dry_run else 'left'} {render.count_of(len(kept), 'blob')}, "
                f"{size}, {meaning}"
            )
