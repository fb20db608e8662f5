"""What came of the faults, the effort that is made, and the table of both."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.faults.invariants import Findings

_KEPT = 50
"""Violations per row that are reported in full."""


class _Every:
    """A container that contains everything."""

    def __contains__(self, _: object) -> bool:
        return True


EVERY = _Every()


@dataclass(slots=True)
class Outcome:
    """One row of the table: a kind of fault, how often it was injected, and what it did."""

    fault: str
    injected: int = 0
    names_lost: int = 0
    bytes_lost: int = 0
    others: int = 0
    """Violations other than lost names and bytes."""
    violations: list[str] = field(default_factory=list)
    """Each with the data that reproduces it."""
    skipped: str = ""
    """Why it was not injected at all."""
    notes: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Return whether there was no violation."""
        return not self.violations

    def add(self, found: Findings, how: str) -> None:
        """Count the findings after a fault, which ``how`` describes."""
        self.names_lost += len(found.names_lost)
        self.bytes_lost += found.bytes_lost
        self.others += len(found.others)
        lost = [f"{name}: {problem}" for name, problem in found.names_lost.items()]
        for problem in (*lost, *found.others):
            self.violations.append(f"{self.fault}: {how}: {problem}")
        del self.violations[_KEPT:]

    def violate(self, problem: str) -> None:
        """Count something else that must not be."""
        self.others += 1
        self.violations.append(f"{self.fault}: {problem}")
        del self.violations[_KEPT:]


@dataclass(slots=True)
class Effort:
    """How often, and for how many seconds at most, faults are injected; at least once."""

    count: int
    seconds: float = float("inf")
    seed: int = 0
    _began: float = field(default_factory=time.monotonic)

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            if number and self.is_spent:
                return
            yield number

    @property
    def is_spent(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() - self._began > self.seconds

    def share(self, parts: int, count: int | None = None) -> Effort:
        """Return one of ``parts`` equal parts of what time is left."""
        left = max(0.0, self.seconds - (time.monotonic() - self._began))
        return Effort(self.count if count is None else count, left / parts, self.seed)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table in Markdown."""
    lines = [
        "| fault | times injected | names lost | bytes lost | other violations |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in outcomes:
        if row.skipped:
            lines.append(f"| {row.fault} | not run: {row.skipped} | | | |")
        else:
            counts = (row.injected, row.names_lost, row.bytes_lost, row.others)
            lines.append(f"| {row.fault} | {' | '.join(f'{count:,}' for count in counts)} |")
    return "\n".join(lines)
