"""What is stored against how fast it is decoded, drawn for the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_OURS = "#1a6fb5"
_PEERS = "#9a9a9a"


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
    mpl.rcParams["svg.hashsalt"] = "blobstore"
    from matplotlib import pyplot as plt  # type: ignore[import-not-found, unused-ignore]

    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), squeeze=False)
    for axis, (title, points) in zip(axes[0], panels.items(), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log")
        axis.set_xlabel("decoded, GB/s of a thread")
        axis.margins(0.25, 0.12)
        axis.grid(visible=True, which="both", linewidth=0.3)
        for point in points:
            color = _OURS if point.is_ours else _PEERS
            axis.plot(point.decode, point.ratio, "o", color=color)
            axis.annotate(
                point.codec,
                (point.decode, point.ratio),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
                color=color,
            )
    axes[0][0].set_ylabel("stored for each byte")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
