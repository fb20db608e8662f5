"""The text that Prometheus reads."""

from __future__ import annotations

import re

from blobstore.serve.metrics import Metrics


def test_every_line_is_a_type_or_a_number_of_a_type() -> None:
    metrics = Metrics(bytes_sent=5)
    metrics.requests["GET", 200] += 3
    metrics.requests["HEAD", 404] += 1
    text = metrics.text(connections=2)
    types = dict(re.findall(r"^# TYPE (\w+) (counter|gauge)$", text, re.MULTILINE))
    numbers = re.findall(r"^(\w+)(\{[^}]*\})? (\d+)$", text, re.MULTILINE)
    assert len(text.splitlines()) == len(types) + len(numbers)
    assert {name for name, *_ in numbers} == types.keys()
    assert 'blobstore_requests_total{method="GET",status="200"} 3' in text
    assert "blobstore_sent_bytes_total 5" in text
    assert "blobstore_open_connections 2" in text
