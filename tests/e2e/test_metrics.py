"""A running stack reports at /metrics the things that happened to it."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from checkpoints import make_timed
from metrics import PROMETHEUS, PROMTOOL, RATE, Scrape, alerts, panels, prometheus, scraped
from stacks import Running, generation, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
REQUESTS, PROMPT, TOKENS = 6, 5, 8
LONG = 2000  # tokens of a request that still runs when it is looked at


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One for all tests; only the first of them looks at counts."""
    folder = tmp_path_factory.mktemp("metrics")
    async with running(folder / "run", make_timed(folder / "model", seconds=0.002)) as started:
        yield started


def status_of(stack: Running, role: str) -> str:
    (address,) = [row["status"] for row in stack.processes() if row["role"] == role]
    return address


async def scrape(stack: Running, *roles: str) -> Scrape:
    return await asyncio.to_thread(Scrape, *(status_of(stack, role) for role in roles))


async def settled(stack: Running, condition: Callable[[Scrape], bool], *roles: str) -> Scrape:
    """A scrape that meets a condition. A client has its last token before the services have counted it."""
    async with asyncio.timeout(30):
        while not condition(found := await scrape(stack, *roles)):
            await asyncio.sleep(0.05)
    return found


def counted(requests: int, tokens: int) -> Callable[[Scrape], bool]:
    """Whether so much has come to its end in all services."""

    def condition(found: Scrape) -> bool:
        ended = found.value("orca_request_success_total"), found.value("orca_engine_tokens_total")
        parts = (found.value("orca_iteration_seconds_count", part=part) for part in ("scheduler", "compute"))
        return ended >= (requests, tokens) and len(set(parts)) == 1

    return condition


async def test_values(stack: Running) -> None:
    """Known requests, refusals and a killed rank: each is counted once, by the service that knows it."""
    before = await scrape(stack, "endpoint", "scheduler")
    assert before.value("orca_request_success_total") == before.value("orca_recoveries_total", cause="gone") == 0
    await asyncio.gather(*(stack.tokens([n + 1] * PROMPT, TOKENS) for n in range(REQUESTS)))
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.stub.GenerateText(generation([], 4))
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.stub.GenerateText(generation([1], 4, model="another"))
    complete = counted(REQUESTS, REQUESTS * TOKENS)
    after = await settled(
        stack,
        # Those that wait are as the last renewal told, 0.4 s ago; a call that ends is counted before it is gone.
        lambda s: complete(s) and s.value("orca_num_requests_waiting") == s.value("orca_calls") == 0,
        *("endpoint", "scheduler"),
    )

    assert after.nonzero("orca_request_success_total", "finished_reason") == {"length": REQUESTS}
    assert after.nonzero("orca_refusals_total", "reason") == {"INVALID_FIELD": 1, "UNKNOWN_MODEL": 1}
    assert after.nonzero("orca_request_errors_total", "reason") == {}
    assert after.value("orca_prompt_tokens_total") == REQUESTS * PROMPT
    assert after.value("orca_generation_tokens_total") == REQUESTS * TOKENS
    assert after.value("orca_engine_tokens_total", engine="engine-0") == REQUESTS * TOKENS
    assert after.value("orca_tenant_tokens_total", kind="generation") == REQUESTS * TOKENS
    for once in ("time_to_first_token", "e2e_request_latency", "normalized_latency", "request_queue_time"):
        assert after.value(f"orca_{once}_seconds_count") == REQUESTS, once
    assert after.value("orca_inter_token_latency_seconds_count") == REQUESTS * (TOKENS - 1)
    whole, queued = (after.value(f"orca_{name}_seconds_sum") for name in ("e2e_request_latency", "request_queue_time"))
    assert whole > queued + REQUESTS * TOKENS * 0.002
    assert after.value("orca_normalized_latency_seconds_sum") == pytest.approx(whole / TOKENS)

    iterations = after.value("orca_batch_size_count", engine="engine-0")
    assert TOKENS <= iterations <= REQUESTS * TOKENS
    assert after.value("orca_batch_size_sum") == REQUESTS * TOKENS
    for part in ("scheduler", "control", "data", "compute"):
        assert after.value("orca_iteration_seconds_count", part=part) == iterations, part
    busy, active = after.value("orca_stage_busy_seconds_total"), after.value("orca_engine_active_seconds_total")
    assert iterations * 0.002 <= busy < active
    assert after.value("orca_iteration_seconds_sum", part="compute") == pytest.approx(busy)
    assert 0 < after.value("orca_commit_seconds_count") <= iterations

    assert after.value("orca_engine_ready", engine="engine-0") == 1
    assert after.value("orca_num_requests_waiting") == after.value("orca_queue_oldest_age_seconds") == 0
    assert after.value("orca_num_requests_running") == after.value("orca_kv_cache_usage_perc") == 0
    assert after.value("orca_slots", state="free") == 4096
    assert after.value("orca_cache_config_info", engine="engine-0") == 1
    assert after.value("orca_calls") == 0

    (rank,) = [row for row in stack.processes() if row["role"] == "rank"]
    came = asyncio.Event()
    request = asyncio.create_task(stack.tokens([7] * PROMPT, LONG, lambda _: came.set()))
    await came.wait()
    during = await scrape(stack, "endpoint", "scheduler")
    assert during.value("orca_calls", state="running") == during.value("orca_num_requests_running") == 1
    assert 0 < during.value("orca_kv_cache_usage_perc") < 1
    os.kill(rank["pid"], signal.SIGKILL)
    assert len(await request) == LONG
    roles = "endpoint", "scheduler", "supervisor"
    killed = await settled(stack, lambda s: s.value("orca_request_success_total") > REQUESTS, *roles)
    assert killed.nonzero("orca_recoveries_total", "cause") == {"gone": 1}
    assert killed.value("orca_rank_restarts_total", rank="0") == 1
    assert killed.value("orca_request_success_total") == REQUESTS + 1
    assert killed.value("orca_generation_tokens_total") == REQUESTS * TOKENS + LONG
    assert killed.value("orca_time_to_first_token_seconds_count") == REQUESTS + 1
    assert killed.value("orca_invariant_violations_total") == 0


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: Debian's package prometheus has it")
async def test_promtool_finds_nothing_wrong(stack: Running) -> None:
    assert PROMTOOL is not None
    await stack.tokens([1, 2, 3], 4)
    for row in stack.processes():
        if not row.get("status"):
            continue
        text = await asyncio.to_thread(scraped, row["status"])
        assert "orca_build_info{" in text
        said = await asyncio.to_thread(
            subprocess.run, [PROMTOOL, "check", "metrics"], input=text, text=True, capture_output=True, check=False
        )
        assert (said.returncode, said.stdout, said.stderr) == (0, "", ""), row["name"]


@pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus: Debian's package of that name has it")
async def test_a_real_prometheus_answers_every_panel_and_every_alert(stack: Running, tmp_path: Path) -> None:
    """Each query has samples while the stack works; those of failures have them once there was a failure."""
    targets = {role: status_of(stack, role) for role in ("endpoint", "scheduler", "supervisor")}
    async with prometheus(tmp_path / "prometheus", targets) as server:
        await server.until(f"count(count_over_time(orca_build_info[{RATE}]) > 2) == 3")  # rates need two scrapes
        working = asyncio.create_task(_work(stack))
        try:
            (rank,) = [row for row in stack.processes() if row["role"] == "rank"]
            os.kill(rank["pid"], signal.SIGKILL)
            await server.until(f'increase(orca_recoveries_total{{cause="gone"}}[{RATE}]) > 0')
            await server.until(f"rate(orca_refusals_total[{RATE}]) > 0")
            await server.until(f"rate(orca_request_errors_total[{RATE}]) > 0")
            await server.until(f"rate(orca_request_success_total[{RATE}]) > 0")
            for _, expressions in panels():
                for expression in expressions:  # a series that began later has its rate later
                    await server.until(expression)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        rules = [rule for group in (await server.get("rules"))["groups"] for rule in group["rules"]]
        assert {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in rules} == dict.fromkeys(
            alerts(), ("ok", "")
        )
        for expression in alerts().values():
            await server.query(expression)
        # The comparisons have samples to compare: without them no alert could ever fire.
        await server.until("max by (namespace) (orca_queue_oldest_age_seconds) >= 0")
        await server.until(f"sum by (namespace, engine) (increase(orca_recoveries_total[{RATE}])) >= 0")


async def _work(stack: Running) -> None:
    """Requests that end, that are refused, and whose clients leave: for ever, one after the other."""
    while True:
        await stack.tokens([1, 2, 3], 20)
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.stub.GenerateText(generation([], 4))
        left = stack.stub.Generate(generation([4], 500))
        await left.read()
        left.cancel()
