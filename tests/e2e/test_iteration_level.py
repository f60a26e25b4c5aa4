"""Iteration-level scheduling: no request waits for a batch to end, and none is held back by its batch-mates."""

import asyncio
from pathlib import Path
from typing import Any

from checkpoints import make_timed
from stacks import Running, generation, running

from orca.v1 import orca_pb2 as pb
from orca_scheduler.journal import replay


async def collect(
    stack: Running, request: pb.GenerateRequest, log: list[tuple[str, str, int]], name: str
) -> list[pb.Token]:
    """Returns a request's tokens. Events go to a log of all requests, in the order in which the clients saw them."""
    tokens: list[pb.Token] = []
    async for response in stack.stub.Generate(request):
        match response.WhichOneof("event"):
            case "token":
                tokens.append(response.token)
                log.append((name, "token", response.token.iteration))
            case "finished":
                log.append((name, "finished", tokens[-1].iteration))
            case "accepted":
                log.append((name, "accepted", 0))
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
    # The core does the same again when it gets the same events.
    (recorded,) = (tmp_path / "run").glob("journal-*.jsonl")
    steps = list(replay(recorded))
    assert len(steps) > 60
    assert all(step.actions == again for step, again in steps)
    # A request that has arrived at the engine waits at most for the running iteration.
    for name in ("short", "late"):
        assert wait_of(journal, name) <= 1


def claims(journal: list[dict[str, Any]]) -> dict[str, int]:
    """Claim numbers by request id."""
    return {r: int(c) for line in journal for c, r in line.get("note", {}).get("claims", {}).items()}


def finished(journal: list[dict[str, Any]], request_id: str) -> bool:
    claim = claims(journal).get(request_id)
    outcomes = [o for line in journal for a in line.get("actions", ()) if a[0] == "Commit" for o in a[2]]
    return any(o[0] == claim and o[3] is not None for o in outcomes)


def wait_of(journal: list[dict[str, Any]], request_id: str) -> int:
    """How many iterations were scheduled after the request arrived at the core and before its first one ran."""
    claim, newest, running_then = claims(journal)[request_id], 0, None
    for line in journal:
        if "event" not in line:
            continue
        if line["event"][0] == "Arrived" and any(r[0] == claim for r in line["event"][2]):
            running_then = newest
        for action in line["actions"]:
            if action[0] == "ScheduleBatch":
                newest = action[1]
                if any(member[0] == claim for member in action[2]):
                    assert running_then is not None
                    return newest - running_then
    raise AssertionError(f"{request_id} never ran")
