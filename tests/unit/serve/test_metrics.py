"""The text that Prometheus reads."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from blobstore.serve.library import Library
from blobstore.serve.metrics import Metrics
from blobstore.serve.pull_through import PullThrough
from blobstore.serve.store_sizes import StoreSizes
from tests.support.serve import ask

ALERTS = Path(__file__).parents[3] / "docs/examples/prometheus-alerts.yaml"


def test_prometheus_reads_every_number() -> None:
    metrics = Metrics(bytes_sent=5, broken=1)
    metrics.requests["GET", 200] += 3
    metrics.requests["HEAD", 404] += 1
    for seconds in (0.005, 0.006, 601):
        metrics.note_seconds(seconds)
    text = metrics.text(connections=2)
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) == sum(not line.startswith("#") for line in text.splitlines())
    found = {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}
    assert found["blobstore_requests_total", "200", "GET"] == 3
    assert found["blobstore_requests_total", "404", "HEAD"] == 1
    assert found["blobstore_sent_bytes_total",] == 5
    assert found["blobstore_open_connections",] == 2
    assert found["blobstore_build_info", metrics.version] == 1
    buckets = [found["blobstore_request_seconds_bucket", le] for le in ("0.005", "0.025", "600.0")]
    assert buckets == [1, 2, 2]
    assert found["blobstore_request_seconds_bucket", "+Inf"] == 3
    assert found["blobstore_request_seconds_count",] == 3
    assert found["blobstore_request_seconds_sum",] == 601.011


def test_metrics_have_the_media_type_of_their_format(library: Library) -> None:
    response = ask(library, "/metrics")
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_the_alert_rules_name_metrics_that_a_server_has(library: Library) -> None:
    through = PullThrough(library, None, fresh=1)
    try:
        sizes = StoreSizes(library.store)
        sizes.measure()
        text = Metrics().text(connections=0) + sizes.text() + through.metrics()
    finally:
        through.close()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    for rule in rules:
        used = {
            re.sub("_(bucket|sum|count)$", "", name)
            for name in re.findall(r"blobstore_\w+", rule["expr"])
        }
        assert used, rule
        assert used <= names
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "ticket")
