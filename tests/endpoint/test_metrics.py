"""The endpoint's metrics: each request, token and refusal counts once, however its stream is called for."""

import hashlib
import struct

import grpc
import pytest
from endpoint.harness import World, collect, generation, read, serving, until
from metrics import Scrape

from orca.v1 import orca_pb2 as pb
from orca_common.metrics import Metrics
from orca_endpoint.calls.metrics import TENANTS, CallMetrics, Meter
from orca_pool.records import Attached, Reason


def scrape(orca: World) -> Scrape:
    return Scrape(orca.serving.addresses["status"])


def values(metrics: Metrics) -> Scrape:
    return Scrape.of(metrics.render("")[0].decode())


async def test_a_resumed_stream_counts_each_token_and_the_end_once(orca: World) -> None:
    first = orca.stub.Generate(generation(max_new_tokens=6, request_id="long", attempt=1))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10, 11, 12])
    await read(first, 4)
    digest = hashlib.sha1(struct.pack("<2I", 10, 11)).digest()
    second = orca.stub.Resume(pb.ResumeRequest(request_id="long", from_index=2, attempt=2, digest=digest))
    await read(second, 2)
    await orca.engine.commit(request, 3, [13, 14])
    await orca.engine.commit(request, 5, [15], Reason.LENGTH)
    await collect(second)
    await collect(orca.stub.Resume(pb.ResumeRequest(request_id="long", from_index=5, attempt=3)))
    await collect(orca.stub.Generate(generation(max_new_tokens=6, request_id="long", attempt=4)))
    await orca.serving.quiet()

    found = scrape(orca)
    assert found.value("orca_generation_tokens_total") == 6
    assert found.value("orca_prompt_tokens_total") == len(generation().token_ids.ids) > 0
    assert found.value("orca_time_to_first_token_seconds_count") == 1
    assert found.nonzero("orca_request_success_total", "finished_reason") == {"length": 1}
    for name in ("e2e_request_latency", "normalized_latency", "request_queue_time"):
        assert found.value(f"orca_{name}_seconds_count") == 1
    # The first call was taken over: it ended with an error, and the request did not.
    assert found.nonzero("orca_request_errors_total", "reason") == {"TAKEN_OVER": 1}
    assert found.value("orca_calls") == 0


async def test_tokens_count_that_come_with_an_error(orca: World) -> None:
    """They were made and shown."""
    call = orca.stub.Generate(generation(max_new_tokens=4))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, [10, 11])
    await orca.engine.commit(request, 2, [12], Reason.NOT_FINITE)
    with pytest.raises(grpc.aio.AioRpcError):
        await collect(call)
    await orca.serving.quiet()
    found = scrape(orca)
    assert found.value("orca_generation_tokens_total") == 3
    assert found.value("orca_tenant_tokens_total", kind="generation") == 3
    assert found.nonzero("orca_request_errors_total", "reason") == {"LOGITS_NOT_FINITE": 1}
    assert found.value("orca_request_success_total") == 0


async def test_another_endpoint_goes_on_counting(orca: World) -> None:
    """The tokens that the first endpoint has shown are its own; the rest and the end are the second one's."""
    async with serving(orca.redis_url, orca.name, orca.model) as other:
        first = orca.stub.Generate(generation(max_new_tokens=4, request_id="r", attempt=1))
        request = await orca.engine.claim()
        await orca.engine.commit(request, 0, [10, 11])
        await read(first, 3)
        second = other.stub.Resume(pb.ResumeRequest(request_id="r", attempt=2))
        await read(second, 3)
        await orca.engine.commit(request, 2, [12, 13], Reason.LENGTH)
        await collect(second)
        await other.quiet()
        resumed = Scrape(other.addresses["status"])
        assert resumed.value("orca_generation_tokens_total") == 2
        assert resumed.value("orca_prompt_tokens_total") == resumed.value("orca_time_to_first_token_seconds_count") == 0
        assert resumed.value("orca_request_success_total") == 1
        assert scrape(orca).value("orca_generation_tokens_total") == 2
        assert scrape(orca).value("orca_request_success_total") == 0


async def test_calls_are_counted_while_they_are_open(orca: World) -> None:
    call = orca.stub.Generate(generation(max_new_tokens=3, request_id="open"))
    request = await orca.engine.claim()
    await read(call, 1)
    assert scrape(orca).value("orca_calls", state="waiting") == 1
    await orca.engine.commit(request, 0, [10])
    await read(call, 1)
    assert scrape(orca).value("orca_calls", state="waiting") == 0
    assert scrape(orca).value("orca_calls", state="running") == 1
    call.cancel()
    await until(lambda: scrape(orca).nonzero("orca_request_errors_total", "reason") == {"CLIENT_GONE": 1})
    assert scrape(orca).value("orca_calls") == 0


def test_no_list_of_keys_has_more_than_so_much_of_the_labels() -> None:
    metrics = Metrics("endpoint")
    calls = CallMetrics(metrics)
    for n in range(2 * TENANTS):
        meter = Meter(calls, f"tenant-{n}", 0.0)
        meter.answered(Attached(b"", 1, [], [], None, new=True), 3, 0)
    tokens = values(metrics).nonzero("orca_tenant_tokens_total", "tenant")
    assert len(tokens) == TENANTS + 1
    assert tokens["other"] == 3 * TENANTS
    assert tokens["tenant-0"] == 3


def test_gaps_of_tokens_that_come_together_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([2.0, 2.5])
    monkeypatch.setattr("orca_endpoint.calls.metrics.time.monotonic", lambda: next(moments))
    metrics = Metrics("endpoint")
    calls = CallMetrics(metrics)
    meter = Meter(calls, "", 1.0)
    meter.answered(Attached(b"", 1, [], [], None, new=True), 3, 0)
    meter.came(1)
    meter.came(6)
    found = values(metrics)
    assert found.value("orca_time_to_first_token_seconds_sum") == 1.0
    assert found.value("orca_inter_token_latency_seconds_count") == 5
    assert found.value("orca_inter_token_latency_seconds_sum") == pytest.approx(0.5)


def test_every_token_but_the_first_has_a_gap_when_several_come_first() -> None:
    metrics = Metrics("endpoint")
    meter = Meter(CallMetrics(metrics), "", 1.0)
    meter.answered(Attached(b"", 1, [], [], None, new=True), 3, 0)
    meter.came(3)
    found = values(metrics)
    assert found.value("orca_time_to_first_token_seconds_count") == 1
    assert found.value("orca_inter_token_latency_seconds_count") == 2
    assert found.value("orca_inter_token_latency_seconds_sum") == 0
