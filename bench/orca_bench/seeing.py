"""Measures what it costs to be seen: a stack with and without traces, scrapes, and viewers of the live page.

    python -m orca_bench.seeing traces [--rounds 20] [--model MODEL] [--otlp http://HOST:PORT]
    python -m orca_bench.seeing metrics
    python -m orca_bench.seeing viewers

The stack is that of `orca serve`. In each round every arm serves the same requests, all sent at once; every second
round takes the arms in the opposite order. CPU time is that of the stack's processes without the page's, in
milliseconds for 1,000 tokens. Ratios are to another arm in the same round, as medians and quartiles, and over all
rounds together. An arm of another stack idles while the others serve.

traces: `off` and `off, again` are two equal stacks, which differ, too. A third one has traces, and its client says
which of its requests are sampled: none, each 100th, all. Without --otlp spans go to a sink in a process of its own,
which answers and keeps nothing; it takes its time from the same cores, as a collector on the machine does.
metrics: all status ports scraped each second, or none. The observations themselves are always on.
viewers: browsers that follow the live page, in a process of their own which throws away what it reads. `no page` is a
stack without one. Before the rounds without viewers the page has come to rest.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import grpc
import uvloop

from orca_common.address import split_address
from orca_common.lanes.client import Metadata
from orca_local.settings import ServeSettings
from orca_local.stack import Stack

from .cases import Case, fixed, vocabulary_of
from .control_plane import processes
from .drive import closed_case
from .grpc_door import GrpcDoor
from .serve import complain, warm_up
from .stack import threads

QUIET = 6.0  # seconds without a viewer, after which the page follows for failures alone
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Round(NamedTuple):
    """The measures of one arm in one round."""

    tokens: int
    seconds: float
    spent: dict[str, float]  # role -> its processes' seconds of CPU time; `ui` is the page, `beside` goes on beside

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu(self) -> float:
        """Milliseconds of the stack for 1,000 tokens."""
        return sum(seconds for role, seconds in self.spent.items() if role not in BESIDE) / self.tokens * 1e6


class Served:
    """A stack that serves, and its client."""

    def __init__(self, run_dir: Path, stack: Stack, door: GrpcDoor) -> None:
        self.run_dir, self.stack, self.door = run_dir, stack, door

    async def round(self, case: Case, beside: int | None, metadata: Callable[[], Metadata]) -> Round:
        """Serves the requests. beside: the process that goes on meanwhile. metadata: makes that of each request."""
        self.door.metadata = metadata
        before, began = self._seconds_run(beside), time.perf_counter()
        answers = await closed_case(self.door, case)
        seconds, after = time.perf_counter() - began, self._seconds_run(beside)
        complain(answers)
        spent = {role: after[role] - before[role] for role in after}
        return Round(sum(answer.tokens for answer in answers), seconds, spent)

    def _seconds_run(self, beside: int | None) -> dict[str, float]:
        """CPU time so far of each role, to the microsecond."""
        found: defaultdict[str, float] = defaultdict(float)
        for role, pid in [*processes(self.run_dir), *([] if beside is None else [("beside", beside)])]:
            found[role] += sum(seconds for _, seconds in threads(pid))
        return found


BESIDE = ("ui", "beside")  # roles that are no part of the stack
Beside = Callable[[], AbstractAsyncContextManager["Helper | None"]]  # what goes on while an arm serves


class Arm(NamedTuple):
    name: str
    served: Served
    beside: Beside = nullcontext
    against: str = ""  # the arm to which it is compared; none: the first one
    sampled: int | None = None  # each request of this number is; 0: none; None: the client has no traces


@asynccontextmanager
async def serving(
    model: str | None, ui: bool = False, environment: dict[str, str] | None = None
) -> AsyncIterator[Served]:
    """A stack with these variables. Raises FailedPrecondition when the model cannot be served."""
    with tempfile.TemporaryDirectory(prefix="orca-seeing-") as folder:
        settings = ServeSettings.load(model=model, port=0, http_port=0)
        stack = Stack(settings, Path(folder), lambda step: None, environment, ui=ui)
        try:
            await stack.start()
            async with GrpcDoor(stack.grpc_addresses[0]) as door:
                await warm_up(door, 32, 8, vocabulary_of(door.vocab_size), 60)
                yield Served(Path(folder), stack, door)
        finally:
            await stack.stop()


# -- arms


async def traced(model: str | None, otlp: str | None, opened: AsyncExitStack) -> list[Arm]:
    if otlp is None:
        otlp = (await opened.enter_async_context(helper("sink"))).line
    environments: list[dict[str, str]] = [{}, {}, {"OTEL_EXPORTER_OTLP_ENDPOINT": otlp}]
    off, again, on = [await opened.enter_async_context(serving(model, environment=one)) for one in environments]
    return [
        Arm("off", off),
        Arm("off, again", again),
        Arm("on, none sampled", on, sampled=0),
        Arm("1 % sampled", on, against="on, none sampled", sampled=100),
        Arm("all sampled", on, against="on, none sampled", sampled=1),
    ]


def contexts(sampled: int | None) -> Callable[[], Metadata]:
    """Makes the trace context of one request after the other."""
    numbers = count(1)

    def context() -> Metadata:
        if sampled is None:
            return ()
        flag = sampled > 0 and next(numbers) % sampled == 0
        return (("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flag:02d}"),)

    return context


async def scraped(model: str | None, otlp: str | None, opened: AsyncExitStack) -> list[Arm]:
    served = await opened.enter_async_context(serving(model))
    rows = json.loads((served.run_dir / "processes.json").read_text())
    ports = [str(row["status"]) for row in rows if row.get("status")]
    return [Arm("not scraped", served), Arm("scraped each second", served, partial(helper, "scrape", *ports))]


async def viewed(model: str | None, otlp: str | None, opened: AsyncExitStack) -> list[Arm]:
    plain = await opened.enter_async_context(serving(model))
    served = await opened.enter_async_context(serving(model, ui=True))
    page = served.stack.ui_address
    assert page is not None, "the stack serves the page"
    some = (Arm(f"{n} viewer{'s' * (n > 1)}", served, partial(helper, "view", page, str(n))) for n in (1, 100))
    return [Arm("no page", plain), Arm("0 viewers", served, at_rest), *some]


@asynccontextmanager
async def at_rest() -> AsyncIterator[None]:
    """Waits until the page follows its schedulers for failures alone."""
    await asyncio.sleep(QUIET)
    yield


ARMS = {"traces": traced, "metrics": scraped, "viewers": viewed}


async def bench(arms: list[Arm], case: Case, rounds: int) -> None:
    """Runs all arms in turn, and prints what each did."""
    done: dict[str, list[Round]] = {arm.name: [] for arm in arms}
    for n in range(rounds + 1):
        for arm in arms if n % 2 else reversed(arms):
            async with arm.beside() as beside:
                pid = None if beside is None else beside.pid
                done[arm.name].append(await arm.served.round(case, pid, contexts(arm.sampled)))
        print(f"round {n} of {rounds}", file=sys.stderr, flush=True)
    for arm in arms:
        against = arm.against or arms[0].name
        mine, base = done[arm.name][1:], done[against][1:]  # the first round warms up
        print(
            f"{arm.name}: {statistics.median(one.rate for one in mine):,.0f} tokens/s, "
            f"{compared([one.rate for one in mine], [one.rate for one in base], whole_rate(mine) / whole_rate(base))}, "
            f"{statistics.median(one.cpu for one in mine):.2f} ms of CPU for 1,000 tokens, "
            f"{compared([one.cpu for one in mine], [one.cpu for one in base], whole_cpu(mine) / whole_cpu(base))}, "
            f"of {against}"
        )
        for role in sorted({role for one in mine for role in one.spent}):
            shares = [one.spent.get(role, 0.0) / one.seconds for one in mine]
            costs = [one.spent.get(role, 0.0) / one.tokens * 1e6 for one in mine]
            print(f"    {role}: {statistics.median(shares):.2%} of a core, {statistics.median(costs):.2f} ms")


def whole_rate(rounds: list[Round]) -> float:
    """Tokens a second over all rounds."""
    return sum(one.tokens for one in rounds) / sum(one.seconds for one in rounds)


def whole_cpu(rounds: list[Round]) -> float:
    """Milliseconds of the stack for 1,000 tokens, over all rounds."""
    return sum(one.cpu * one.tokens for one in rounds) / sum(one.tokens for one in rounds)


def compared(mine: list[float], base: list[float], whole: float) -> str:
    """The ratio to another arm: the median of the rounds, their quartiles in brackets, and that of all together."""
    low, middle, high = statistics.quantiles([one / two for one, two in zip(mine, base, strict=True)], n=4)
    return f"{middle:.4f} ({low:.4f} to {high:.4f}; in all {whole:.4f})"


# -- what goes on beside, each in a process of its own


class Helper(NamedTuple):
    """A process that goes on beside. `line`: it has printed it, and is at work."""

    line: str
    pid: int


@asynccontextmanager
async def helper(*words: str) -> AsyncIterator[Helper]:
    """Runs one of HELPERS until the end."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orca_bench.seeing", *words), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        yield Helper((await child.stdout.readline()).decode().strip(), child.pid)
    finally:
        child.terminate()
        await child.wait()


