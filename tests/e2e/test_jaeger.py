"""Requests are followed in the real Jaeger, from the client's traceparent to every rank, through Jaeger's query API."""

import asyncio
import json
import os
import random
import secrets
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import make_timed
from jaeger import PROGRAM, Span, follow, jaeger, spans_of
from stacks import Running, folder_in_memory, generation, running

from orca_scheduler.core.core import Member
from orca_scheduler.master.journal import files_in, read, scheduled

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no program `jaeger`, on PATH or built for the cluster")
REQUESTS = 200


async def test_a_request_is_followed_to_each_rank(tmp_path: Path) -> None:
    model = make_timed(tmp_path / "model", seconds=0.0)
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    with jaeger() as (otlp, query):
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": otlp,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.name=orca-0,k8s.namespace.name=here",
        }
        async with running(tmp_path / "run", model, tp=2, pp=2, environment=environment) as stack:
            metadata = (("traceparent", f"00-{trace}-{parent}-01"),)
            call = stack.stub.Generate(generation([1, 2, 3], 5, request_id="traced"), metadata=metadata)
            assert sum([len(response.tokens) async for response in call]) == 5
            ranks = {(stage, tensor_rank) for stage in range(2) for tensor_rank in range(2)}
            followed = await asyncio.to_thread(follow, query, trace, ranks, iterations=5, parent=parent)
    assert followed.request.tags["orca.request_id"] == "traced"
    assert [span.tags["orca.iteration"] for span in followed.iterations] == sorted(
        {span.tags["orca.iteration"] for span in followed.iterations}
    )
    stays = (*followed.queue, *followed.engine)
    assert all(followed.request.start <= span.start <= span.end <= followed.request.end for span in stays)
    assert {span.resource["service.instance.id"] for span in followed.spans} == {"orca-0", "orca-0/0", "orca-0/1"}
    assert {span.resource["k8s.namespace.name"] for span in followed.spans} == {"here"}


@dataclass(frozen=True)
class Asked:
    """A request under a client's own trace, and its seconds from submission to end by the pool's clock."""

    trace: str
    parent: str
    seconds: float


def traceparent() -> tuple[str, str, tuple[tuple[str, str], ...]]:
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    return trace, parent, (("traceparent", f"00-{trace}-{parent}-01"),)


async def ask(stack: Running, prompt: int, tokens: int) -> Asked:
    trace, parent, metadata = traceparent()
    request = generation(list(range(prompt)), tokens, ignore_eos=True)
    seconds = 0.0
    async for message in stack.stub.Generate(request, metadata=metadata):
        if message.HasField("finished"):
            seconds = message.finished.timings.finished.ToTimedelta().total_seconds()
    return Asked(trace, parent, seconds)


def all_spans(query: str) -> dict[tuple[str, str], Span]:
    """All spans of the stack, by trace and span id. It has ended, so each process has sent its own."""
    services = ("orca-endpoint", "orca-scheduler", "orca-worker")
    return {(span.trace_id, span.span_id): span for service in services for span in spans_of(query, service)}


def members_of(run_dir: Path, terms: Iterable[int] | None = None) -> dict[int, tuple[Member, ...]]:
    """The members of each iteration, by the journals of all terms or of these."""
    files = [file for file in files_in(run_dir) if terms is None or file.term in terms]
    return {batch.iteration: batch.members for file in files for batch in scheduled(read(file.path))}


def same_members(span: Span, members: tuple[Member, ...]) -> None:
    """Asserts that an iteration's span has the journal's members."""
    told = json.loads(span.tags["orca.members"])
    assert told == [f"row {m.row} {m.phase} from {m.start} count {m.count}" for m in members]
    assert span.tags["orca.batch_size"] == len(members)


def covered(spans: Iterable[Span], begin: int, end: int) -> int:
    """Microseconds between two moments in which one of these spans is."""
    total = 0
    for span in sorted(spans, key=lambda one: one.start):
        left, right = max(span.start, begin), min(span.end, end)
        total += max(right - left, 0)
        begin = max(begin, right)
    return total


def named(spans: Mapping[tuple[str, str], Span], name: str) -> list[Span]:
    return [span for span in spans.values() if span.name == name]


