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


async def newcomers(stack: Running, long: list[int], late: list[int], short: list[int], endless: int) -> None:
    """Requests of these names and prompts: the last two join the first. "short" has five tokens, the others more than
    the test waits for; their clients leave. Returns when the journal has the end of "short"."""
    log: list[tuple[str, str, int]] = []

    def begun(name: str, prompt: list[int], tokens: int) -> asyncio.Task[list[pb.Token]]:
        return asyncio.create_task(collect(stack, generation(prompt, tokens, request_id=name), log, name))

    def seen(name: str, since: int = 0) -> list[int]:
        return [iteration for who, kind, iteration in log[since:] if (who, kind) == (name, "token")]

    mates = [begun("long", long, endless)]
    await stack.until(lambda: len(seen("long")) > 4)
    mates.append(begun("late", late, endless))
    await begun("short", short, 5)
    # Its client saw its end while its batch-mates continued.
    end = len(log)
    await stack.until(lambda: bool(seen("long", end) and seen("late", end)))
    # The newcomers ran in iterations of the long one, one token in each, without a gap.
    await stack.until(lambda: len(seen("late")) > 4)
    joined = [seen("short"), seen("late")]
    await stack.until(lambda: seen("long")[-1] >= max(joined[0][-1], joined[1][-1]))
    for iterations in joined:
        assert iterations == list(range(iterations[0], iterations[0] + len(iterations)))
        assert set(iterations) <= set(seen("long"))
    assert not any(mate.done() for mate in mates)
    for mate in mates:
        mate.cancel()
    await asyncio.wait(mates)
    await stack.until(lambda: finished(stack.journal(), "short"))


async def test_a_newcomer_joins_the_next_iteration_and_an_early_finisher_leaves(tmp_path: Path) -> None:
    model = make_timed(tmp_path / "model", seconds=0.02, positions=4096)
    async with running(tmp_path / "run", model, max_batch_size=4, slots=1 << 14) as stack:
        await newcomers(stack, [1, 2, 3], [6], [4, 5], 4000)
        journal = stack.journal()
    # Core and lifecycle do the same again when they get the same events.
    (recorded,) = (tmp_path / "run").glob("journal-*.jsonl")
    steps = list(replay(recorded))
    assert len(steps) > 10
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
