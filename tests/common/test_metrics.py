"""The table of metrics, their values, and the status port that shows them."""

import subprocess
import urllib.error
import urllib.request

import pytest
from metrics import PROMTOOL, Scrape
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from orca_common import service
from orca_common.metrics import TABLE, Metrics, Service

SERVICES: tuple[Service, ...] = ("endpoint", "scheduler", "worker")


def test_the_table_names_each_metric_once_and_bounds_its_labels() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names))
    for row in TABLE:
        assert row.name.startswith("orca_")
        assert row.sentence.endswith(".")
        assert (row.kind == "counter") == row.name.endswith("_total")
        assert (row.kind == "histogram") == bool(row.buckets)
        assert list(row.buckets) == sorted(set(row.buckets))
        assert all(row.labels.values()), "a label has known values, or a sentence says how many there are"


def test_buckets_are_those_of_the_conventions() -> None:
    """Dashboards read quantiles from OpenTelemetry's buckets for servers of generative models (gen-ai-metrics).
    Iterations have buckets of their own."""
    of = {row.name: row.buckets for row in TABLE if row.buckets}
    assert of["orca_e2e_request_latency_seconds"] == of["orca_request_queue_time_seconds"]
    assert of["orca_e2e_request_latency_seconds"] == tuple(round(0.01 * 2**n, 2) for n in range(14))
    first = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0"
    token = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5"
    assert " ".join(map(str, of["orca_time_to_first_token_seconds"])) == first
    assert " ".join(map(str, of["orca_normalized_latency_seconds"])) == token
    assert " ".join(map(str, of["orca_inter_token_latency_seconds"])) == f"0.001 0.0025 0.005 {token}"
    assert of["orca_batch_size"] == tuple(2**n for n in range(10))
    assert of["orca_iteration_positions"] == tuple(2**n for n in range(14))
    assert of["orca_iteration_seconds"] == of["orca_commit_seconds"]
    steps = [digit * 10**power for power in range(-5, 0) for digit in (1, 2.5, 5)]
    assert of["orca_iteration_seconds"] == pytest.approx((*steps[2:], 1.0))


def test_a_histogram_counts_in_the_bucket_whose_bound_it_does_not_pass() -> None:
    metrics = Metrics("endpoint")
    latency = metrics.histogram("orca_time_to_first_token_seconds")
    for value in (0.001, 0.0011, 10.0, 10.1):
        latency.observe(value)
    latency.observe(0.02, times=3)
    found = Scrape.of(metrics.render("")[0].decode())
    buckets = {"0.001": 1, "0.005": 2, "0.02": 5, "7.5": 5, "10.0": 6, "+Inf": 7}
    for bound, count in buckets.items():
        assert found.value("orca_time_to_first_token_seconds_bucket", le=bound) == count
    assert found.value("orca_time_to_first_token_seconds_count") == 7
    assert found.value("orca_time_to_first_token_seconds_sum") == pytest.approx(20.1621)


def test_a_label_has_no_value_that_the_table_does_not_name() -> None:
    metrics = Metrics("endpoint")
    metrics.counter("orca_refusals_total", "QUEUE_FULL").add()
    with pytest.raises(AssertionError, match="reason is 'whatever a client sent'"):
        metrics.counter("orca_refusals_total", "whatever a client sent")
    with pytest.raises(KeyError):
        metrics.counter("orca_engine_tokens_total", "engine-0")  # a scheduler's


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: Debian's package prometheus has it")
@pytest.mark.parametrize("kind", SERVICES)
def test_promtool_accepts_every_metric_of_the_table(kind: Service) -> None:
    """Those too that a running stack has no values of."""
    assert PROMTOOL is not None
    metrics = Metrics(kind)
    for row in TABLE:
        if kind in row.services:
            labels = [values if isinstance(values, str) else values[0] for values in row.labels.values()]
            if row.kind == "gauge" and row.name != "orca_build_info":
                metrics.read(row.name, lambda labels=tuple(labels): [(labels, 1)])
            elif row.kind == "counter":
                metrics.counter(row.name, *labels).add()
            elif row.kind == "histogram":
                metrics.histogram(row.name, *labels).observe(0.1)
    text, _ = metrics.render("")
    assert all(f"# HELP {row.name} " in text.decode() for row in TABLE if kind in row.services)
    said = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (0, b"", b"")


def test_a_status_port_answers_text_and_openmetrics() -> None:
    metrics = Metrics("scheduler")
    metrics.read("orca_num_requests_waiting", lambda: [((), 7)])
    status = service.StatusPort("127.0.0.1", 0, lambda: None, lambda: True, metrics=metrics)
    url = f"http://127.0.0.1:{status.port}/metrics"
    try:
        with urllib.request.urlopen(url) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert Scrape.of(answer.read().decode()).value("orca_num_requests_waiting") == 7
        accept = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;q=0.1"}
        with urllib.request.urlopen(urllib.request.Request(url, headers=accept)) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
            families = {family.name: family for family in parse_openmetrics(answer.read().decode())}
        assert families["orca_num_requests_waiting"].samples[0].value == 7
        assert families["process_cpu_seconds"].type == "counter"
    finally:
        status.close()


def test_a_status_port_without_metrics_has_none() -> None:
    status = service.StatusPort("127.0.0.1", 0, lambda: None, lambda: True)
    try:
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(f"http://127.0.0.1:{status.port}/metrics")
        assert answer.value.code == 404
        answer.value.close()
    finally:
        status.close()
