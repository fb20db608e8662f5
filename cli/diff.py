"""``blobstore diff``: show the differences between two models."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.quantization.formats import type_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.cli.output import Output
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.operations.compare.diff import Difference, FileDifference, TensorDifference
    from blobstore.operations.compare.source_tensor import SourceTensor
    from blobstore.store.local import LocalStore

_DIFFERENT = 1


@click.command("diff", short_help="Show the differences between two models.")
@click.argument("ours", metavar="A", type=arguments.MODEL_OR_ADDRESS)
@click.argument("others", metavar="[B]...", nargs=-1, type=arguments.MODEL_OR_ADDRESS)
@click.option("--all", "shows_all", is_flag=True, help="List equal tensors and files too.")
@options.shared("plain-http", "store", "jobs", "json")
@click.pass_context
def command(
    ctx: click.Context,
    ours: str,
    others: tuple[str, ...],
    store: LocalStore,
    shows_all: bool,
    jobs: int | None,
    plain_http: bool | None,
    out: Output,
) -> None:
    """Show which tensors and files differ between the models A and B, or are in only one of them.

    A name that begins with oci:// is the address of a model in a registry. Of that, headers are
    fetched, and tensors that the store does not have and whose types and shapes agree.

    Of a glob such as 'run:*', or of more than two models, each is compared with the one before it, in the
    order of the numbers in their names. One row each says how many tensors and bytes changed.

    Tensors are matched by the names that they had in their source, however experts are stored. They
    are equal if type, shape and bytes are equal; "blobstore compare" measures how much values differ. Shared
    blobs are not read. Only the size of other blobs is checked; "blobstore verify" hashes them.
    The exit code is 0 if nothing differs and 1 if something does. The config of a model that has
    tensors does not count: it says how they were imported.
    """
    from blobstore.operations.compare.diff import diff_models
    from blobstore.operations.compare.steps import steps_of

    if len(others) != 1 or any(arguments.is_many(store, text) for text in (ours, *others)):
        if not (others or arguments.is_many(store, ours)):
            raise click.UsageError("missing argument 'B'")
        with progress_bar() as progress:
            steps = [
                diff_models(one, other, store=store, jobs=jobs, progress=progress)
                for one, other in pairwise(
                    steps_of(store, arguments.models(store, [ours, *others]))
                )
            ]
        rows = list(map(_step, steps))
        out.result({"steps": rows, "seconds": out.seconds}, _steps_table(rows))
        if not all(step.is_same for step in steps):
            ctx.exit(_DIFFERENT)
        return
    first = arguments.model_or_address(store, ours)
    second = arguments.model_or_address(store, others[0])
    with progress_bar() as progress:
        found = diff_models(
            first, second, store=store, jobs=jobs, plain_http=plain_http, progress=progress
        )
    out.result(
        lambda: _as_json(found) | {"seconds": out.seconds}, _as_text(found, shows_all=shows_all)
    )
    if not found.is_same:
        ctx.exit(_DIFFERENT)


def _step(found: Difference) -> dict[str, Any]:
    """Return the row of a step: what it has that the step before had not, or had otherwise."""
    changed = [item for item in found.tensors if not item.is_same]
    return output.record(found, "a=ours b=theirs same=is_same") | {
        "tensors": len(found.tensors),
        "differing": len(changed),
        "bytes": sum(item.theirs.nbytes for item in changed if item.theirs is not None),
        "files": sum(not (item.is_same or item.is_derived) for item in found.files),
    }


def _steps_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        (
            render.cell(row["a"]),
            render.cell(row["b"]),
            f"{row['differing']:,} of {row['tensors']:,}",
            render.human_bytes(row["bytes"]),
            f"{row['files']:,}",
        )
        for row in rows
    ]
    return render.table(
        ("A", "B", "TENSORS CHANGED", "BYTES CHANGED", "FILES CHANGED"), cells, right=(2, 3, 4)
    )


def _change(item: TensorDifference | FileDifference) -> str:
    if item.is_same:
        return "same"
    if item.theirs is None:
        return "only in A"
    return "only in B" if item.ours is None else "changed"


def _counts(items: tuple[TensorDifference, ...] | tuple[FileDifference, ...]) -> str:
    changes = list(map(_change, items))
    counts = [(change, changes.count(change)) for change in ("same", "changed")]
    counts += [
        (change, changes.count(change))
        for change in ("only in A", "only in B")
        if change in changes
    ]
    return ", ".join(f"{count:,} {change}" for change, count in counts)


def _tensor_cell(side: SourceTensor | None) -> str:
    if side is None:
        return "-"
    shape = ", ".join(map(str, side.shape))
    return render.cell(f"{type_name(side.type, side.group_size)} [{shape}]")


def _file_cell(side: Descriptor | None) -> str:
    return "-" if side is None else f"{side.digest.short} {render.human_bytes(side.size)}"


def _as_text(found: Difference, *, shows_all: bool) -> Iterator[str]:
    rows = [
        (
            ", ".join(item.changes) or _change(item),
            render.cell(item.name),
            _tensor_cell(item.ours),
            _tensor_cell(item.theirs),
        )
        for item in found.tensors
        if shows_all or not item.is_same
    ]
    rows += [
        (
            _change(item),
            "config" if item.is_config else render.cell(item.name or item.media_type),
            _file_cell(item.ours),
            _file_cell(item.theirs),
        )
        for item in found.files
        if shows_all or not item.is_same
    ]
    if rows:
        headings = ("CHANGE", "NAME", f"A: {found.ours}", f"B: {found.theirs}")
        yield render.table(headings, rows)
    yield f"tensors: {_counts(found.tensors)}\nfiles: {_counts(found.files)}"


def _as_json(found: Difference) -> dict[str, Any]:
    def pairs(
        items: Sequence[TensorDifference | FileDifference], fields: str, side_fields: str
    ) -> list[dict[str, Any]]:
        shown = output.records(items, fields)
        for item, pair in zip(items, shown, strict=True):
            pair["change"] = _change(item)
            for key, side in (("a", item.ours), ("b", item.theirs)):
                pair[key] = side and output.record(side, side_fields)
        return shown

    side = "type group_size shape bytes=nbytes digest=blob"
    tensors = pairs(found.tensors, "name differs_in=changes same_blob=is_shared", side)
    files = pairs(found.files, "name media_type", "digest bytes=size")
    whole = output.record(found, "a=ours b=theirs same=is_same")
    return whole | {"tensors": tensors, "files": files}
