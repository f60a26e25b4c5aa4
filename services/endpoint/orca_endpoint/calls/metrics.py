"""An endpoint's metrics of its calls (the table is in `orca_common.metrics`)."""

import time
from collections.abc import Callable

from orca_common.metrics import OTHER, Counter, Metrics, Reading
from orca_pool.records import Attached, Reason, Times

from .line import Outcome

TENANTS = 100  # that have labels of their own: a list of API keys may have thousands
FUNCTIONS = 100  # and so of functions, whose names callers give


class CallMetrics:
    """The values that all calls of an endpoint share."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.first_token = metrics.histogram("orca_time_to_first_token_seconds")
        self.gap = metrics.histogram("orca_inter_token_latency_seconds")
        self.prompt = metrics.counter("orca_prompt_tokens_total")
        self.generation = metrics.counter("orca_generation_tokens_total")
        self.running = 0  # calls that have a token
        self._whole = metrics.histogram("orca_e2e_request_latency_seconds")
        self._normalized = metrics.histogram("orca_normalized_latency_seconds")
        self._queued = metrics.histogram("orca_request_queue_time_seconds")
        self._tenants: dict[str, tuple[Counter, Counter]] = {}
        self._functions = set[str]()

    def count_calls(self, calls: Callable[[], int]) -> None:
        """Has the open calls counted at each scrape."""

        def read() -> Reading:
            running = self.running
            return [(("waiting",), max(calls() - running, 0)), (("running",), running)]

        self._metrics.read("orca_calls", read)

    def tenant(self, name: str) -> tuple[Counter, Counter]:
        """The counters of a tenant's prompt tokens and generated tokens."""
        if name not in self._tenants and len(self._tenants) >= TENANTS:
            name = OTHER
        if name not in self._tenants:
            count = self._metrics.counter
            of_kind = [count("orca_tenant_tokens_total", name, kind) for kind in ("prompt", "generation")]
            self._tenants[name] = of_kind[0], of_kind[1]
        return self._tenants[name]

    def relaxed(self, keyword: str, function: str) -> None:
        """An answer is not held to a keyword of a schema: that of a function's arguments, or of the text."""
        if function not in self._functions and len(self._functions) >= FUNCTIONS:
            function = OTHER
        self._functions.add(function)
        self._metrics.counter("orca_schema_relaxations_total", keyword, function).add()

    def refused(self, reason: str) -> None:
        """A call ended before a request of its was accepted."""
        self._metrics.counter("orca_refusals_total", reason).add()

    def failed(self, reason: str) -> None:
        """A call with an accepted request ended with an error, or its client left."""
        self._metrics.counter("orca_request_errors_total", reason).add()

    def ended(self, reason: Reason, times: Times | None, tokens: int) -> None:
        """A request ended as its client wanted. times: None where the pool did not tell them."""
        self._metrics.counter("orca_request_success_total", reason.name.lower()).add()
        if times is None or not times.finished:
            return
        whole = (times.finished - times.submitted) / 1e6
        self._whole.observe(whole)
        if times.claimed:
            self._queued.observe((times.claimed - times.submitted) / 1e6)
        if tokens:
            self._normalized.observe(whole / tokens)


class Meter:
    """One call's part of these values.

    Each token and each end of a request is counted once, however often its stream is resumed: by the call that follows
    the request when it comes. A call follows a request that it submitted, or that lived when it attached; tokens that
    were there by then were counted by the call before. Only a call whose submission was new has a time to the first
    token.
    """

    def __init__(self, metrics: CallMetrics, tenant: str, arrived: float) -> None:
        """arrived: when the call came, on the clock of `time.monotonic`."""
        self._all, self._arrived = metrics, arrived
        self._prompt, self._generation = metrics.tenant(tenant)
        self._answered = self._new = self._follows = self._running = False
        self._count = 0  # tokens of the request so far
        self._last: float | None = None  # when the last of them came

    def answered(self, attached: Attached, prompt_tokens: int, count: int) -> None:
        """The pool has answered a submit or an attach, after which the request has `count` tokens."""
        if self._answered:
            self.came(count)
            return
        self._answered, self._new, self._count = True, attached.new, count
        self._follows = attached.finish is None
        if count:
            self._run()
        if attached.new:
            self._all.prompt.add(prompt_tokens)
            self._prompt.add(prompt_tokens)

    def came(self, count: int) -> None:
        """The request has `count` tokens now."""
        new, self._count = count - self._count, count
        if new <= 0 or not self._follows:
            return
        now, shared = time.monotonic(), self._all
        if self._last is not None:
            shared.gap.observe((now - self._last) / new, new)
        else:
            if self._new:
                shared.first_token.observe(now - self._arrived)
            if new > 1:  # they came with the first one
                shared.gap.observe(0.0, new - 1)
        self._last = now
        shared.generation.add(new)
        self._generation.add(new)
        self._run()

    def _run(self) -> None:
        if not self._running:
            self._running = True
            self._all.running += 1

    def ended(self, outcome: Outcome, finished: Reason | None, times: Times | None, accepted: bool) -> None:
        """The call has ended. finished: the end of the request that its client was shown."""
        if self._running:
            self._running = False
            self._all.running -= 1
        if finished is not None and self._follows:
            self._all.ended(finished, times, self._count)
        elif finished is None and accepted:
            self._all.failed(outcome.reason)
