"""Iteration-level scheduling: no request waits for a batch to end, and none is held back by its batch-mates."""

import asyncio
from pathlib import Path

from checkpoints import make_timed
from stacks import Running, generation, running

from orca.v1 import orca_pb2 as pb
from orca_scheduler.core.core import Arrived, Commit
from orca_scheduler.master.journal import CoreStep, Line, replay, request_names, scheduled


async def collect(
    stack: Running, request: pb.GenerateRequest, log: list[tuple[str, str, int]], name: str
) -> list[pb.Token]:
    """Returns a request's tokens. Events go to a log of all requests, in the order in which the clients saw them."""
    tokens: list[pb.Token] = []
    async for response in stack.stub.Generate(request):
        if response.HasField("accepted"):
            log.append((name, "accepted", 0))
        for token in response.tokens:
            tokens.append(token)
            log.append((name, "token", token.iteration))
        if response.HasField("finished"):
            log.append((name, "finished", tokens[-1].iteration))
    return tokens


async def test_a_newcomer_joins_the_next_iteration_and_an_early_finisher_leaves(tmp_path: Path) -> None:
    model = make_timed(tmp_path / "model", seconds=0.02)
    log: list[tuple[str, str, int]] = []
    async with running(tmp_path / "run", model, max_batch_size=4) as stack:
        long = asyncio.create_task(collect(stack, generation([1, 2, 3], 60, request_id="long"), log, "long"))
        await stack.until(lambda: len(log) > 5)
        short, late = await asyncio.gather(
            collect(stack, generation([4, 5], 5, request_id="short"), log, "short"),
            collect(stack, generation([6], 20, request_id="late"), log, "late"),
        )
        tokens = await long
        await stack.until(lambda: finished(stack.journal(), "long"))
        journal = stack.journal()
    # The newcomers ran in iterations of the long one, one token in each, without a gap.
    for newcomer in (short, late):
        iterations = [token.iteration for token in newcomer]
        assert iterations == list(range(iterations[0], iterations[0] + len(iterations)))
        assert set(iterations) <= {token.iteration for token in tokens}
    # The client of the short one saw its end while its batch-mates continued.
    end = log.index(("short", "finished", short[-1].iteration))
    assert {name for name, kind, _ in log[end:] if kind == "token"} == {"long", "late"}
    # Core and lifecycle do the same again when they get the same events.
    (recorded,) = (tmp_path / "run").glob("journal-*.jsonl")
    steps = list(replay(recorded))
    assert len(steps) > 60
    assert all(step.actions == tuple(again) for step, again in steps)
    # A request that has arrived at the engine waits at most for the running iteration.
    for name in ("short", "late"):
        assert wait_of(journal, name) <= 1


def claim_of(journal: list[Line], request_id: str) -> int | None:
    """A request's claim number; None: it was not claimed yet."""
    return next((claim for claim, name in request_names(journal).items() if name == request_id), None)


def finished(journal: list[Line], request_id: str) -> bool:
    claim = claim_of(journal, request_id)
    steps = (line for line in journal if isinstance(line, CoreStep))
    commits = (action for step in steps for action in step.actions if isinstance(action, Commit))
    return any(o.claim == claim and o.finish is not None for commit in commits for o in commit.outcomes)


def wait_of(journal: list[Line], request_id: str) -> int:
    """How many iterations were scheduled after the request arrived at the core and before its first one ran."""
    claim, newest, running_then = claim_of(journal, request_id), 0, None
    for line in journal:
        if not isinstance(line, CoreStep):
            continue
        if isinstance(line.event, Arrived) and any(arrival.claim == claim for arrival in line.event.requests):
            running_then = newest
        for batch in scheduled([line]):
            newest = batch.iteration
            if any(member.claim == claim for member in batch.members):
                assert running_then is not None
                return newest - running_then
    raise AssertionError(f"{request_id} never ran")
