"""A request is followed in the real Jaeger, from the client's traceparent to every rank, through Jaeger's query API."""

import asyncio
import secrets
from pathlib import Path

import pytest
from checkpoints import make_timed
from jaeger import PROGRAM, follow, jaeger
from stacks import generation, running

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no program `jaeger` on PATH")


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
    assert all(span.start <= span.end <= followed.request.end for span in (*followed.queue, *followed.engine))
    assert {span.resource["service.instance.id"] for span in followed.spans} == {"orca-0", "orca-0/0", "orca-0/1"}
    assert {span.resource["k8s.namespace.name"] for span in followed.spans} == {"here"}
