"""Renders a comparison of two models as an HTML page: a heat map and the worst tensors.

The page is one file without scripts and external resources. :func:`_text` escapes all text that
comes from a file.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.escape import MAX_SHOWN, escape
from blobstore.operations.ui.tensor_names import tensor_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from blobstore.operations.compare.compare import Comparison, TensorError
    from blobstore.operations.compare.metrics import WorstGroup

_WORST = 50
_MAX_OTHERS = 500
_MAX_NAMES = 100
_MAX_LABEL = 80
_MAX_GAPS = 4
"""The most cells of a map per filled cell. Tensors of a sparser map are listed instead."""
_LEAST_SPAN = 6.0
"""The smallest range of the colours in decibels, so that small differences do not look large."""
_PALETTE = bytes.fromhex("a50026d73027f46d43fdae61fee090ffffbfe0f3f8abd9e974add14575b4313695")
_COLOURS = [tuple(_PALETTE[start : start + 3]) for start in range(0, len(_PALETTE), 3)]
"""From bad to good, safe for colour-blind readers."""
_HEADINGS = (
    *("Tensor", "Type", "Base", "Shape", "Bits"),
    *("Relative error", "SNR dB", "Largest error", "Worst group"),
)
_ALARM = ' <span class="alarm">{:,} non-finite</span>'
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --dim: #626b75; --line: #d8dee4;
  --soft: #f3f5f7; --alarm: #b00020; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e4e7ea; --dim: #98a1ab;
  --line: #363c43; --soft: #20252a; --alarm: #ff6b81; } }
body { margin: 2rem; background: var(--back); color: var(--text);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; overflow-wrap: anywhere; }
p, li { max-width: 60rem; color: var(--dim); overflow-wrap: anywhere; }
.alarm { color: var(--alarm); font-weight: 600; }
dl { display: flex; flex-wrap: wrap; gap: .6rem; margin: 0; }
dl div { background: var(--soft); border-radius: 6px; padding: .5rem .9rem; }
dt { color: var(--dim); font-size: .85em; }
dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 2px; font-variant-numeric: tabular-nums; }
th { font-weight: 500; color: var(--dim); text-align: right; padding: .15rem .5rem; }
.map thead th { vertical-align: bottom; padding: .3rem 0; text-align: center; }
.map thead th.name span { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left;
  white-space: nowrap; margin: auto; display: inline-block; }
.map td { text-align: center; min-width: 3.1rem; padding: .25rem .3rem; border-radius: 3px;
  line-height: 1.2; }
.map th.long { text-align: left; color: var(--text); font-weight: 400; overflow-wrap: anywhere; }
.map td small { display: block; opacity: .8; }
td.equal { background: var(--soft); color: var(--dim); }
td.broken { background: var(--alarm); color: var(--back); font-weight: 600; }
.list { border-spacing: 0; }
.list th, .list td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
.list td:nth-child(-n+4), .list th:nth-child(-n+4), .list td:last-child, .list th:last-child
  { text-align: left; }
.legend { display: flex; align-items: center; gap: .5rem; color: var(--dim); margin: .6rem 0; }
.legend span { width: 16rem; height: .9rem; border-radius: 3px; }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
_LEGEND = """<div class="legend">{low} dB<span style="background:linear-gradient(to right,{colours})"></span>{high} dB</div>
<p>Signal-to-noise ratio (SNR) in decibels; higher is better. A cell for several experts shows the
worst expert, and below it the mean of the experts that differ. A tensor that is equal is shown as
"=". Tensors that are equal in every layer are omitted.</p>"""


def page(compared: Comparison) -> str:
    """Return the HTML page of a comparison."""
    maps, others = _cells_of(compared.tensors)
    shown = [cell for cells in maps.values() for cell in cells.values()] + others
    scale = _Scale.of(shown)
    parts = [_totals(compared)]
    if compared.differing:
        low, high = map(decibels, scale)
        colours = ",".join(f"rgb{colour}" for colour in _COLOURS)
        parts += [_LEGEND.format(low=low, high=high, colours=colours)]
        parts += [_map(stem, cells, scale) for stem, cells in maps.items()]
        parts += [_others(others, scale)] if others else []
        parts += [_worst(compared.differing)]
    else:
        parts += ["<p>All tensors are equal.</p>"]
    for title, names in (
        (f"Only in {_text(compared.reference)}", compared.only_in_model),
        (f"Only in {_text(compared.base)}", compared.only_in_base),
    ):
        items = "".join(f"<li>{_text(name)}</li>" for name in names[:_MAX_NAMES])
        more = len(names) - _MAX_NAMES
        rest = f"<p>and {more:,} more</p>" if more > 0 else ""
        parts += [f"<h2>{title}</h2>\n<ul>{items}</ul>{rest}"] if names else []
    title = f"{_text(compared.reference)} compared with {_text(compared.base)}"
    return _PAGE.format(title=title, style=_STYLE, body="\n".join(parts))


# Texts, which the commands use too


def number(value: float | None) -> str:
    """Return a number with three digits, or a dash for None."""
    return "-" if value is None else f"{value:.3g}"


def decibels(value: float | None) -> str:
    """Return a ratio with one decimal, or a dash for None."""
    return "-" if value is None else f"{value:.1f}"


def type_of(name: str, group_size: int) -> str:
    """Return a type with its group size, if it has one."""
    return f"{name} g{group_size}" if group_size else name


def group_of(worst: WorstGroup | None) -> str:
    """Return the error of the worst group and its position."""
    if worst is None:
        return "-"
    return f"{number(worst.relative_error)} at row {worst.row}, column {worst.column}"


def badness(tensor: TensorError) -> tuple[bool, float]:
    """Return a sort key that is larger for the worse of two tensors."""
    error = tensor.relative_error
    return tensor.nonfinite > 0, math.inf if error is None else error


def _text(value: object, limit: int = MAX_SHOWN) -> str:
    return html.escape(escape(str(value), limit))


# Cells of the map


class _Cell(NamedTuple):
    """Tensors whose names differ only in the expert number."""

    name: str
    tensors: list[TensorError]

    @property
    def worst(self) -> TensorError:
        return max(self.tensors, key=badness)

    @property
    def is_equal(self) -> bool:
        return all(tensor.is_equal for tensor in self.tensors)

    @property
    def mean(self) -> float | None:
        """Mean of the finite ratios in decibels; None if there is none."""
        known = [value for value in map(_finite, self.tensors) if value is not None]
        return math.fsum(known) / len(known) if known else None


class _Place(NamedTuple):
    layer: int
    column: str


_Map = dict[_Place, _Cell]


def _cells_of(tensors: Iterable[TensorError]) -> tuple[dict[str, _Map], list[_Cell]]:
    """Return a map for each stack of layers, and the cells outside of layers. Equal ones are omitted."""
    maps: dict[str, _Map] = defaultdict(dict)
    others: dict[str, _Cell] = {}
    for tensor in tensors:
        stem, layer, rest = tensor_place(tensor.name)
        if layer is None:
            cell = others.setdefault(rest, _Cell(rest, []))
        else:
            full = ".".join(part for part in (stem, str(layer), rest) if part)
            cell = maps[stem].setdefault(_Place(layer, rest), _Cell(full, []))
        cell.tensors.append(tensor)
    loose = list(others.values())
    found: dict[str, _Map] = {}
    for stem, cells in maps.items():
        columns = {place.column for place, cell in cells.items() if not cell.is_equal}
        kept = {place: cell for place, cell in cells.items() if place.column in columns}
        if len(columns) * len({place.layer for place in kept}) > _MAX_GAPS * len(kept) + _WORST:
            loose += kept.values()
        elif kept:
            found[stem] = kept
    return found, [cell for cell in loose if not cell.is_equal]


# Colours


class _Scale(NamedTuple):
    """The range of the colours in decibels."""

    low: float
    high: float

    @classmethod
    def of(cls, cells: Iterable[_Cell]) -> _Scale:
        """Return the range of the worst tensors of all cells."""
        known = [value for value in (_finite(cell.worst) for cell in cells) if value is not None]
        low, high = (min(known), max(known)) if known else (0.0, 0.0)
        spare = max(_LEAST_SPAN - (high - low), 0) / 2
        return cls(low - spare, high + spare)

    def style(self, value: float) -> str:
        """Return the colours of a cell."""
        place = min(max((value - self.low) / (self.high - self.low), 0), 1) * (len(_COLOURS) - 1)
        index = min(int(place), len(_COLOURS) - 2)
        pair = zip(_COLOURS[index], _COLOURS[index + 1], strict=True)
        red, green, blue = (round(one + (two - one) * (place - index)) for one, two in pair)
        is_bright = 0.3 * red + 0.59 * green + 0.11 * blue > 140  # noqa: PLR2004 - of 255
        return f"background:#{red:02x}{green:02x}{blue:02x};color:{'#000' if is_bright else '#fff'}"


def _finite(tensor: TensorError) -> float | None:
    ratio = tensor.snr_db
    return ratio if ratio is not None and math.isfinite(ratio) else None


# Parts of the page


def _totals(compared: Comparison) -> str:
    entries = {
        "Tensors": f"{len(compared.tensors):,}",
        "Tensors that differ": f"{len(compared.differing):,}",
        "Relative error, tensors that differ": number(compared.relative_error),
        "SNR in dB, tensors that differ": decibels(compared.snr_db),
        "Largest error": number(compared.max_abs_error),
        "Bits per weight": number(compared.bits_per_weight),
        "Bits per weight of the base": number(compared.base_bits_per_weight),
    }
    items = "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in entries.items())
    count = compared.nonfinite
    what = "Elements that differ and are not finite in one of the models; no error includes them"
    alarm = f'\n<p class="alarm">{what}: {count:,}</p>' if count else ""
    return f"<dl>{items}</dl>{alarm}"


def _map(stem: str, cells: _Map, scale: _Scale) -> str:
    columns = list(dict.fromkeys(place.column for place in cells))
    heads = "".join(
        f'<th scope="col" class="name"><span>{_text(column.removesuffix(".weight") or "(the layer itself)", _MAX_LABEL)}</span></th>'
        for column in columns
    )
    rows = "\n".join(
        f'<tr><th scope="row">{layer}</th>'
        + "".join(_cell(cells.get(_Place(layer, column)), scale) for column in columns)
        + "</tr>"
        for layer in sorted({place.layer for place in cells})
    )
    title = _text(stem, _MAX_LABEL) or "Layers"
    return (
        f'<h2>{title}</h2>\n<div class="wide"><table class="map">\n'
        f'<thead><tr><th scope="col">layer</th>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody>\n</table></div>"
    )


def _others(cells: Sequence[_Cell], scale: _Scale) -> str:
    ordered = sorted(cells, key=lambda cell: badness(cell.worst), reverse=True)
    rows = "\n".join(
        f'<tr><th scope="row" class="long">{_text(cell.name, _MAX_LABEL)}</th>{_cell(cell, scale)}</tr>'
        for cell in ordered[:_MAX_OTHERS]
    )
    more = len(cells) - _MAX_OTHERS
    rest = f"<p>and {more:,} more with smaller errors</p>" if more > 0 else ""
    return f'<h2>Other tensors</h2>\n<table class="map"><tbody>{rows}</tbody></table>{rest}'


def _cell(cell: _Cell | None, scale: _Scale) -> str:
    if cell is None:
        return "<td></td>"
    worst = cell.worst
    ratio = _finite(worst)
    if cell.is_equal:
        kind, text = 'class="equal"', "="
    elif worst.nonfinite:
        kind, text = 'class="broken"', "non-finite"
    elif ratio is None:
        kind, text = 'class="broken"', decibels(worst.snr_db)
    else:
        kind, text = f'style="{scale.style(ratio)}"', decibels(ratio)
    if len(cell.tensors) > 1 and cell.mean is not None:
        text += f"<small>{decibels(cell.mean)}</small>"
    return f'<td {kind} title="{_tooltip(cell)}">{text}</td>'


def _tooltip(cell: _Cell) -> str:
    worst = cell.worst
    ours = type_of(worst.type, worst.group_size)
    base = type_of(worst.base_type, worst.base_group_size)
    lines = [
        _text(worst.name),
        f"{ours}, base {base}, {number(worst.bits_per_weight)} bits per weight",
        f"relative error {number(worst.relative_error)}, SNR {decibels(worst.snr_db)} dB",
        f"largest error {number(worst.max_abs_error)}",
        f"worst group: {group_of(worst.worst)}",
    ]
    if worst.nonfinite:
        lines.append(f"non-finite elements: {worst.nonfinite:,}")
    if len(cell.tensors) > 1:
        lines.insert(
            0, f"worst of {len(cell.tensors):,} experts; mean SNR {decibels(cell.mean)} dB"
        )
    return "&#10;".join(lines)


def _worst(tensors: Sequence[TensorError]) -> str:
    chosen = sorted(tensors, key=badness, reverse=True)[:_WORST]
    heads = "".join(f'<th scope="col">{heading}</th>' for heading in _HEADINGS)
    cells = (
        (
            _text(tensor.name),
            _text(type_of(tensor.type, tensor.group_size)),
            _text(type_of(tensor.base_type, tensor.base_group_size)),
            _text(f"[{', '.join(map(str, tensor.shape))}]"),
            number(tensor.bits_per_weight),
            number(tensor.relative_error),
            decibels(tensor.snr_db),
            number(tensor.max_abs_error),
            group_of(tensor.worst) + (_ALARM.format(tensor.nonfinite) if tensor.nonfinite else ""),
        )
        for tensor in chosen
    )
    rows = "\n".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells)
    is_all = len(chosen) == len(tensors)
    title = "Tensors that differ" if is_all else f"The {_WORST} worst tensors"
    return (
        f'<h2>{title}</h2>\n<div class="wide"><table class="list">\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody>\n</table></div>"
    )
