"""``blobstore compare``: measure the errors of a model's tensors against a base."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import quote
from blobstore.errors import UsageError
from blobstore.quantization.formats import type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.operations.compare.compare import Comparison, TensorError
    from blobstore.quantization.error_metrics import WorstGroup
    from blobstore.store.local import LocalStore

Order = Literal["error", "snr", "name", "size"]


def number(value: float | None) -> str:
    """Return a number with three digits, or a dash for None."""
    return "-" if value is None else f"{value:.3g}"


def decibels(value: float | None) -> str:
    """Return a ratio with one decimal, or a dash for None."""
    return "-" if value is None else f"{value:.1f}"


def group_of(worst: WorstGroup | None) -> str:
    """Return the error of the worst group and its position."""
    if worst is None:
        return "-"
    return f"{number(worst.relative_error)} at row {worst.row}, column {worst.column}"


def badness(tensor: TensorError) -> tuple[bool, float]:
    """Return a sort key that is larger for the worse of two tensors."""
    error = tensor.relative_error
    return tensor.nonfinite > 0, math.inf if error is None else error


_HEADINGS = ("NAME", "TYPE", "BASE", "BITS", "REL ERROR", "SNR dB", "WORST GROUP")
_TENSOR_FIELDS = (
    "name type group_size bytes=nbytes bits_per_weight base_type base_group_size "
    "base_bytes=base_nbytes base_bits_per_weight shape equal=is_equal relative_error snr_db "
    "max_abs_error nonfinite"
)
_TOTAL_FIELDS = "relative_error snr_db max_abs_error nonfinite bits_per_weight base_bits_per_weight"
_MAX_LISTED = 20
_MAX_NAMES_SIZE = 16 << 20
_SORT_KEYS: dict[Order, Callable[[TensorError], Any]] = {
    "error": lambda tensor: [-part for part in badness(tensor)],
    "snr": lambda tensor: -math.inf if tensor.snr_db is None else tensor.snr_db,
    "size": lambda tensor: (-tensor.nbytes, tensor.name),
    "name": lambda tensor: tensor.name,
}


@click.command("compare", short_help="Measure the tensors of a model against those of another.")
@click.argument("name", type=arguments.MODEL_OR_FILE)
@click.argument("base", required=False, type=arguments.MODEL_OR_FILE)
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, type=arguments.TENSORS)
@options.shared("store")
@options.sort_option(
    get_args(Order),
    "Order of the rows; the model's by default. Worst first for error and snr, largest first for size.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the first N rows; the worst, unless --sort says otherwise.",
)
@click.option(
    "--names",
    metavar="ARCHITECTURE|FILE",
    help="The architecture whose names a GGUF model has, or a JSON file with names in it and in the other "
    "model.",
)
@click.option(
    "--html",
    metavar="FILE",
    type=arguments.FILE_TO_WRITE,
    help="Also write a page with a grid of layers by modules, coloured by error. An existing file is "
    "replaced.",
)
@click.option("--all", "shows_all", is_flag=True, help="List equal tensors too.")
@options.shared("jobs", "json")
def command(
    name: str,
    base: str | None,
    patterns: tuple[str, ...],
    store: LocalStore,
    order: Order | None,
    top: int | None,
    names: str | None,
    html: str | None,
    shows_all: bool,
    jobs: int | None,
    out: Output,
) -> None:
    """Measure the tensors of the model NAME, quantized for example, against those of BASE.

    Each is a model of the store, or the path of a GGUF file. If NAME is a glob such as 'run:*', each of its
    models is measured against BASE. Without BASE, each is measured against the one before it, in the order of
    the numbers in their names. One row each has the totals.

    Tensors are matched by the names that they had in their source, however experts are stored;
    patterns such as '*.mlp.*' select them by name. The relative error is the norm of the difference
    divided by the norm of the base; SNR is the same in decibels. A group is the elements of a row
    that share a scale, or 64 elements if neither tensor is quantized. The worst group is the one
    with the largest relative error. Its row is counted with all dimensions but the last flattened.
    Totals are those of the tensors that differ. Equal tensors are listed only with --all, --sort or
    a pattern, and in JSON.

    The tensors of a GGUF model are compared with those of another model under its names, in its order
    of rows, and expert by expert. This is known for the architectures that the documentation of this command
    lists; --names says it for others.

    Elements that differ and are infinite or NaN in one of the models are counted, but not measured.
    Only the size of blobs is checked; "blobstore verify" reads and hashes them.

    In JSON, an infinite number is the text "Infinity" or "-Infinity", and an unknown one is null. The
    relative error of a group or tensor is infinite if the base has only zeros there.
    """
    from blobstore.operations.compare.compare import compare_models
    from blobstore.pages.comparison import comparison_page
    from blobstore.pages.write import free_target, write_page_file

    if arguments.is_many(store, name):
        if html or top or order or shows_all:
            raise click.UsageError("--html, --top, --sort and --all are for one model NAME")
        _compare_steps(store, name, base, patterns, names, jobs, out)
        return
    if base is None:
        raise click.UsageError("missing argument 'BASE'")
    target = None if html is None else free_target(html)
    model, other = arguments.model_or_gguf(store, name), arguments.model_or_gguf(store, base)
    with progress_bar() as progress:
        compared = compare_models(
            model,
            other,
            store=store,
            patterns=patterns,
            names=None if names is None else _names(names),
            jobs=jobs,
            progress=progress,
        )
    if target is not None:
        write_page_file(target, comparison_page(compared))
    order = order or ("error" if top else None)
    tensors = sorted(compared.tensors, key=_SORT_KEYS[order]) if order else compared.tensors
    rows = tensors[:top]
    shown = rows if patterns or order or shows_all else [row for row in rows if not row.is_equal]
    out.result(
        lambda: _as_json(compared, rows) | {"seconds": out.seconds},
        _as_text(compared, shown),
        notes=[] if target is None else [f"wrote {target}"],
    )


def _compare_steps(
    store: LocalStore,
    name: str,
    base: str | None,
    patterns: tuple[str, ...],
    names: str | None,
    jobs: int | None,
    out: Output,
) -> None:
    from blobstore.operations.compare.compare import compare_models
    from blobstore.operations.compare.steps import steps_of

    pairs: list[tuple[Reference, Reference | str]]
    models = arguments.models(store, [name])
    if base is None:
        pairs = [(step, before) for before, step in pairwise(steps_of(store, models))]
    else:
        other = arguments.model_or_gguf(store, base)
        pairs = [(step, other) for step in steps_of(store, models) if step != other]
    named = None if names is None else _names(names)
    with progress_bar() as progress:
        steps = [
            compare_models(
                *pair, store=store, patterns=patterns, names=named, jobs=jobs, progress=progress
            )
            for pair in pairs
        ]
    rows = [
        (
            render.cell(step.reference),
            render.cell(step.base),
            f"{len(step.differing):,} of {len(step.tensors):,}",
            number(step.relative_error),
            decibels(step.snr_db),
            number(step.max_abs_error),
        )
        for step in steps
    ]
    headings = ("NAME", "BASE", "TENSORS DIFFER", "REL ERROR", "SNR dB", "LARGEST ERROR")
    out.result(
        lambda: {
            "steps": [output.record(step, "name=reference base") | _total(step) for step in steps],
            "seconds": out.seconds,
        },
        render.table(headings, rows, right=(2, 3, 4, 5)),
    )


def _names(text: str) -> str | dict[str, str]:
    """Return the architecture that a text names, or the names in the file that it names."""
    from blobstore.core import strict_json
    from blobstore.core.files import read_regular
    from blobstore.gguf.names import ARCHITECTURES

    if text in ARCHITECTURES:
        return text
    try:
        value = strict_json.loads(read_regular(text, _MAX_NAMES_SIZE))
    except FileNotFoundError:
        raise UsageError(
            f"{quote(text)} is neither a file nor one of the architectures {', '.join(ARCHITECTURES)}"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{quote(text)} cannot be read: {error}") from None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()):
        raise UsageError(f"{quote(text)} is not a JSON object whose values are names")
    return value


def _as_json(compared: Comparison, rows: Sequence[TensorError]) -> dict[str, Any]:
    listed = output.records(rows, _TENSOR_FIELDS)
    for row, shown in zip(rows, listed, strict=True):
        shown["worst_group"] = row.worst and output.record(row.worst, " ".join(row.worst._fields))
    fields = "name=reference base tensors only_in_name=only_in_model only_in_base"
    return output.record(compared, fields) | {"tensors": listed, "total": _total(compared)}


def _total(compared: Comparison) -> dict[str, Any]:
    count = {"tensors": len(compared.tensors), "differing": len(compared.differing)}
    return count | output.record(compared, _TOTAL_FIELDS)


def _as_text(compared: Comparison, rows: Sequence[TensorError]) -> Iterator[str]:
    cells = [
        (
            render.cell(row.name),
            type_name(row.type, row.group_size),
            type_name(row.base_type, row.base_group_size),
            number(row.bits_per_weight),
            number(row.relative_error),
            decibels(row.snr_db),
            group_of(row.worst) + (f", {row.nonfinite:,} non-finite" if row.nonfinite else ""),
        )
        for row in rows
    ]
    alarming = [index for index, row in enumerate(rows) if row.nonfinite]
    if rows:
        yield render.table(_HEADINGS, cells, right=(3, 4, 5), alarming=alarming)
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
