"""``blobstore freeze``: compress models losslessly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import join_some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.cli.output import Output
    from blobstore.compression.level import Level
    from blobstore.manifests.reference import Reference
    from blobstore.operations.freeze.freeze import Frozen, FrozenModel
    from blobstore.store.local import LocalStore

_REASONS = {
    "shared": "models that are not frozen need them, {}",
    "in use": "other processes use them",
    "elsewhere": "they are in the shared store",
    "no gain": "compression saves no space",
}

_MAX_NAMED = 3
_MAX_LINES = 12


@click.command("freeze", short_help="Compress models losslessly.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=arguments.MODEL)
@options.level_option("Fast to compress and decompress, or as small as possible.")
@options.base_option(
    "Encode the other models as deltas against NAME; by default a base is searched for."
)
@click.option(
    "--no-base",
    is_flag=True,
    help="Compress every blob on its own, even one that repeats tensors of another.",
)
@click.option("--keep-hot", is_flag=True, help="Keep the uncompressed files too.")
@options.older_than_option(
    "Freeze only models not created, copied or thawed within TIME (12h, 30d). "
    "With no NAME, applies to every model."
)
@click.option("--dry-run", is_flag=True, help="Write nothing; estimate the savings from samples.")
@options.shared("store", "jobs", "wait", "json")
def command(
    names: tuple[str, ...],
    store: LocalStore,
    level: Level,
    base: str | None,
    no_base: bool,
    keep_hot: bool,
    older_than: float | None,
    dry_run: bool,
    jobs: int | None,
    out: Output,
) -> None:
    """Compress the tensors of the models NAME losslessly, and remove the uncompressed files.

    Frozen models are used as before: reading decompresses them. Each compressed blob is verified
    before the original file is removed. Blobs that a model shares with one that is not frozen stay
    uncompressed. Equal tensors with different names are stored once, unless --no-base is given.
    """
    from blobstore.operations.freeze.freeze import freeze_models

    if base is not None and no_base:
        raise click.UsageError("--base and --no-base contradict each other")
    chosen = arguments.models(store, names)
    bases = arguments.models(store, [base] if base else [])
    with progress_bar() as progress:
        frozen = freeze_models(
            chosen,
            store=store,
            level=level,
            base=bases[0] if bases else None,
            find_base=not no_base,
            keep_hot=keep_hot,
            older_than=older_than,
            dry_run=dry_run,
            jobs=jobs,
            progress=progress,
        )
    out.result(lambda: {"dry_run": dry_run} | _as_json(frozen), _as_text(frozen, dry_run=dry_run))
    output.exit_with(frozen.faults)


def _as_json(frozen: Frozen) -> dict[str, Any]:
    fields = "names=references bases bytes=size stored_bytes=stored blobs needed_by faults fallbacks seconds"
    blob_fields = "digest name bytes=size stored_bytes=stored outcome base"
    return output.record(frozen, fields) | {
        "bases": {str(name): base for name, base in frozen.bases},
        "models": output.records(frozen.models, "name base bytes=size stored_bytes=stored"),
        "blobs": output.records(frozen.blobs, blob_fields),
    }


def _base_lines(frozen: Frozen, *, dry_run: bool) -> Iterator[str]:
    """Yield a line for each model with a base; for many with one base, a line for all unless --verbose is given."""
    groups: dict[Reference, list[FrozenModel]] = {}
    for model in frozen.models:
        if model.base is not None and model.stored < model.size:
            groups.setdefault(model.base, []).append(model)
    verb = "would compress to about" if dry_run else "compressed to"
    for base, models in groups.items():
        lines = [(render.cell(model.name), model.size, model.stored) for model in models]
        if len(lines) > _MAX_LINES and not output.is_verbose():
            _, sizes, stored = zip(*lines, strict=True)
            lines = [(render.count_of(len(lines), "model"), sum(sizes), sum(stored))]
        for which, size, left in lines:
            yield (
                f"  {which}: {render.human_bytes(size)} {verb} {render.human_bytes(left)}, "
                f"as deltas against {render.cell(base)}, whose blobs are kept"
            )


def _as_text(frozen: Frozen, *, dry_run: bool) -> Iterator[str]:
    fresh = [blob for blob in frozen.blobs if blob.outcome == "frozen"]
    before, after = sum(blob.size for blob in fresh), sum(blob.stored for blob in fresh)
    result = "nothing to do"
    if before:
        verb = "would compress to about" if dry_run else "compressed to"
        saved = f"{1 - after / before:.1%} less"
        result = f"{render.human_bytes(before)} {verb} {render.human_bytes(after)} ({saved})"
    if output.is_verbose():
        yield _table(frozen)
    yield (
        f"{'would freeze' if dry_run else 'froze'} {render.count_of(len(fresh), 'blob')} of "
        f"{render.count_of(len(frozen.references), 'model')}: {result}; "
        f"{render.human_seconds(frozen.seconds)}"
    )
    if any(blob.base is not None for blob in fresh):
        yield from _base_lines(frozen, dry_run=dry_run)
    if frozen.fallbacks:
        yield render.without_base(frozen.fallbacks)
    if count := frozen.count("cold"):
        yield f"  {render.count_of(count, 'blob')} {'was' if count == 1 else 'were'} already frozen"
    for outcome, reason in _REASONS.items():
        kept = [blob for blob in frozen.blobs if blob.outcome == outcome]
        if kept:
            size = render.human_bytes(sum(blob.size for blob in kept))
            others = join_some([render.cell(name) for name in frozen.needed_by], _MAX_NAMED)
            yield (
                f"  {'would keep' if dry_run else 'kept'} {render.count_of(len(kept), 'blob')} "
                f"({size}) uncompressed: {reason.format(others)}"
            )
    if frozen.references and not frozen.blobs:
        yield (
            "  these models have no tensors of their own: a GGUF file of Ollama is compressed once "
            "'blobstore create ollama://MODEL NAME' has imported it"
        )


def _table(frozen: Frozen) -> str:
    rows = [
        (
            render.cell(blob.name),
            blob.outcome if blob.base is None else f"{blob.outcome}, delta",
            render.human_bytes(blob.size),
            render.human_bytes(blob.stored),
        )
        for blob in frozen.blobs
    ]
    return render.table(("BLOB", "OUTCOME", "SIZE", "ON DISK"), rows, right=(2, 3))
