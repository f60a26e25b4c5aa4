"""Measures what it costs to be seen: a stack with and without traces, scrapes, and viewers of the live page.

    python -m orca_bench.seeing traces [--rounds 20] [--model MODEL] [--otlp http://HOST:PORT]
    python -m orca_bench.seeing metrics
    python -m orca_bench.seeing viewers

The stack is that of `orca serve`. In each round every arm serves the same requests, all sent at once; every second
round takes the arms in the opposite order. CPU time is that of the stack's processes without the page's, in
milliseconds for 1,000 tokens. Ratios are to the first arm of the same round. Traces are decided by the environment, so
each of those arms has a stack: it idles while the others serve. `off, again` says how much two equal stacks differ.

traces: `off`, 1 % of the requests, and all of them. Without --otlp spans go to a sink in a process of its own, which
answers and keeps nothing; it takes its time from the same cores, as a collector on the machine does.
metrics: all status ports scraped each second, or none. The observations themselves are always on.
viewers: browsers that follow the live page, in a process of their own which throws away what it reads.
"""

import argparse
import asyncio
import json
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
from pathlib import Path
from typing import NamedTuple

import grpc
import uvloop

from orca_common.address import split_address
from orca_local.settings import ServeSettings
from orca_local.stack import Stack

from .cases import Case, fixed, vocabulary_of
from .control_plane import processes
from .drive import closed_case
from .grpc_door import GrpcDoor
from .serve import complain, warm_up
from .stack import threads

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Round(NamedTuple):
    """The measures of one arm in one round."""

    rate: float  # tokens/s
    cpu: float  # ms of the stack for 1,000 tokens
    page: float  # the same of the live page


class Served:
    """A stack that serves, and its client."""

    def __init__(self, run_dir: Path, stack: Stack, door: GrpcDoor) -> None:
        self.run_dir, self.stack, self.door = run_dir, stack, door

    async def round(self, case: Case) -> Round:
        before, began = self._seconds_run(), time.perf_counter()
        answers = await closed_case(self.door, case)
        seconds, after = time.perf_counter() - began, self._seconds_run()
        complain(answers)
        tokens = sum(answer.tokens for answer in answers)
        spent = {role: (after[role] - before[role]) / tokens * 1e6 for role in after}
        page = spent.pop("ui", 0.0)
        return Round(tokens / seconds, sum(spent.values()), page)

    def _seconds_run(self) -> dict[str, float]:
        """CPU time so far of each role, to the microsecond."""
        found: defaultdict[str, float] = defaultdict(float)
        for role, pid in processes(self.run_dir):
            found[role] += sum(seconds for _, seconds in threads(pid))
        return found


Beside = Callable[[], AbstractAsyncContextManager[object]]  # what goes on while an arm serves


class Arm(NamedTuple):
    name: str
    served: Served
    beside: Beside = nullcontext


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
        otlp = await opened.enter_async_context(helper("sink"))
    full = {"OTEL_EXPORTER_OTLP_ENDPOINT": otlp}
    of_arm = {"off": {}, "off, again": {}, "1 %": full | {"ORCA_TRACE_SHARE": "0.01"}, "full": full}
    return [Arm(name, await opened.enter_async_context(serving(model, environment=e))) for name, e in of_arm.items()]


async def scraped(model: str | None, otlp: str | None, opened: AsyncExitStack) -> list[Arm]:
    served = await opened.enter_async_context(serving(model))
    rows = json.loads((served.run_dir / "processes.json").read_text())
    ports = [str(row["status"]) for row in rows if row.get("status")]
    return [Arm("not scraped", served), Arm("scraped each second", served, partial(helper, "scrape", *ports))]


async def viewed(model: str | None, otlp: str | None, opened: AsyncExitStack) -> list[Arm]:
    served = await opened.enter_async_context(serving(model, ui=True))
    page = served.stack.ui_address
    assert page is not None, "the stack serves the page"
    some = (Arm(f"{n} viewer{'s' * (n > 1)}", served, partial(helper, "view", page, str(n))) for n in (1, 100))
    return [Arm("0 viewers", served), *some]


ARMS = {"traces": traced, "metrics": scraped, "viewers": viewed}


async def bench(arms: list[Arm], case: Case, rounds: int) -> None:
    """Runs all arms in turn, and prints what each did."""
    done: dict[str, list[Round]] = {arm.name: [] for arm in arms}
    for n in range(rounds + 1):
        for arm in arms if n % 2 else reversed(arms):
            async with arm.beside():
                done[arm.name].append(await arm.served.round(case))
        print(f"round {n} of {rounds}", file=sys.stderr, flush=True)
    base = done[arms[0].name][1:]  # the first round warms up
    for arm in arms:
        mine = done[arm.name][1:]
        rates, cpus = [one.rate for one in mine], [one.cpu for one in mine]
        print(
            f"{arm.name}: {statistics.median(rates):,.0f} tokens/s ({min(rates):,.0f} to {max(rates):,.0f}), "
            f"{ratios([one.rate / two.rate for one, two in zip(mine, base, strict=True)])} of the first; "
            f"{statistics.median(cpus):.2f} ms of CPU for 1,000 tokens, "
            f"{ratios([one.cpu / two.cpu for one, two in zip(mine, base, strict=True)])} of the first; "
            f"the page took {statistics.median(one.page * one.rate / 1e6 for one in mine):.2%} of a core"
        )


def ratios(found: list[float]) -> str:
    """The median and, in brackets, the quartiles."""
    low, middle, high = statistics.quantiles(found, n=4)
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


# -- what goes on beside, each in a process of its own


@asynccontextmanager
async def helper(*words: str) -> AsyncIterator[str]:
    """Runs one of HELPERS until the end. Gives the line that it prints when it is at work."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orca_bench.seeing", *words), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        yield (await child.stdout.readline()).decode().strip()
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
