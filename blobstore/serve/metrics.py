"""Counters of a server, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from blobstore.core.libraries import installed_version

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of :meth:`Metrics.text`."""
_BOUNDS: Final = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0)
"""Upper limits of the histogram of durations, in seconds."""


def family(name: str, kind: str, meaning: str, *samples: tuple[str, float]) -> str:
    """Return the lines of a metric. A sample is what follows its name, such as labels, and its value."""
    head = f"# HELP blobstore_{name} {meaning}\n# TYPE blobstore_{name} {kind}\n"
    return head + "".join(f"blobstore_{name}{suffix} {value}\n" for suffix, value in samples)


def plain_families(*rows: tuple[str, str, float]) -> str:
    """Return the lines of metrics with one value: the name, the meaning and the value of each. Totals are counters."""
    return "".join(
        family(name, "counter" if name.endswith("_total") else "gauge", meaning, ("", value))
        for name, meaning, value in rows
    )


@dataclass(slots=True)
class Metrics:
    """Counters of a server. Only the thread of the server changes them, except ``bytes_verified``."""

    version: str = field(default_factory=installed_version)
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By method and status."""
    bytes_sent: int = 0
    """Of bodies."""
    bytes_verified: int = 0
    broken: int = 0
    """Responses that ended early: the client left, or a blob is damaged."""
    damaged: int = 0
    """Errors about models and blobs."""
    damaged_blobs: int = 0
    """Those of them that are damage, and no fault of a disk or of another server."""
    hits: int = 0
    """Responses with files of the store."""
    misses: int = 0
    """Responses with files that were still arriving."""
    open_requests: int = 0
    healed: int = 0
    """Responses that were right after another server had sent what is damaged here."""
    prepared: int = 0
    """Models, digests and commits that had to be prepared."""
    seconds: float = 0.0
    """Of all requests, from the head to the last byte of the response."""
    durations: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    """Requests by the first of the limits that they did not exceed."""

    def note_seconds(self, seconds: float) -> None:
        """Count the duration of a request."""
        self.seconds += seconds
        self.durations[bisect_left(_BOUNDS, seconds)] += 1

    def text(self, connections: int) -> str:
        """Return the numbers in Prometheus' text format."""
        requests: list[tuple[str, float]] = [
            (f'{{method="{method}",status="{status}"}}', count)
            for (method, status), count in sorted(self.requests.items())
        ]
        *below, all_requests = accumulate(self.durations)
        durations: list[tuple[str, float]] = [
            (f'_bucket{{le="{bound}"}}', count)
            for bound, count in zip((*_BOUNDS, "+Inf"), (*below, all_requests), strict=True)
        ]
        durations += [("_sum", round(self.seconds, 6)), ("_count", all_requests)]
        version = f'{{version="{self.version}"}}'
        meaning = "From a request to the end of its response."
        return (
            family("build_info", "gauge", "The version of the server.", (version, 1))
            + family("requests_total", "counter", "Requests, by method and status.", *requests)
            + family("request_seconds", "histogram", meaning, *durations)
            + self._plain(connections)
        )

    def _plain(self, connections: int) -> str:
        return plain_families(
            ("sent_bytes_total", "Bytes of bodies that were sent.", self.bytes_sent),
            ("verified_bytes_total", "Bytes of blobs that were hashed.", self.bytes_verified),
            ("broken_responses_total", "Responses that ended early.", self.broken),
            ("store_errors_total", "Errors of the store, such as damaged blobs.", self.damaged),
            ("damaged_total", "Times that a blob was found damaged.", self.damaged_blobs),
            ("cache_hits_total", "Responses with files that the store had.", self.hits),
            ("cache_misses_total", "Responses with files that were still arriving.", self.misses),
            ("healed_total", "Responses whose damaged blobs were fetched again.", self.healed),
            ("prepared_total", "Models and digests that were not in memory.", self.prepared),
            ("open_requests", "Requests that are being answered.", self.open_requests),
            ("open_connections", "Connections of clients.", connections),
        )
