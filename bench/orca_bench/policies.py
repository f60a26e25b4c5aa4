"""Each policy under five loads, so that an operator can choose: what a reader waits, and what the machine does for it.

    python -m orca_bench.policies --model FOLDER [--policies paper balanced ..] [--loads paper chat ..] [--rounds 3]
    python -m orca_bench.policies --report LINES PICTURE > TABLE
    python -m orca_bench.policies --ratios LINES > TABLE

A stack of this machine for each policy, one after the other, and in every other round backwards; its loads come in
turn. A line of JSON for each load, with the iterations and the positions that were computed for it. The report has
medians of the rounds, as Markdown and SVG. The ratios are to the first policy, of numbers of the same round: their
median, and the lowest and the highest.

Two more loads are for such ratios: `saturated`, the requests of `long` all at once, whose tokens a second are what the
machine can do; and `fresh`, one request after the other of text that does not repeat itself.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from orca.v1 import orca_pb2 as pb
from orca_lab.chart import Bars, Panel, draw
from orca_lab.workload import Lengths, token_ids
from orca_local.settings import ServeSettings
from orca_local.stack import Stack
from orca_scheduler.master.journal import read, scheduled

from .cases import Request, fixed, vocabulary_of
from .drive import closed_case, open_loop
from .grpc_door import GrpcDoor
from .load import Planned, load_of
from .machine import isa
from .measures import Answer, summary
from .serve import warm_up

POLICIES = (
    "paper",
    "stall-free,positions=128",
    "balanced,positions=128",
    "balanced,positions=128,prefix=tenant",
    "balanced,positions=128,prefix=tenant,drafts=ngram",
)
SYSTEM, USER, ANSWER, TURNS = 96, 40, 40, 4  # tokens of a conversation's parts, and how many turns it has
CONVERSATIONS, IN_TURN = 12, 8  # of `chat`, and requests of `copies` and `fresh`
PAPER, LONG = Lengths.read("32-512,1-128"), Lengths.read("16-1400,8-200")


async def paper(door: GrpcDoor, seed: int) -> tuple[list[Answer], list[Answer]]:
    """The paper's lengths: prompts of 32 to 512 tokens, answers of 1 to 128."""
    return await drawn(door, seed, 1.2, 40, PAPER)


async def long(door: GrpcDoor, seed: int) -> tuple[list[Answer], list[Answer]]:
    """Long prompts beside short ones."""
    return await drawn(door, seed, 1.0, 60, LONG)


async def chat(door: GrpcDoor, seed: int) -> tuple[list[Answer], list[Answer]]:
    """Twelve conversations of four turns with one system prompt. A turn comes 0.2 s after the answer before it."""
    draw, vocabulary, clock = random.Random(seed), vocabulary_of(door.vocab_size), asyncio.get_running_loop().time
    system, began = token_ids(draw, SYSTEM, vocabulary), clock()

    async def conversation(at: float, users: Sequence[list[int]]) -> list[Answer]:
        answers, text = list[Answer](), system
        await asyncio.sleep(at)
        for user in users:
            text = [*text, *user]
            now = clock() - began
            answer = Answer(Request(text, ANSWER), now, now)
            await door.ask(answer, lambda: clock() - began)
            answers.append(answer)
            text = [*text, *answer.made]
            await asyncio.sleep(0.2)
        return answers

    each = [[token_ids(draw, USER, vocabulary) for _ in range(TURNS)] for _ in range(CONVERSATIONS)]
    starts = itertools.accumulate(draw.expovariate(0.7) for _ in each)
    answers = await asyncio.gather(*map(conversation, starts, each))
    told = list(itertools.chain(*answers))
    return told, told


async def batch(door: GrpcDoor, seed: int) -> tuple[list[Answer], list[Answer]]:
    """Sixteen requests of a batch job at once, and chats beside them: numbers are those of the chats."""
    vocabulary = vocabulary_of(door.vocab_size)
    job = [Planned(0.0, one) for one in fixed(16, 256, 96, seed, vocabulary)]
    chats = [
        Planned(0.5 + one.at, one.request) for one in load_of(1.0, 24, seed, Lengths.read("32-96,16-48"), vocabulary)
    ]
    answers = await open_loop(door, [*job, *chats])
    return answers[len(job) :], answers


async def copies(door: GrpcDoor, seed: int) -> tuple[list[Answer], list[Answer]]:
    """One request at a time whose prompt repeats itself, so that a model's answer tends to do so, too."""
    draw, vocabulary = random.Random(seed), vocabulary_of(door.vocab_size)
    return await in_turn(door, [Request(token_ids(draw, 48, vocabulary) * 4, 100) for _ in range(IN_TURN)])


async def saturated(door: GrpcDoor, seed: int) -> tuple[list[Answer], list[Answer]]:
    """The requests of `long`, all at once."""
    load = load_of(1.0, 60, seed, LONG, vocabulary_of(door.vocab_size))
    answers = await closed_case(door, [planned.request for planned in load])
    return answers, answers


async def fresh(door: GrpcDoor, seed: int) -> tuple[list[Answer], list[Answer]]:
    """One request at a time, drawn at a temperature of 1: random weights then make text that does not repeat itself."""
    door.sampling = pb.Sampling(temperature=1.0, seed=seed)
    try:
        return await in_turn(door, fixed(IN_TURN, 64, 100, seed, vocabulary_of(door.vocab_size)))
    finally:
        door.sampling = None


async def in_turn(door: GrpcDoor, requests: Sequence[Request]) -> tuple[list[Answer], list[Answer]]:
    """Sends one request at a time. The answers stand one behind the other on one clock."""
    answers, began = list[Answer](), 0.0
    for request in requests:
        (answer,) = await closed_case(door, [request])
        answer.due, answer.sent, answer.ended = (began + moment for moment in (answer.due, answer.sent, answer.ended))
        answer.came, began = [began + moment for moment in answer.came], answer.ended
        answers.append(answer)
    return answers, answers


