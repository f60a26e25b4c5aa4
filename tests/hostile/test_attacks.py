"""Each attack for a few seconds from one host, while another host calls: what the other one must not notice.

Times are no part of it; `run.py` prints them. All attacks meet the same endpoint process, one after the other.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from endpoint.harness import make_model, until
from hostile.attacks import ATTACKS
from hostile.stage import Endpoint, Log, Outcome, attacked, endpoint, engine, hostile
from servers import redis_server

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub

SECONDS = 1.5  # of each attack
DEADLINE = 10.0  # seconds of an honest call
BOUND = 256 + 128  # MB by docs/security.md: bodies, and the first windows of one host's calls
GROWTH = BOUND + 200  # MB that an endpoint may have more than before
DEAD = "was declared dead"  # in the log's lines of an endpoint that came back too late

SEEN = Counter[str]()  # events of all attacks so far
CONNECTIONS = "refusing: gRPC connections"
# What the log says when the door refuses calls that are half there: which limit is met first differs from run to run.
HALF = ("refusing: calls of a host", "refusing: messages that are slow while others wait")
REFUSED = ("half-model", "half-cancel", "half-health", "half-generate", "nearly")  # others end before they fill a limit
# What C-core alone cannot hold; test_proxy.py shows that it holds behind a proxy. C-core bounds neither the connections
# of one host nor its calls that no method has taken yet: beyond `max_calls` of those it drops any host's, CANCELLED.
CROWDED = (*REFUSED, "no-message", "resets")
BEHIND_PROXY = ("idle",)

# Long: `make hostile` runs them alone, for an attack takes both cores.
pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Endpoint]:
    """An endpoint process with default settings, and an engine that answers all its requests."""
    model = make_model(Path(tmp_path_factory.mktemp("checkpoint")) / "tiny")
    with redis_server() as redis:
        async with (
            engine(redis.url, "hostile"),
            endpoint({"redis_url": redis.url, "pool": "hostile", "model": model}) as one,
        ):
            yield one


def check(outcome: Outcome, but: str = "nothing") -> None:
    """Asserts that honest clients and the endpoint have noticed nothing. but: what a call may fail with."""
    assert outcome.answers.total() > outcome.failed.total()
    assert all(but in answer for answer in outcome.failed), outcome.failed
    assert set(outcome.ready) == {"200"}, outcome.ready
    assert outcome.peak - outcome.before < GROWTH
    assert not outcome.log.plain, outcome.log.plain[:5]
    assert not [event for event in outcome.log.events if DEAD in event]
    events = outcome.log.events
    begun = {event: count for event, count in events.items() if event.startswith("refusing")}
    # An attack whose connections end and begin again may leave a state and enter it again: a line for each time.
    assert all(count <= events[f"no longer {event}"] + 1 for event, count in begun.items()), events


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in BEHIND_PROXY])
async def test_another_host_is_served(started: Endpoint, name: str) -> None:
    """The endpoint stays ready and small, and its log stays JSON, with one line for each state in which it refuses."""
    outcome = await attacked(started, name, SECONDS, deadline=DEADLINE, after=0)
    check(outcome, "CANCELLED" if name in CROWDED else "nothing")
    SEEN.update(outcome.log.events)
    if name in REFUSED:  # a state may go on from an attack before: its line stands there, and its end perhaps here
        ends = [f"no longer {state}" for state in HALF]
        goes_on = any(SEEN[state] > SEEN[end] for state, end in zip(HALF, ends, strict=True))
        assert goes_on or {*HALF, *ends} & outcome.log.events.keys(), outcome.log.events


async def test_one_host_takes_all_connections_without_a_proxy(started: Endpoint) -> None:
    """C-core refuses others then, and the door's log says so. When the host is gone, others are served again."""
    started.log, address = Log(), started.addresses["grpc"]
    attacking = asyncio.create_task(hostile("idle", address, 3.0))
    await until(lambda: CONNECTIONS in started.log.events)
    async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await OrcaStub(channel).GetModel(pb.GetModelRequest(), timeout=DEADLINE)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await attacking
    check(await attacked(started, "nobody", 0.5, deadline=DEADLINE, after=0))