def sink() -> None:
    """Takes spans as an OTLP collector, and keeps none."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"http://127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


def scrape(*ports: str) -> None:
    """Reads /metrics of all status ports, each second."""
    print("scraping", flush=True)
    while True:
        for port in ports:
            with urllib.request.urlopen(f"http://{port}/metrics", timeout=10) as answer:
                answer.read()
        time.sleep(1.0)


def view(address: str, viewers: str) -> None:
    """Follows the live page over this number of connections, and throws away what comes."""

    async def follow() -> None:
        host, port = split_address(address)
        came = asyncio.Barrier(int(viewers) + 1)

        async def one() -> None:
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
            writer.write(f"GET /live HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            await reader.readuntil(b"\n\n")  # the whole picture has come
            await came.wait()
            while await reader.read(1 << 20):
                pass
            raise SystemExit("the page has ended")

        async with asyncio.TaskGroup() as tasks:
            for _ in range(int(viewers)):
                tasks.create_task(one())
            await came.wait()
            print("viewing", flush=True)

    uvloop.run(follow())


HELPERS = {"sink": sink, "scrape": scrape, "view": view}


async def main(given: argparse.Namespace) -> None:
    async with AsyncExitStack() as opened:
        arms = await ARMS[given.what](given.model, given.otlp, opened)
        vocabulary = vocabulary_of(arms[0].served.door.vocab_size)
        await bench(arms, fixed(given.requests, 32, given.tokens, vocabulary=vocabulary), given.rounds)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in HELPERS:
        HELPERS[sys.argv[1]](*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("what", choices=ARMS)
        parser.add_argument("--model", help="folder or hub name; the demo model if not given")
        parser.add_argument("--rounds", type=int, default=20)
        parser.add_argument("--requests", type=int, default=32)
        parser.add_argument("--tokens", type=int, default=64)
        parser.add_argument("--otlp", help="a collector, instead of a sink of the benchmark's own")
        asyncio.run(main(parser.parse_args()))  # uvloop forks, which gRPC's threads do not survive
