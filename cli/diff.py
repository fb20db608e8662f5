"""``blobstore diff``: show the differences between two models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import render
from blobstore.cli.options import (
    jobs_option,
    json_option,
    parse_name,
    store_option,
    suggesting_names,
)
from blobstore.operations.ui.compare_page import type_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference
    from blobstore.operations.compare.diff import (
        Difference,
        FileDifference,
        TensorDifference,
        TensorSide,
    )
    from blobstore.store.local import LocalStore

_DIFFERENT = 1


@click.command("diff", short_help="Show the differences between two models.")
@click.argument("ours", metavar="A", callback=parse_name)
@click.argument("theirs", metavar="B", callback=parse_name)
@click.option("--all", "shows_all", is_flag=True, help="List equal tensors and files too.")
@store_option
@jobs_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    ours: Reference,
    theirs: Reference,
    store: LocalStore,
    shows_all: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Show which tensors and files differ between the models A and B, or are in only one of them.

    Tensors are matched by the names that they had in their source, however experts are stored. They
    are equal if type, shape and bytes are equal; "blobstore compare" measures how much values differ. Shared
    blobs are not read. Only the size of other blobs is checked; "blobstore verify" hashes them.
    The exit code is 0 if nothing differs and 1 if something does.
    """
    from blobstore.operations.compare.diff import diff_models

    with suggesting_names(store, [ours, theirs]), render.progress_bar() as progress:
        found = diff_models(ours, theirs, store=store, jobs=jobs, progress=progress)
    if as_json:
        render.show_json(_as_json(found))
    else:
        render.show("\n".join(_as_text(found, shows_all=shows_all)))
    if not found.is_same:
        ctx.exit(_DIFFERENT)


def _change(item: TensorDifference | FileDifference) -> str:
    if item.is_same:
        return "same"
    if item.theirs is None:
        return "only in A"
    return "only in B" if item.ours is None else "changed"


def _as_text(found: Difference, *, shows_all: bool) -> Iterator[str]:
    rows = [
        *(_tensor_cells(item) for item in found.tensors if shows_all or not item.is_same),
        *(_file_cells(item) for item in found.files if shows_all or not item.is_same),
    ]
    if rows:
        headings = ("CHANGE", "NAME", f"A: {found.ours}", f"B: {found.theirs}")
        yield render.table(headings, rows)
    yield f"tensors: {_counts(found.tensors)}"
    yield f"files: {_counts(found.files)}"


def _counts(items: tuple[TensorDifference, ...] | tuple[FileDifference, ...]) -> str:
    changes = list(map(_change, items))
    counts = [(change, changes.count(change)) for change in ("same", "changed")]
    counts += [
        (change, changes.count(change))
        for change in ("only in A", "only in B")
        if change in changes
    ]
    return ", ".join(f"{count:,} {change}" for change, count in counts)


def _tensor_cells(item: TensorDifference) -> tuple[str, ...]:
    change = ", ".join(item.changes) if item.changes else _change(item)
    return (change, render.cell(item.name), _tensor_cell(item.ours), _tensor_cell(item.theirs))


def _tensor_cell(side: TensorSide | None) -> str:
    if side is None:
        return "-"
    shape = ", ".join(map(str, side.shape))
    return render.cell(f"{type_of(side.type, side.group_size)} [{shape}]")


def _file_cells(item: FileDifference) -> tuple[str, ...]:
    name = render.cell(item.name or item.media_type)
    return (_change(item), name, _file_cell(item.ours), _file_cell(item.theirs))


def _file_cell(side: Descriptor | None) -> str:
    return "-" if side is None else f"{side.digest.short} {render.human_bytes(side.size)}"


def _as_json(found: Difference) -> dict[str, Any]:
    return {
        "a": str(found.ours),
        "b": str(found.theirs),
        "same": found.is_same,
        "tensors": [_tensor_json(item) for item in found.tensors],
        "files": [_file_json(item) for item in found.files],
    }


def _tensor_json(item: TensorDifference) -> dict[str, Any]:
    return {
        "name": item.name,
        "change": _change(item),
        "differs_in": list(item.changes),
        "same_blob": item.is_shared,
        "a": _tensor_side(item.ours),
        "b": _tensor_side(item.theirs),
    }


def _tensor_side(side: TensorSide | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {
        "type": side.type,
        "group_size": side.group_size or None,
        "shape": list(side.shape),
        "bytes": side.nbytes,
        "digest": str(side.blob),
    }


def _file_json(item: FileDifference) -> dict[str, Any]:
    return {
        "name": item.name,
        "media_type": item.media_type,
        "change": _change(item),
        "a": _file_side(item.ours),
        "b": _file_side(item.theirs),
    }


def _file_side(side: Descriptor | None) -> dict[str, Any] | None:
    return None if side is None else {"digest": str(side.digest), "bytes": side.size}
