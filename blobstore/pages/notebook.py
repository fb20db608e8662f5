"""Pictures of stores and models for notebooks: SVG without a script, from the data of the page."""

from __future__ import annotations

from collections import defaultdict
from html import escape as escape_html
from itertools import groupby
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import bytes_text
from blobstore.errors import BlobstoreError
from blobstore.models.tensors import QPARAMS
from blobstore.pages.largest_models import read_largest
from blobstore.pages.model_view import GridTensor, grid
from blobstore.pages.store_view import store_view
from blobstore.pages.text import shown
from blobstore.quantization.formats import type_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from blobstore.models.header_index import TensorIndex
    from blobstore.store.local import LocalStore

_COLOURS = {
    "unique": "#4a80b8",
    "cold": "#a8c8e4",
    "shared": "#e6c27c",
    "garbage": "#cc5a36",
    "other": "#bcc3c9",
}
_TYPES = ("#4a80b8", "#e0a03c", "#5aa68c", "#b9a0cc", "#cc6a48", "#8d98a3", "#a8c8e4", "#7d6b9d")
_DARK = {"#4a80b8", "#cc5a36", "#cc6a48", "#7d6b9d", "#8d98a3"}
"""Fills with white text."""
_WIDTH, _HEIGHT = 900, 450
_MAX_ROWS, _MAX_COLUMNS = 150, 40
_MAX_HEADING, _MAX_ROW_NAME = 30, 26
"""Letters of the name of a column and of a row; of longer ones, the end is shown."""
_MAX_CELLS = 2000
_STYLE = 'font-family="system-ui,sans-serif" font-size="12"'


def store_picture(store: LocalStore) -> str:
    """Return a treemap of what a removal frees as HTML, or the error of reading the store."""
    try:
        view = store_view(*read_largest(store)[:2])
    except BlobstoreError as error:
        return f"<p>{_text(error)}</p>"
    totals, picture, models = view["totals"], view["freed"], view["models"]
    title = (
        f"{store.root}: {totals['models']:,} models, {bytes_text(totals['bytes_in_all'])} on disk, "
        f"{bytes_text(totals['bytes_without_sharing'])} without sharing"
    )
    cells = []
    for place, (kind, model, size, _, label, *_) in enumerate(picture["cells"]):
        x, y, width, height = picture["wide"][4 * place : 4 * place + 4]
        name = label if model < 0 else models[model]["name"]
        box = x * _WIDTH / 2000, y * _HEIGHT / 1000, width * _WIDTH / 2000, height * _HEIGHT / 1000
        cells.append((size, box, _COLOURS[kind], name.removesuffix(":latest"), bytes_text(size)))
    largest = sorted(cells, key=lambda cell: -cell[0])[:_MAX_CELLS]
    boxes = "".join(_box(*cell[1:]) for cell in largest)
    legend = ", ".join(
        f'<span style="color:{_COLOURS[kind]}">\u25a0</span> {label}'
        for kind, label in (
            ("unique", "in one model"),
            ("cold", "compressed"),
            ("shared", "shared"),
        )
    )
    return f"<p>{_text(title)}</p>{_svg(boxes, _WIDTH, _HEIGHT, title)}<p>{legend}</p>"


