"""Each alert of helm/files/alerts.yaml fires by its real cause on a real stack, and clears when the cause is gone.

The rules are 60 times as quick here (`metrics.hurried`): a real Prometheus scrapes a real stack for a minute or two. No
cause is known of OrcaInvariantViolated, and OrcaRolloutStopped needs Kubernetes. promtool tests these two, and the
limits of all others, with the rules as they are (alerts_test.yaml).
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from checkpoints import make_timed
from metrics import ALERTS, PROMETHEUS, PROMTOOL, Prometheus, alerts, hurried, prometheus
from stacks import Running, generation, running

HERE = Path(__file__).parent
SECONDS = 0.03  # of an iteration at each stage: a request that has all slots takes a minute
SLOTS = 2048
POISON = 13  # a rank that reads this token ends
VOCABULARY = 1 << 24  # as large as may be, so that the model does not make it up
FIRED, CLEARED = 200.0, 120.0  # seconds, where 35 and 20 are enough on a quiet machine


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: Debian's package prometheus has it")
def test_promtool_tests_the_rules_as_they_are(tmp_path: Path) -> None:
    """Each alert fires above its limit, for long enough, and not below."""
    assert PROMTOOL is not None
    tests = yaml.safe_load((HERE / "alerts_test.yaml").read_text())
    tests["rule_files"] = [str(ALERTS)]
    tested = {at["alertname"] for test in tests["tests"] for at in test["alert_rule_test"] if at.get("exp_alerts")}
    assert tested == alerts().keys()
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    command = [PROMTOOL, "test", "rules", str(tmp_path / "tests.yaml")]
    said = subprocess.run(command, text=True, capture_output=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr


@dataclass(frozen=True)
class Fired:
    """The alerts that a cause is to have fire."""

    server: Prometheus
    alerts: set[str]

    async def wait(self) -> None:
        await asyncio.gather(*(self.server.fires(alert, FIRED) for alert in self.alerts))


@contextlib.asynccontextmanager
async def alone(stack: Running) -> AsyncIterator[None]:
    """One request has all slots, so it runs alone, as long as the block runs."""
    call = stack.stub.Generate(generation([1], SLOTS - 1, ignore_eos=True))
    try:
        await first_token(call)
        yield
    finally:
        call.cancel()


async def first_token(call: Any) -> None:
    async for message in call:
        if message.tokens:
            return


async def refusals(stack: Running) -> None:
    """Calls for which the queue has no place, one after the other."""
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stack.stub.GenerateText(generation([2], 4))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await asyncio.sleep(0.2)


async def losses(stack: Running) -> None:
    """Requests that take ranks down, one after the other: the third loss ends each of them with an error."""
    while True:
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.stub.GenerateText(generation([POISON], 4))


@contextlib.asynccontextmanager
async def going_on(trouble: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Goes on with trouble while the block runs."""
    task = asyncio.create_task(trouble)
    try:
        yield
        if task.done():
            await task  # raises its error
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


Cause = Callable[[Running, Fired], Coroutine[Any, Any, None]]


async def a_full_engine(stack: Running, fired: Fired) -> None:
    """The queue gets old, and calls that come then are refused."""
    async with alone(stack):
        waits: asyncio.Task[list[int]] = asyncio.create_task(stack.tokens([3], 4))
        await fired.server.until("max(orca_num_requests_waiting) == 1")
        async with going_on(refusals(stack)):
            await fired.wait()
    assert len(await waits) == 4


async def ranks_that_end(stack: Running, fired: Fired) -> None:
    """An engine is lost again and again, and requests end with it."""
    async with going_on(losses(stack)):
        await fired.wait()


async def pods_that_stand_still(stack: Running, fired: Fired) -> None:
    """A rank has ended, and nothing starts another one."""
    supervisors, ranks = ([r["pid"] for r in stack.processes() if r["role"] == role] for role in ("supervisor", "rank"))
    for supervisor in supervisors:
        os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(ranks[0], signal.SIGKILL)
        await fired.wait()
    finally:
        for supervisor in supervisors:
            os.kill(supervisor, signal.SIGCONT)


def stand_still(*roles: str) -> Cause:
    """Processes of these roles that answer no request, also none of Prometheus."""

    async def cause(stack: Running, fired: Fired) -> None:
        pids = [row["pid"] for row in stack.processes() if row["role"] in roles]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await fired.wait()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    return cause


async def a_stage_that_waits(stack: Running, fired: Fired) -> None:
    """One request is at one of two stages at a time."""
    async with alone(stack):
        await fired.wait()


CAUSES: dict[int, list[tuple[Cause, set[str]]]] = {  # by the number of stages; what each of them has fire
    1: [
        (a_full_engine, {"OrcaQueueOld", "OrcaRefusals"}),
        (ranks_that_end, {"OrcaRecoveries", "OrcaErrorBudget", "OrcaErrorBudgetSlow"}),
        (pods_that_stand_still, {"OrcaEngineAway"}),
        (stand_still("scheduler"), {"OrcaNoScheduler"}),
        (stand_still("endpoint"), {"OrcaNoEndpoint"}),
        (stand_still("endpoint", "scheduler"), {"OrcaGone"}),
    ],
    2: [(a_stage_that_waits, {"OrcaBubbles"})],
}
BY_TEST_OF_RULES = {"OrcaInvariantViolated", "OrcaRolloutStopped"}


def test_every_alert_has_its_cause() -> None:
    caused = [alert for causes in CAUSES.values() for _, found in causes for alert in found]
    assert sorted([*caused, *BY_TEST_OF_RULES]) == sorted(alerts())


@pytest.mark.long
@pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus: Debian's package of that name has it")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", CAUSES)
async def test_each_alert_fires_and_clears(stages: int, tmp_path: Path) -> None:
    rules = tmp_path / "alerts.yaml"
    rules.write_text(hurried(ALERTS.read_text()))
    model = make_timed(tmp_path / "model", vocab=VOCABULARY, seconds=SECONDS, abort_on_token=POISON)
    # By the paper's memory one request reserves all slots, so that the next one waits.
    settings = {"pp": stages, "slots": SLOTS, "max_waiting": 1, "policy": "paper"}
    async with running(tmp_path / "run", model, broken=True, **settings) as stack:
        rows = [row for row in stack.processes() if row["role"] in ("endpoint", "scheduler")]
        targets = {row["role"]: row["status"] for row in rows}
        async with prometheus(tmp_path / "prometheus", targets, rules) as server:
            await server.until("count(count_over_time(orca_build_info[1m]) > 2) == 2")  # rates need two scrapes
            assert not await server.query("ALERTS"), "all is well, and an alert knows otherwise"
            for cause, found in CAUSES[stages]:
                await cause(stack, Fired(server, found))
                await asyncio.gather(*(server.clears(alert, CLEARED) for alert in found))
            assert len(await stack.tokens([1], 4)) == 4
            # Where it can be compared with its limit, a counter of violations is there for the last one too.
            await server.until("sum by (namespace, engine) (increase(orca_invariant_violations_total[1m])) == 0")