async def drawn(
    door: GrpcDoor, seed: int, rate: float, count: int, lengths: Lengths
) -> tuple[list[Answer], list[Answer]]:
    load = load_of(rate, count, seed, lengths, vocabulary_of(door.vocab_size))
    answers = await open_loop(door, load)
    return answers, answers


Load = Callable[[GrpcDoor, int], Awaitable[tuple[list[Answer], list[Answer]]]]  # those that are told, and all
LOADS: dict[str, Load] = {"paper": paper, "long": long, "chat": chat, "batch": batch, "copies": copies}
FIVE = list(LOADS)
LOADS |= {"saturated": saturated, "fresh": fresh}


def work(run_dir: Path) -> tuple[int, int]:
    """The iterations of a run, and the positions that they computed."""
    lines = itertools.chain.from_iterable(map(read, sorted(run_dir.glob("journal-*.jsonl"))))
    sizes = [one.positions for one in scheduled(lines)]
    return len(sizes), sum(sizes)


async def measured(policy: str, loads: Sequence[str], seed: int, **settings: Any) -> AsyncIterator[dict[str, Any]]:
    """The lines of one policy on a fresh stack with these settings of `orca serve`."""
    with tempfile.TemporaryDirectory(prefix="orca-policies-") as folder:
        served = ServeSettings.load(policy=policy, port=0, http_port=0, dtype="bfloat16", max_batch_size=32, **settings)
        stack = Stack(served, Path(folder), lambda line: None)
        try:
            await stack.start()
            async with GrpcDoor(stack.grpc_addresses[0]) as door:
                await warm_up(door, 64, 8, vocabulary_of(door.vocab_size), 60.0)
                for name in loads:
                    before = work(Path(folder))
                    told, everyone = await LOADS[name](door, seed)
                    iterations, positions = (
                        after - then for after, then in zip(work(Path(folder)), before, strict=True)
                    )
                    rates = {key: value for key, value in summary(everyone).items() if key.endswith("_per_s")}
                    about = {"policy": policy, "load": name, "seed": seed}
                    yield {**about, **summary(told), **rates, "iterations": iterations, "positions": positions}
        finally:
            await stack.stop()


COLUMNS = {  # of the report: a number of the lines, and its name
    "gap_ms_p50": "gap p50, ms",
    "gap_ms_p99": "gap p99, ms",
    "first_token_ms_p50": "first token p50, ms",
    "first_token_ms_p99": "first token p99, ms",
    "output_tokens_per_s": "tokens/s",
    "iterations": "iterations",
    "positions": "positions",
}
PANELS = ("gap_ms_p99", "first_token_ms_p50", "output_tokens_per_s")


def report(lines: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """A table of medians, and a picture with the lowest and the highest of the rounds."""
    policies, loads = (list(dict.fromkeys(line[key] for line in lines)) for key in ("policy", "load"))

    def values(policy: str, load: str, column: str) -> list[float]:
        return sorted(line[column] for line in lines if (line["policy"], line["load"]) == (policy, load))

    rows = ["| load | policy | " + " | ".join(COLUMNS.values()) + " |", "| --- | --- |" + " --- |" * len(COLUMNS)]
    for load, policy in itertools.product(loads, policies):
        medians = (statistics.median(values(policy, load, column)) for column in COLUMNS)
        rows.append(f"| {load} | `{policy}` | " + " | ".join(f"{one:,.0f}" for one in medians) + " |")
    panels = list[Panel]()
    for column in PANELS:
        bars = list[Bars]()
        for policy in policies:
            found = [values(policy, load, column) for load in loads]
            bars.append(Bars(policy, [(statistics.median(one), one[0], one[-1]) for one in found]))
        panels.append(Panel(COLUMNS[column], "load", COLUMNS[column], bars=bars, groups=loads))
    return "\n".join(rows), draw("Policies under five loads", panels)


def ratios(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table of what each policy's numbers are times the first one's."""
    first, *others = dict.fromkeys(line["policy"] for line in lines)
    of = {(line["policy"], line["load"], line["seed"]): line for line in lines}
    rows = ["| load | policy | " + " | ".join(COLUMNS.values()) + " |", "| --- | --- |" + " --- |" * len(COLUMNS)]
    for load, policy in itertools.product(dict.fromkeys(line["load"] for line in lines), others):
        rounds = [seed for name, at, seed in of if (name, at) == (policy, load) and (first, load, seed) in of]
        cells = list[str]()
        for column in COLUMNS if rounds else ():
            found = [of[policy, load, seed][column] / of[first, load, seed][column] for seed in rounds]
            cells.append(f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
        rows += [f"| {load} | `{policy}` | " + " | ".join(cells) + " |"] if rounds else []
    return "\n".join(rows)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--report", nargs=2, type=Path, metavar=("LINES", "PICTURE"))
    parser.add_argument("--ratios", type=Path, metavar="LINES")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=FIVE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=20_000)
    given = parser.parse_args()
    if given.report:
        lines, picture = given.report
        table, svg = report([json.loads(line) for line in lines.read_text().splitlines()])
        picture.write_text(svg)
        print(table)
        return
    if given.ratios:
        print(ratios([json.loads(line) for line in given.ratios.read_text().splitlines()]))
        return
    for seed in range(1, given.rounds + 1):
        for policy in given.policies if seed % 2 else reversed(given.policies):
            async for line in measured(policy, given.loads, seed, model=given.model, slots=given.slots):
                print(json.dumps({**line, "isa": isa()}), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
