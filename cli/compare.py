"""``blobstore compare``: measure the errors of a model's tensors against a base."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from blobstore.cli import render
from blobstore.cli.options import (
    jobs_option,
    json_option,
    parse_name,
    store_option,
    suggesting_names,
)
from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError
from blobstore.operations.ui.compare_page import badness, decibels, group_of, number, page, type_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.operations.compare.compare import Comparison, TensorError
    from blobstore.store.local import LocalStore

Order = Literal["error", "snr", "name", "size"]

_HEADINGS = ("NAME", "TYPE", "BASE", "BITS", "REL ERROR", "SNR dB", "WORST GROUP")
_NUMBERS = (3, 4, 5)
_MAX_LISTED = 20


@click.command("compare", short_help="Measure the tensors of a model against those of another.")
@click.argument("name", callback=parse_name)
@click.argument("base", callback=parse_name)
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@store_option
@click.option(
    "--sort",
    "order",
    type=click.Choice(["error", "snr", "name", "size"]),
    help="Order of the rows; the model's by default. Worst first for error and snr, largest first "
    "for size.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the first N rows; the worst, unless --sort says otherwise.",
)
@click.option(
    "--html",
    metavar="FILE",
    help="Also write a page with a heat map by layer and projection. An existing file is replaced.",
)
@jobs_option
@json_option
def command(
    name: Reference,
    base: Reference,
    patterns: tuple[str, ...],
    store: LocalStore,
    order: Order | None,
    top: int | None,
    html: str | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Measure the tensors of the model NAME, quantized for example, against those of BASE.

    Tensors are matched by the names that they had in their source, however experts are stored;
    patterns such as '*.mlp.*' select them by name. The relative error is the norm of the difference
    divided by the norm of the base; SNR is the same in decibels. A group is the elements of a row
    that share a scale, or 64 elements if neither tensor is quantized. The worst group is the one
    with the largest relative error. Its row is counted with all dimensions but the last flattened.
    Totals are those of the tensors that differ.

    Elements that differ and are infinite or NaN in one of the models are counted, but not measured.
    Only the size of blobs is checked; "blobstore verify" reads and hashes them.

    In JSON, an infinite number is the text "Infinity" or "-Infinity", and an unknown one is null. The
    relative error of a group or tensor is infinite if the base has only zeros there.
    """
    from blobstore.operations.compare.compare import compare_models

    target = None if html is None else _free_target(html)
    with suggesting_names(store, [name, base]), render.progress_bar() as progress:
        compared = compare_models(
            name, base, store=store, patterns=patterns, jobs=jobs, progress=progress
        )
    if target is not None:
        _write_page(target, compared)
    rows = _ordered(compared.tensors, order or ("error" if top else None))[:top]
    if as_json:
        render.show_json(_as_json(compared, rows))
        return
    render.show(_as_text(compared, rows))
    if target is not None:
        render.show_note(f"wrote {target}")


def _ordered(tensors: Sequence[TensorError], order: Order | None) -> Sequence[TensorError]:
    if order == "error":
        return sorted(tensors, key=badness, reverse=True)
    if order == "snr":
        return sorted(tensors, key=lambda item: -math.inf if item.snr_db is None else item.snr_db)
    if order == "size":
        return sorted(tensors, key=lambda item: (-item.nbytes, item.name))
    return sorted(tensors, key=lambda item: item.name) if order == "name" else tensors


# The page


def _free_target(file: str) -> Path:
    """Return the real path of a file that can be written or replaced.

    Raises:
        BlobstoreError: the path is not that of a regular file, or has no parent folder.
    """
    try:
        target = Path(os.path.realpath(file))
        is_other = not file or (os.path.lexists(target) and not target.is_file())
        has_folder = target.parent.is_dir()
    except (OSError, ValueError) as error:
        raise BlobstoreError(f"cannot access {quote(file)}: {error}") from error
    if is_other:
        raise BlobstoreError(f"{quote(file)} is not a regular file; choose a new file for the page")
    if not has_folder:
        raise BlobstoreError(
            f"cannot write {quote(file)}: there is no folder {quote(target.parent)}"
        )
    return target


