"""The text that Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from blobstore.serve.library import Library
from blobstore.serve.metrics import Metrics
from tests.support.serve import ask


def test_prometheus_reads_every_number() -> None:
    metrics = Metrics(bytes_sent=5, broken=1)
    metrics.requests["GET", 200] += 3
    metrics.requests["HEAD", 404] += 1
    text = metrics.text(connections=2)
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} == {"counter", "gauge"}
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) == sum(not line.startswith("#") for line in text.splitlines())
    found = {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}
    assert found["blobstore_requests_total", "200", "GET"] == 3
    assert found["blobstore_requests_total", "404", "HEAD"] == 1
    assert found["blobstore_sent_bytes_total",] == 5
    assert found["blobstore_open_connections",] == 2


def test_metrics_have_the_media_type_of_their_format(library: Library) -> None:
    response = ask(library, "/metrics")
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
