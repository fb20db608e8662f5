"""The measurements of ``bench``, one after the other, and the conclusions from the figures."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal

from blobstore.core.workers import Steps
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from blobstore.core.progress import Progress
    from blobstore.core.workers import WorkerPool
    from blobstore.models.read_strategy import ReadStrategy

Place = Literal["disk", "page cache", "network", "host memory"]

_FEW: Final = 1 << 30
PASSES: Final = 3
"""The fastest of so many measurements counts, if there are few bytes."""
_BETTER: Final = 1.2
"""A way must be so many times as fast to be worth an option."""
_MOST: Final = 0.8
"""The part of available memory that a load may take."""
_RATE: Final = attrgetter("rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How fast all bytes arrived in one way."""

    place: Place
    """The place that they came from."""
    reader: Literal["bare", "open"]
    how: str
    """The number of threads of bare reads, the kind of bare copies, or the call of ``open``."""
    size: int
    """Bytes."""
    seconds: float
    device: str | None = None
    """The device into whose memory they were copied, if any."""
    reading: ReadStrategy | None = None
    """How ``open`` read files."""

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size / max(self.seconds, 1e-9)


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A way to measure."""

    measure: Callable[[WorkerPool], Measurement]
    """Measures it once, and reports its bytes."""
    size: int
    """About so many bytes are read or copied."""
    before: Callable[[], object] = _do_nothing
    """Called before each measurement."""
    passes: int = 1
    """The fastest of so many measurements counts."""
    threads: int | None = None
    is_optional: bool = False
    """Whether an error is a notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The result of :func:`measure_reading`."""

    subject: str
    """The name, path or address."""
    measurements: tuple[Measurement, ...]
    advice: tuple[str, ...]
    """How near ``open`` comes to bare reads and copies, and the options that would help."""
    notices: tuple[str, ...]
    """The measurements that were left out, with reasons."""


def passes_of(size: int) -> int:
    """Return how often a number of bytes is measured."""
    return PASSES if size < _FEW else 1


def fits(size: int, memory: int) -> bool:
    """Return whether ``size`` bytes may be loaded if ``memory`` bytes are free."""
    return size <= _MOST * memory


def call_of_open(options: Mapping[str, str]) -> str:
    """Return the call of ``open`` with these options, as people write it."""
    return "open(" + ", ".join(f'{name}="{value}"' for name, value in options.items()) + ")"


def measure_all(
    runs: Sequence[Run], progress: Progress | None, notices: list[str]
) -> list[Measurement]:
    """Measure in each way. Errors of optional ones are added to the notices."""
    steps = Steps(1, progress)
    left = [run.passes * run.size for run in runs]
    done = []
    for run in runs:
        size = left.pop(0)
        pool = steps.begin(size, sum(left), run.threads)
        try:
            done.append(max((_measured(run, pool) for _ in range(run.passes)), key=_RATE))
        except BlobstoreError as error:
            if not run.is_optional:
                raise
            notice = f"not all was measured: {error}"
            if notice not in notices:  # as of each way, of a device that fails
                notices.append(notice)
    return done


def _measured(run: Run, pool: WorkerPool) -> Measurement:
    run.before()
    return run.measure(pool)


def advice_of(done: Sequence[Measurement]) -> tuple[str, ...]:
    """Return how near ``open`` comes to what is possible, and the options that would help."""
    advice: list[str] = []
    opened = [one for one in done if one.reader == "open"]
    for place, device in dict.fromkeys((one.place, one.device) for one in opened):
        ways = [one for one in opened if (one.place, one.device) == (place, device)]
        best = max(ways, key=_RATE)
        source = place if device is None else f"{place} to {device}"
        what, limit = _limit(done, best)
        share = best.rate / limit
        if (chosen := ways[0].reading) is not None:
            advice.append(f"{source}: {ways[0].how} reads with {chosen.how}: {chosen.reason}")
        near = f"reaches {share:.0%} of" if share < 1 else "is as fast as"  # maps need no copies
        advice.append(f"{source}: {best.how} {near} {what}")
        if best.rate > _BETTER * ways[0].rate:
            times = best.rate / ways[0].rate
            advice.append(f"{source}: {best.how} is {times:.1f} times as fast as {ways[0].how}")
    return tuple(advice)


def _limit(done: Sequence[Measurement], opened: Measurement) -> tuple[str, float]:
    """Return what limits a load, and its rate: the slower of the reads and copies that it needs."""
    bare = [one for one in done if one.reader == "bare"]
    reads = [one.rate for one in bare if (one.place, one.device) == (opened.place, None)]
    copies = [one.rate for one in bare if one.device]
    limits = [("bare reads", max(reads))]
    if opened.device is not None and copies:  # pages in memory are copied from there
        limits = [("bare copies", max(copies)), *(limits if opened.place == "disk" else ())]
    return min(limits, key=lambda named: named[1])