def _write_page(target: Path, compared: Comparison) -> None:
    from blobstore.core.files import write_file

    try:
        write_file(target, [page(compared).encode()])
    except OSError as error:
        raise BlobstoreError(f"cannot write {quote(target)}: {error.strerror}") from error


# What is printed


def _as_text(compared: Comparison, rows: Sequence[TensorError]) -> str:
    alarming = [index for index, row in enumerate(rows) if row.nonfinite]
    table = render.table(
        _HEADINGS, [_cells(row) for row in rows], right=_NUMBERS, alarming=alarming
    )
    return "\n".join([table, *_totals(compared)])


def _cells(tensor: TensorError) -> tuple[str, ...]:
    alarm = f", {tensor.nonfinite:,} non-finite" if tensor.nonfinite else ""
    return (
        render.cell(tensor.name),
        type_of(tensor.type, tensor.group_size),
        type_of(tensor.base_type, tensor.base_group_size),
        number(tensor.bits_per_weight),
        number(tensor.relative_error),
        decibels(tensor.snr_db),
        group_of(tensor.worst) + alarm,
    )


def _totals(compared: Comparison) -> Iterator[str]:
    count = len(compared.tensors)
    differing = len(compared.differing)
    bits = f"{number(compared.bits_per_weight)} bits per weight, {number(compared.base_bits_per_weight)} in the base"
    if differing:
        yield (
            f"{differing:,} of {render.count_of(count, 'tensor')} differ: relative error "
            f"{number(compared.relative_error)}, SNR {decibels(compared.snr_db)} dB, largest error "
            f"{number(compared.max_abs_error)}; {bits}"
        )
    else:
        yield f"{render.count_of(count, 'tensor')}, all equal; {bits}"
    if compared.nonfinite:
        yield (
            f"not measured: {render.count_of(compared.nonfinite, 'element')} that differ and are "
            "not finite in one of the models"
        )
    for reference, names in (
        (compared.reference, compared.only_in_model),
        (compared.base, compared.only_in_base),
    ):
        if names:
            listed = ", ".join(map(render.cell, names[:_MAX_LISTED]))
            more = f" and {len(names) - _MAX_LISTED:,} more" if len(names) > _MAX_LISTED else ""
            yield f"only in {reference}: {listed}{more}"


def _as_json(compared: Comparison, rows: Sequence[TensorError]) -> dict[str, Any]:
    return {
        "name": str(compared.reference),
        "base": str(compared.base),
        "tensors": [_tensor_json(row) for row in rows],
        "only_in_name": list(compared.only_in_model),
        "only_in_base": list(compared.only_in_base),
        "total": {
            "tensors": len(compared.tensors),
            "differing": len(compared.differing),
            "relative_error": _exact(compared.relative_error),
            "snr_db": _exact(compared.snr_db),
            "max_abs_error": compared.max_abs_error,
            "nonfinite": compared.nonfinite,
            "bits_per_weight": compared.bits_per_weight,
            "base_bits_per_weight": compared.base_bits_per_weight,
        },
    }


def _tensor_json(tensor: TensorError) -> dict[str, Any]:
    worst = tensor.worst
    return {
        "name": tensor.name,
        "type": tensor.type,
        "group_size": tensor.group_size or None,
        "bytes": tensor.nbytes,
        "bits_per_weight": tensor.bits_per_weight,
        "base_type": tensor.base_type,
        "base_group_size": tensor.base_group_size or None,
        "base_bytes": tensor.base_nbytes,
        "base_bits_per_weight": tensor.base_bits_per_weight,
        "shape": list(tensor.shape),
        "equal": tensor.is_equal,
        "relative_error": _exact(tensor.relative_error),
        "snr_db": _exact(tensor.snr_db),
        "max_abs_error": tensor.max_abs_error,
        "nonfinite": tensor.nonfinite,
        "worst_group": worst and worst._asdict() | {"relative_error": _exact(worst.relative_error)},
    }


def _exact(value: float | None) -> float | str | None:
    """Return a number as JSON can hold it."""
    if value is None or math.isfinite(value):
        return value
    return "Infinity" if value > 0 else "-Infinity"
