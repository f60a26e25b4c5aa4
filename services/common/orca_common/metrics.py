"""All metrics of all services: the table, and the values of one service as Prometheus reads them.

docs/hooks/metrics.py writes the table into docs/metrics.md.

A value has one writer, the service's event loop, and is read by the status port's thread at a scrape. So it needs no
lock: a counter takes 0.2 us and a histogram 0.4 us, where prometheus-client's own take 0.9 us and 1.9 us, and an
endpoint observes a gap for each token of each stream. prometheus-client makes the text of it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .errors import ErrorReason
from .release import VERSION

Service = Literal["endpoint", "scheduler", "worker"]
Kind = Literal["counter", "gauge", "histogram"]
Reading = Iterable[tuple[tuple[str, ...], float]]  # the values of the labels, in the table's order, and the value

# The buckets of OpenTelemetry's conventions for servers of generative models, in seconds.
REQUEST = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
OUTPUT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# Below a millisecond too: a small model runs an iteration in as much, and its tokens come as fast.
ITERATION = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, *OUTPUT_TOKEN)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
POSITIONS = (*BATCH, 1024, 2048, 4096, 8192)

ENGINE = "each engine's name"
RANK = "numbers of the pod's ranks"
REASONS = tuple(reason.value for reason in ErrorReason)
CLIENT_GONE = "CLIENT_GONE"  # an end of a call that no error reason names
OTHER = "other"  # a tenant whose key is not in the list any more

# Why a running engine was given up: the kinds of suspicions of a scheduler, and those that are no fault of a rank.
CAUSES = (
    "gone",
    "silent",
    "stuck",
    "failed",
    "closed",
    "cut",
    "refused",
    "peer_lost",
    "leaving",
    "replaced",
    "retired",
)


class Row(NamedTuple):
    """A metric. `labels`: for each label all the values that it can have, or a sentence where a release bounds them."""

    name: str
    kind: Kind
    services: tuple[Service, ...]
    sentence: str
    labels: Mapping[str, tuple[str, ...] | str] = {}
    buckets: tuple[float, ...] = ()


ALL: tuple[Service, ...] = ("endpoint", "scheduler", "worker")
AT_ENDPOINT: tuple[Service, ...] = ("endpoint",)
AT_SCHEDULER: tuple[Service, ...] = ("scheduler",)
AT_WORKER: tuple[Service, ...] = ("worker",)

TABLE = (
    Row("orca_build_info", "gauge", ALL, "1, with the version of the service.", {"version": "the release's"}),
    # -- requests, as their clients see them
    Row(
        "orca_time_to_first_token_seconds",
        "histogram",
        AT_ENDPOINT,
        "Time from the arrival of a call to its request's first token. Once a request: by the call that submitted it.",
        buckets=FIRST_TOKEN,
    ),
    Row(
        "orca_inter_token_latency_seconds",
        "histogram",
        AT_ENDPOINT,
        "Time between two tokens of a stream. Tokens that come together share the time since the one before them; "
        "those that come with the first one add 0.",
        buckets=BETWEEN_TOKENS,
    ),
    Row(
        "orca_e2e_request_latency_seconds",
        "histogram",
        AT_ENDPOINT,
        "Time from a request's submission to its end, on Redis's clock. Once a request: by the call that sees the end.",
        buckets=REQUEST,
    ),
    Row(
        "orca_normalized_latency_seconds",
        "histogram",
        AT_ENDPOINT,
        "The same time divided by the request's output tokens: the paper's measure.",
        buckets=OUTPUT_TOKEN,
    ),
    Row(
        "orca_request_queue_time_seconds",
        "histogram",
        AT_ENDPOINT,
        "Time from a request's submission to its first claim by an engine. Observed at its end.",
        buckets=REQUEST,
    ),
    Row(
        "orca_request_success_total",
        "counter",
        AT_ENDPOINT,
        "Requests that ended as their clients wanted. Once a request: by the call that sees the end.",
        {"finished_reason": ("length", "eos", "stop_token", "stop", "cancelled")},
    ),
    Row(
        "orca_request_errors_total",
        "counter",
        AT_ENDPOINT,
        "Calls with an accepted request that ended with an error, or whose client left before the end.",
        {"reason": (*REASONS, CLIENT_GONE)},
    ),
    Row(
        "orca_refusals_total",
        "counter",
        AT_ENDPOINT,
        "Calls that were refused before a request of theirs was accepted.",
        {"reason": REASONS},
    ),
    Row(
        "orca_schema_relaxations_total",
        "counter",
        AT_ENDPOINT,
        "Keywords of JSON schemas that answers were not held to, since their callers did not ask for strictness.",
        {"keyword": "of JSON Schema, '' for a whole schema", "tool": f"its name, '' for the text, and {OTHER!r}"},
    ),
    Row("orca_prompt_tokens_total", "counter", AT_ENDPOINT, "Tokens of the prompts of requests that were accepted."),
    Row("orca_generation_tokens_total", "counter", AT_ENDPOINT, "Tokens that streams have shown, each once."),
    Row(
        "orca_tenant_tokens_total",
        "counter",
        AT_ENDPOINT,
        "The same tokens by tenant.",
        {
            "tenant": f"the names in the list of API keys, '' without one, and {OTHER!r}",
            "kind": ("prompt", "generation"),
        },
    ),
    Row(
        "orca_calls",
        "gauge",
        AT_ENDPOINT,
        "Streams that this endpoint serves: those without a token yet, and those with some.",
        {"state": ("waiting", "running")},
    ),
    # -- the queue
    Row(
        "orca_num_requests_waiting",
        "gauge",
        AT_SCHEDULER,
        "Requests in the queue of the pool. Each scheduler reports the same queue: take the maximum, never the sum.",
    ),
    Row(
        "orca_queue_oldest_age_seconds",
        "gauge",
        AT_SCHEDULER,
        "Time since the submission of the first request in that queue; 0 when it is empty. Take the maximum.",
    ),
    # -- engines
    Row("orca_engine_ready", "gauge", AT_SCHEDULER, "1 while an engine runs, 0 while it cannot.", {"engine": ENGINE}),
    Row("orca_num_requests_running", "gauge", AT_SCHEDULER, "Requests that an engine has claimed.", {"engine": ENGINE}),
    Row(
        "orca_kv_cache_usage_perc",
        "gauge",
        AT_SCHEDULER,
        "The share of an engine's slots that is reserved, from 0 to 1.",
        {"engine": ENGINE},
    ),
    Row(
        "orca_engines_wanted",
        "gauge",
        AT_SCHEDULER,
        "Engines that there should be by the load, where schedulers scale them, at the one that decides. "
        "An engine that finishes its requests counts until it may go.",
    ),
    Row("orca_worker_pods_wanted", "gauge", AT_SCHEDULER, "The same in pods of the workers."),
    Row(
        "orca_rollout_stopped",
        "gauge",
        AT_SCHEDULER,
        "In Kubernetes: 1 while an update of the workers has stopped, otherwise 0. Each scheduler reports the same.",
    ),
    Row("orca_slots", "gauge", AT_SCHEDULER, "An engine's slots.", {"engine": ENGINE, "state": ("reserved", "free")}),
    Row(
        "orca_cache_config_info",
        "gauge",
        AT_SCHEDULER,
        "1, with the slots of a block and the number of blocks of a running engine.",
        {"engine": ENGINE, "block_size": "a setting", "num_gpu_blocks": "one number for each formation"},
    ),
    Row("orca_batches_in_flight", "gauge", AT_SCHEDULER, "Batches that an engine runs now.", {"engine": ENGINE}),
    Row(
        "orca_batch_size",
        "histogram",
        AT_SCHEDULER,
        "Requests in a batch, at each iteration.",
        {"engine": ENGINE},
        BATCH,
    ),
    Row(
        "orca_iteration_positions",
        "histogram",
        AT_SCHEDULER,
        "Positions that an iteration computes: one for each increment, those of prompts or of their parts.",
        {"engine": ENGINE},
        POSITIONS,
    ),
    Row(
        "orca_cached_tokens_total",
        "counter",
        AT_SCHEDULER,
        "Tokens with which requests began and that were not computed: others had their keys and values.",
        {"engine": ENGINE},
    ),
    Row(
        "orca_preemptions_total",
        "counter",
        AT_SCHEDULER,
        "Requests that gave up their slots for earlier ones, and are computed again.",
        {"engine": ENGINE},
    ),
    Row(
        "orca_handed_over_total",
        "counter",
        AT_SCHEDULER,
        "Requests that an engine of the role prefill has handed over with their first token.",
        {"engine": ENGINE},
    ),
    Row(
        "orca_pulls_total",
        "counter",
        AT_SCHEDULER,
        "Requests whose keys and values an engine of the role decode has pulled, could not pull, or did not try to "
        "pull because the last ones had failed. It computes them itself then.",
        {"engine": ENGINE, "outcome": ("done", "failed", "skipped")},
    ),
    Row(
        "orca_pulled_bytes_total",
        "counter",
        AT_SCHEDULER,
        "Keys and values that all ranks of an engine have pulled, in whole blocks.",
        {"engine": ENGINE},
    ),
    Row(
        "orca_decode_initiations_total",
        "counter",
        AT_SCHEDULER,
        "Initiations at an engine of the role decode: of requests whose keys and values were not pulled, that were "
        "preempted, or that it had when its master changed.",
        {"engine": ENGINE},
    ),
    Row(
        "orca_iteration_seconds",
        "histogram",
        AT_SCHEDULER,
        "Parts of an iteration. scheduler: the scheduler's own work. control: the control message's way to the first "
        "stage, and the tokens' way back. data: the time of each stage's slowest rank to hand its result on. "
        "compute: the time of each stage's slowest rank to compute.",
        {"engine": ENGINE, "part": ("scheduler", "control", "data", "compute")},
        ITERATION,
    ),
    Row(
        "orca_engine_active_seconds_total",
        "counter",
        AT_SCHEDULER,
        "Time during which an engine had a batch in flight.",
        {"engine": ENGINE},
    ),
    Row(
        "orca_stage_busy_seconds_total",
        "counter",
        AT_SCHEDULER,
        "Time during which the slowest rank of a stage computed. Its bubbles are the rest of the engine's active time.",
        {"engine": ENGINE, "stage": "numbers below pp"},
    ),
    Row("orca_engine_tokens_total", "counter", AT_SCHEDULER, "Tokens that were committed.", {"engine": ENGINE}),
    Row(
        "orca_commit_seconds",
        "histogram",
        AT_SCHEDULER,
        "Time that the pool took to answer a commit.",
        {"engine": ENGINE},
        ITERATION,
    ),
    Row(
        "orca_recoveries_total",
        "counter",
        AT_SCHEDULER,
        "Ends of a running engine's epoch, by cause. The causes leaving, replaced and retired are no faults.",
        {"engine": ENGINE, "cause": CAUSES},
    ),
    Row(
        "orca_invariant_violations_total",
        "counter",
        AT_SCHEDULER,
        "Violated invariants of the scheduler core. Each one is a bug.",
        {"engine": ENGINE},
    ),
    # -- ranks
    Row("orca_rank_ready", "gauge", AT_WORKER, "1 while a rank is a member of a running engine.", {"rank": RANK}),
    Row(
        "orca_rank_weights_loaded",
        "gauge",
        AT_WORKER,
        "1 when a rank has its weights, 0 while it reads them or has no place yet.",
        {"rank": RANK},
    ),
    Row("orca_rank_restarts_total", "counter", AT_WORKER, "Ends of a rank's process.", {"rank": RANK}),
)


class Counter:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Histogram:
    """The number of observations in each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: the greatest value of each bucket, ascending. One more bucket holds what is greater."""
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value that was seen this many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Metrics(Collector):
    """The values of one process of a service.

    Those of the table whose labels have known values stand at 0 from the start, so that the first event is a change.
    """

    def __init__(self, service: Service) -> None:
        self._rows = {row.name: row for row in TABLE if service in row.services}
        self._counters: dict[str, dict[tuple[str, ...], Counter]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}
        self._readers: dict[str, Callable[[], Reading]] = {}
        for row in self._rows.values():
            values = tuple(row.labels.values())
            known = [value for value in values if not isinstance(value, str)]
            for labels in product(*known) if len(known) == len(values) else ():
                if row.kind == "counter":
                    self.counter(row.name, *labels)
                elif row.kind == "histogram":
                    self.histogram(row.name, *labels)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.read("orca_build_info", lambda: [((VERSION,), 1)])

    def counter(self, name: str, *labels: str) -> Counter:
        """The counter with these values of its labels, in the table's order. Keep it: looking it up takes longer."""
        self._check(name, "counter", labels)
        return self._counters.setdefault(name, {}).setdefault(labels, Counter())

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The same for a histogram."""
        row = self._check(name, "histogram", labels)
        return self._histograms.setdefault(name, {}).setdefault(labels, Histogram(row.buckets))

    def read(self, name: str, reader: Callable[[], Reading]) -> None:
        """Has a gauge or a counter read at each scrape, in the status port's thread."""
        assert self._rows[name].kind != "histogram", name
        assert name not in self._readers, name
        self._readers[name] = reader

    def _check(self, name: str, kind: Kind, labels: Sequence[str]) -> Row:
        row = self._rows[name]
        assert row.kind == kind, f"{name} is a {row.kind}"
        for (label, allowed), value in zip(row.labels.items(), labels, strict=True):
            assert isinstance(allowed, str) or value in allowed, f"{name}: {label} is {value!r}"
        return row

    def collect(self) -> Iterator[Metric]:
        """Makes the families of all values as they are now."""
        for row in self._rows.values():
            match row.kind:
                case "counter":
                    family = CounterMetricFamily(
                        row.name.removesuffix("_total"), row.sentence, labels=tuple(row.labels)
                    )
                    for labels, counter in list(self._counters.get(row.name, {}).items()):
                        family.add_metric(labels, counter.value)
                    for labels, value in self._reading(row):
                        family.add_metric(labels, value)
                case "gauge":
                    family = GaugeMetricFamily(row.name, row.sentence, labels=tuple(row.labels))
                    for labels, value in self._reading(row):
                        family.add_metric(labels, value)
                case "histogram":
                    family = HistogramMetricFamily(row.name, row.sentence, labels=tuple(row.labels))
                    bounds = [*map(floatToGoString, row.buckets), "+Inf"]
                    for labels, histogram in list(self._histograms.get(row.name, {}).items()):
                        counts = list(accumulate(histogram.counts))
                        family.add_metric(labels, list(zip(bounds, counts, strict=True)), histogram.sum)
            if family.samples:
                yield family

    def _reading(self, row: Row) -> Reading:
        reader = self._readers.get(row.name)
        return reader() if reader is not None else ()

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text of all metrics and its content type: OpenMetrics where the header `Accept` asks for it.

        May be called in any thread.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