@pytest.mark.long
async def test_two_hundred_requests_under_load(tmp_path: Path) -> None:
    """Nothing is missing, and each request's spans are its whole time by the pool's clock."""
    model = make_timed(tmp_path / "model", seconds=0.005)
    draw = random.Random(1)
    with folder_in_memory() as folder, jaeger() as (otlp, query):
        run_dir, environment = Path(folder) / "run", {"OTEL_EXPORTER_OTLP_ENDPOINT": otlp}
        async with running(run_dir, model, pp=2, max_batch_size=8, environment=environment) as stack:
            sizes = [(draw.randint(1, 40), draw.randint(20, 60)) for _ in range(REQUESTS)]
            asked = await asyncio.gather(*(ask(stack, *size) for size in sizes))
        members = members_of(run_dir)
        spans = await asyncio.to_thread(all_spans, query)
    by_trace: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans.values():
        by_trace[span.trace_id].append(span)
        assert all(link in spans for link in span.links), f"a link of {span.name} points nowhere"
        mine = (span.trace_id, span.parent or "")
        assert span.parent is None or mine in spans or span.name == "orca.request", f"{span.name} has no parent"

    iterations = {span.tags["orca.iteration"]: span for span in named(spans, "orca.iteration")}
    assert iterations.keys() == members.keys(), "those of the journal"
    for number, span in iterations.items():
        same_members(span, members[number])
        assert len(set(span.links)) == len(members[number])
        stages = [one for one in by_trace[span.trace_id] if one.name == "orca.stage"]
        assert sorted(one.tags["orca.stage"] for one in stages) == [0, 1]
        assert {one.parent for one in stages} == {span.span_id}

    for (_, tokens), one in zip(sizes, asked, strict=True):
        found = {span.name: span for span in by_trace[one.trace]}
        assert len(found) == len(by_trace[one.trace]) == 4
        request, queue, stay = found["orca.request"], found["orca.queue"], found["orca.engine"]
        assert request.parent == one.parent, "the client's trace goes on"
        assert len(stay.links) == tokens
        ran = [spans[link] for link in stay.links]
        assert all((stay.trace_id, stay.span_id) in iteration.links for iteration in ran)
        # The queue, iterations and the gaps between them are the request's time: no moment is in none or in two.
        assert queue.end == stay.start
        running_time = covered(ran, stay.start, stay.end)
        gaps = stay.duration - running_time
        assert 0 <= gaps < stay.duration
        total = (queue.duration + running_time + gaps) / 1e6
        assert total == pytest.approx(one.seconds, abs=1e-6), "all moments are the pool's"
        assert stay.start <= ran[0].start <= ran[-1].end <= stay.end


@pytest.mark.long
async def test_what_killed_processes_take_along(tmp_path: Path) -> None:
    """A rank, a scheduler and an endpoint are killed under load. Only spans that these held are missing."""
    model = make_timed(tmp_path / "model", seconds=0.02)
    with folder_in_memory() as folder, jaeger() as (otlp, query):
        run_dir, environment = Path(folder) / "run", {"OTEL_EXPORTER_OTLP_ENDPOINT": otlp}
        async with running(run_dir, model, pp=2, endpoints=2, environment=environment) as stack:
            seen: list[int] = []
            asked = [traceparent() for _ in range(24)]
            streams = [
                asyncio.create_task(stack.tokens([1, 2, n], 60, seen.append, metadata=metadata))
                for n, (_, _, metadata) in enumerate(asked)
            ]
            for number, role in enumerate(("rank", "scheduler", "endpoint"), 1):
                await stack.until(lambda number=number: len(seen) >= 300 * number)
                os.kill(next(row["pid"] for row in stack.processes() if row["role"] == role), signal.SIGKILL)
            assert [len(tokens) for tokens in await asyncio.gather(*streams)] == [60] * len(asked)
        first, *later = sorted({file.term for file in files_in(run_dir)})
        killed, members = members_of(run_dir, [first]), members_of(run_dir, later)
        since = min(members)  # iterations before were the killed scheduler's; it had not written all of them down
        spans = await asyncio.to_thread(all_spans, query)

    for span in named(spans, "orca.iteration"):
        number = span.tags["orca.iteration"]
        if number >= since or number in killed:
            same_members(span, members[number] if number >= since else killed[number])
    parents = {trace: parent for trace, parent, _ in asked}
    resumed = {span.trace_id for span in named(spans, "orca.resume")}
    for span in spans.values():
        if span.name in ("orca.request", "orca.resume"):
            assert span.parent == parents[span.trace_id], "the client's trace goes on, over endpoints"
        elif span.parent is not None and (span.trace_id, span.parent) not in spans:
            if span.service == "orca-worker":
                number = span.tags.get("orca.iteration", 0)  # a part of a killed rank's span has none
                assert number < since, "an iteration that the killed scheduler had not sent"
            else:
                assert span.trace_id in resumed, "the killed endpoint's call"
    whole = {(span.trace_id, span.span_id) for span in named(spans, "orca.engine")}
    assert all(link in whole for span in named(spans, "orca.iteration") for link in span.links)
    ends = [(span.tags["orca.end"], span.trace_id) for span in named(spans, "orca.engine")]
    assert {end for end, _ in ends} <= {"LENGTH", "given back", "its master fell silent"}
    assert {trace for end, trace in ends if end == "LENGTH"} == parents.keys(), "each ended on an engine"
    assert all(link in spans for span in named(spans, "orca.engine") for link in span.links)
