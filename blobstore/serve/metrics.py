"""Counters of a server, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of :meth:`Metrics.text`."""


@dataclass(slots=True)
class Metrics:
    """Counters of a server. Only the thread of the server changes them, except ``bytes_verified``."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By method and status."""
    bytes_sent: int = 0
    """Of bodies."""
    bytes_verified: int = 0
    broken: int = 0
    """Responses that ended early: the client left, or a blob is damaged."""
    damaged: int = 0
    """Errors about models and blobs."""
    open_requests: int = 0
    prepared: int = 0
    """Models, digests and commits that had to be prepared."""

    def text(self, connections: int) -> str:
        """Return the numbers in Prometheus' text format."""
        lines = ["# TYPE blobstore_requests_total counter"]
        for (method, status), count in sorted(self.requests.items()):
            lines.append(f'blobstore_requests_total{{method="{method}",status="{status}"}} {count}')
        for name, kind, value in (
            ("sent_bytes_total", "counter", self.bytes_sent),
            ("verified_bytes_total", "counter", self.bytes_verified),
            ("broken_responses_total", "counter", self.broken),
            ("store_errors_total", "counter", self.damaged),
            ("prepared_total", "counter", self.prepared),
            ("open_requests", "gauge", self.open_requests),
            ("open_connections", "gauge", connections),
        ):
            lines += [f"# TYPE blobstore_{name} {kind}", f"blobstore_{name} {value}"]
        return "\n".join(lines) + "\n"