def model_picture(index: TensorIndex) -> str:
    """Return the tensors of a model as SVG, in a grid of layers by modules; empty if it is too large.

    Layers that have tensors of the same types and shapes are one row.
    """
    found = grid(_tensors(index), {})
    kinds, columns = _distinct_rows(found), found["columns"]
    if not kinds or len(kinds) > _MAX_ROWS or len(columns) > _MAX_COLUMNS:
        return ""
    left, width, height = 190, max(710 / max(len(columns), 1), 14), 18
    names = [name.removesuffix(".weight")[-_MAX_HEADING:] for name in columns]
    top = 12 + 7 * max(map(len, names), default=0) if any(names) else 0
    boxes = [
        f'<text transform="translate({left + (column + 0.5) * width + 4:.1f} {top - 6}) rotate(-90)" '
        f'fill="currentColor">{_text(name)}</text>'
        for column, name in enumerate(names)
        if name
    ]
    for line, (rows, cells) in enumerate(kinds):
        y = top + line * height
        boxes.append(
            f'<text x="{left - 8}" y="{y + 12}" text-anchor="end" '
            f'fill="currentColor">{_text(_row_name(found, rows))}</text>'
        )
        for _, column, place, count in cells:
            name, kind, shape, size, *_ = found["tensors"][place]
            spelled = found["types"][kind]
            more = f" and {count - 1:,} more" if count > 1 else ""
            same = f", alike in {len(rows):,} layers" if len(rows) > 1 else ""
            text = f"{name}{more}: {spelled}, {shape}, {bytes_text(size)}{same}"
            box = left + column * width, y, width - 2, height - 2
            boxes.append(_box(box, _TYPES[kind % len(_TYPES)], spelled, "", text))
    return _svg(
        "".join(boxes),
        left + max(len(columns), 1) * width,
        top + len(kinds) * height,
        "tensors by layer and module",
    )


def _distinct_rows(found: dict[str, Any]) -> list[tuple[list[int], list[list[int]]]]:
    """Return the rows of the grid that are alike, and the cells of the first of them."""
    cells: list[list[list[int]]] = [[] for _ in found["rows"]]
    for cell in found["cells"]:
        cells[cell[0]].append(cell)
    alike: dict[str, list[int]] = defaultdict(list)
    for row, stack in enumerate(found["stacks"]):
        tensors = [
            [column, count, *found["tensors"][first][1:3]] for _, column, first, count in cells[row]
        ]
        # A tensor outside of layers has a row of its own.
        alike[repr((stack, tensors) if stack else row)].append(row)
    return [(rows, cells[rows[0]]) for rows in alike.values()]


def _row_name(found: dict[str, Any], rows: Sequence[int]) -> str:
    """Return the name of a row, such as ``layers 0 to 3, 5``, as far as it fits."""
    names, stack = found["rows"], found["stacks"][rows[0]]
    runs = [
        [names[row] for _, row in run]
        for _, run in groupby(enumerate(rows), lambda item: item[1] - item[0])
    ]
    label = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    text = f"{stack} {label}".strip()
    if len(text) > _MAX_ROW_NAME and len(rows) > 1:
        text = f"{stack} {names[rows[0]]} and {len(rows) - 1:,} more"
    return text if len(text) <= _MAX_ROW_NAME else "\u2026" + text[1 - _MAX_ROW_NAME :]


def _tensors(index: TensorIndex) -> Iterator[GridTensor]:
    scales = {name + suffix for name in index.quantized for suffix in QPARAMS.values()}
    for name in index.entries:
        if name in scales:
            continue
        spec = index.spec(name)
        kind, group_size, *_ = index.quantized.get(name, ("", 0))
        shown = type_name(kind or spec.dtype.value, group_size or 0)
        yield GridTensor(name, shown, spec.shape, spec.nbytes, None)


def _box(box: Iterable[float], fill: str, name: str, below: str, title: str = "") -> str:
    x, y, width, height = box
    ink = "#fff" if fill in _DARK else "#15191d"
    fits = int((width - 8) / 7)
    texts = ""
    if height >= 14 and fits > 2:  # a line with some letters
        base = y + min(16, height / 2 + 4)
        texts = f'<text x="{x + 4:.1f}" y="{base:.1f}" fill="{ink}">{_text(name[:fits])}</text>'
        if below and height > 36:  # two lines
            texts += f'<text x="{x + 4:.1f}" y="{base + 15:.1f}" fill="{ink}">{_text(below)}</text>'
    return (
        f"<g><title>{_text(title or f'{name}: {below}')}</title>"
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width - 1, 0):.1f}" '
        f'height="{max(height - 1, 0):.1f}" fill="{fill}"/>{texts}</g>'
    )


def _svg(content: str, width: float, height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="100%" style="max-width:{width:.0f}px" '
        f'role="img" aria-label="{_text(label)}" {_STYLE}>{content}</svg>'
    )


def _text(value: Any) -> str:
    return escape_html(shown(value))
