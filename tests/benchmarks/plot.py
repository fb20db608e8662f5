"""Plots stored size against decoding speed for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_OURS = "#1a6fb5"
_PEERS = "#9a9a9a"
_DARK = """
@media (prefers-color-scheme: dark) { :root { filter: invert(0.87) hue-rotate(180deg) } }"""


class Point(NamedTuple):
    """A codec on one input."""

    codec: str
    ratio: float
    """Bytes stored for a byte of the input."""
    decode: float
    """GB/s of the input, of one thread."""
    is_ours: bool


def draw(panels: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Write an SVG file with a panel for each input; the same points give the same bytes."""
    import matplotlib as mpl  # type: ignore[import-not-found, unused-ignore]

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "blobstore", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt  # type: ignore[import-not-found, unused-ignore]

    figure, axes = plt.subplots(-(-len(panels) // 2), 2, figsize=(10, 7), squeeze=False)
    for axis, (title, points) in zip(axes.flat, panels.items(), strict=False):
        axis.set_title(title, fontsize=10)
        axis.set_xlim(0, 1.3 * max(point.decode for point in points))
        axis.set_xlabel("decoded, GB/s of a thread", fontsize=8)
        axis.set_ylabel("stored for each byte", fontsize=8)
        axis.margins(y=0.15)
        axis.grid(visible=True, linewidth=0.3)
        for number, point in enumerate(sorted(points, key=lambda point: point.decode)):
            color = _OURS if point.is_ours else _PEERS
            axis.plot(point.decode, point.ratio, "o", color=color)
            axis.annotate(
                point.codec,
                (point.decode, point.ratio),
                xytext=(4, 5 if number % 2 else -11),  # neighbours would hide each other's
                textcoords="offset points",
                fontsize=7,
                color=color,
            )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</style>", f"{_DARK}</style>", 1), encoding="utf-8")
