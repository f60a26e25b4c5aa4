"""An endpoint process under attack from one host while honest clients of another call it.

`run.py` prints a table of it; the tests assert what must hold.
"""

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import psutil
from endpoint.harness import Engine, generation
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub
from orca.v1.pool_pb2 import PoolRequest
from orca_common.errors import Unavailable
from orca_pool.pool import Pool
from orca_pool.records import CommitRow, Reason
from orca_pool.wire import TOKEN

ATTACKS = Path(__file__).with_name("attacks.py")
HOSTILE = "127.0.0.2"  # the attacker's address; honest clients have 127.0.0.1
MB = 1 << 20
TOKENS = 3  # of an honest call of Generate
FRESH = 4  # honest calls on a connection before the next one; a standing connection serves every other round
SEEN = 0.1  # seconds between looks at the endpoint's memory and readiness
AFTER = 5.0  # seconds after the attack until memory is looked at again


class Player(Engine):
    """Plays an engine that answers many requests at a time, for as long as the attack lasts."""

    async def play(self) -> None:
        """Answers each request with as many tokens as it wants, for ever."""
        cursor: bytes | None = None
        while True:
            with suppress(Unavailable):
                claimed = await self._pool.claim(
                    self._name, self._owner, self._term, self._have, count=64, slots=self._slots, total=self._slots
                )
                assert claimed is not None
                self._have = max(self._have, claimed.last_claim)
                if not claimed.requests:
                    cursor, _ = await self._pool.hints(self._name, cursor, wait=0.5)
                    continue
                self.iteration += 1
                rows = []
                for request in claimed.requests:
                    count = PoolRequest.FromString(request.record).max_new_tokens
                    tokens = b"".join(TOKEN.pack(7, 0.0, self.iteration) for _ in range(count))
                    rows.append(CommitRow(request.request_id, request.claim, 0, tokens, Reason.LENGTH, b"", b""))
                await self._pool.commit(self._name, self._owner, self._term, rows)


@dataclass
class Log:
    """What an endpoint wrote to standard error."""

    events: Counter[str] = field(default_factory=Counter)
    """Lines of JSON by their event: of the level WARNING and above, and of limits that no longer refuse."""
    plain: list[str] = field(default_factory=list)
    """Lines that are no JSON."""

    def take(self, line: str) -> None:
        """Counts a line."""
        try:
            said = json.loads(line)
            if said["level"] != "INFO" or said["event"].startswith("no longer refusing"):
                self.events[said["event"]] += 1
        except (ValueError, TypeError, KeyError):  # Python's own or C-core's, not of our logging
            self.plain.append(line.rstrip())


class Endpoint:
    """One endpoint process."""

    def __init__(self, child: Process, addresses: dict[str, str]) -> None:
        self.addresses = addresses
        self._process = psutil.Process(child.pid)
        self.log = Log()

    @property
    def resident(self) -> float:
        """MB of memory that the process has now."""
        return self._process.memory_info().rss / MB

    @property
    def cpu(self) -> float:
        """Seconds of processor time that the process has used."""
        return sum(self._process.cpu_times()[:2])

    def forget_peak(self) -> None:
        """Begins to measure the peak anew."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    @property
    def peak(self) -> float:
        """MB of memory that the process had at most since `forget_peak`."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024


@asynccontextmanager
async def endpoint(settings: Mapping[str, object]) -> AsyncIterator[Endpoint]:
    """A process with default settings beside these, once it is ready."""
    environment = {f"ORCA_{name.upper()}": str(value) for name, value in settings.items()}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orca_endpoint"),
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        addresses = json.loads(await asyncio.wait_for(child.stdout.readline(), 60))
        started = Endpoint(child, addresses)
        listening = asyncio.create_task(listen(child.stderr, started))
        async with httpx.AsyncClient() as client, asyncio.timeout(60):
            while (await client.get(f"http://{addresses['status']}/readyz")).status_code != 200:
                await asyncio.sleep(0.05)
        yield started
        child.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), 60)
            await listening
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def listen(stream: asyncio.StreamReader, started: Endpoint) -> None:
    """Reads an endpoint's log until its process has ended."""
    while line := await stream.readline():
        started.log.take(line.decode())


@dataclass
class Outcome:
    """What became of the honest calls, and of the endpoint, while an attack ran."""

    attack: str
    answers: Counter[str] = field(default_factory=Counter)
    """Honest calls by method and status."""
    seconds: list[float] = field(default_factory=list)
    """How long each honest call took."""
    ready: Counter[str] = field(default_factory=Counter)
    """What /readyz said."""
    before: float = 0.0
    peak: float = 0.0
    after: float = 0.0
    """MB of the endpoint."""
    endpoint_cpu: float = 0.0
    log: Log = field(default_factory=Log)
    hostile: dict[str, Any] = field(default_factory=dict)
    """The line that the attack printed."""

    @property
    def failed(self) -> Counter[str]:
        """Honest calls that did not end with OK."""
        return Counter({name: count for name, count in self.answers.items() if not name.endswith(" OK")})

    def quantile(self, part: float) -> float:
        """Milliseconds within which this part of the honest calls ended."""
        ordered = sorted(self.seconds) or [0.0]
        return 1000 * ordered[min(int(part * len(ordered)), len(ordered) - 1)]


class Honest:
    """A client that calls one method after another, on a standing connection and on new ones in turn."""

    def __init__(self, address: str, deadline: float, outcome: Outcome) -> None:
        self._address, self._deadline, self._outcome = address, deadline, outcome
        self.over = False  # set: the call that is open is the last one

    async def call(self) -> None:
        """Calls until it is over."""
        async with self._channel() as standing:
            while not self.over:
                async with self._channel() as fresh:
                    for channel in (standing, fresh) * FRESH:
                        await self._round(channel)

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)])

    async def _round(self, channel: grpc.aio.Channel) -> None:
        health: Any = health_pb2_grpc.HealthStub(channel)
        orca = OrcaStub(channel)
        for name in ("Check", "GetModel", "Generate"):
            if self.over:
                return
            began = time.monotonic()
            try:
                if name == "Check":
                    await health.Check(health_pb2.HealthCheckRequest(), timeout=self._deadline)
                elif name == "GetModel":
                    await orca.GetModel(pb.GetModelRequest(), timeout=self._deadline)
                else:
                    request = generation(max_new_tokens=TOKENS, ignore_eos=True)
                    events = [event async for event in orca.Generate(request, timeout=self._deadline)]
                    assert sum(len(event.tokens) for event in events) == TOKENS
                status = "OK"
            except grpc.aio.AioRpcError as error:
                status = f"{error.code().name}: {(error.details() or '')[:120]}"
            self._outcome.answers[f"{name} {status}"] += 1
            self._outcome.seconds.append(time.monotonic() - began)


async def probe(started: Endpoint, outcome: Outcome) -> None:
    """Asks the status port for ever whether the endpoint is ready."""
    async with httpx.AsyncClient(timeout=5) as client:
        while True:
            try:
                answer = await client.get(f"http://{started.addresses['status']}/readyz")
                said = str(answer.status_code)
                if answer.status_code != 200:
                    said += f" {answer.json()['reason']}"
            except httpx.HTTPError as error:
                said = type(error).__name__
            outcome.ready[said] += 1
            await asyncio.sleep(SEEN)


async def attacked(
    started: Endpoint, attack: str, seconds: float, *, address: str = "", deadline: float = 5.0, after: float = AFTER
) -> Outcome:
    """Attacks an endpoint, and tells what became of it. An attack of the name `nobody` does nothing.

    address: of the proxy in front of it, if there is one. deadline: seconds for an honest call. after: seconds between
    the end of the attack and the last look at the memory.
    """
    outcome = Outcome(attack, before=started.resident)
    address = address or started.addresses["grpc"]
    started.forget_peak()
    started.log = outcome.log = Log()
    cpu = started.cpu
    honest = Honest(address, deadline, outcome)
    calling, probing = asyncio.create_task(honest.call()), asyncio.create_task(probe(started, outcome))
    try:
        outcome.hostile = await hostile(attack, address, seconds)
        honest.over = True
        await calling
    finally:
        for task in (calling, probing):
            task.cancel()
        await asyncio.gather(calling, probing, return_exceptions=True)
    outcome.endpoint_cpu, outcome.peak = started.cpu - cpu, started.peak
    await asyncio.sleep(after)
    outcome.after = started.resident
    return outcome


async def hostile(attack: str, address: str, seconds: float) -> dict[str, Any]:
    """Runs an attack as a process, and returns the line that it prints."""
    if attack == "nobody":
        await asyncio.sleep(seconds)
        return {}
    command = [ATTACKS, attack, address, "--source", HOSTILE, "--seconds", str(seconds)]
    child = await asyncio.create_subprocess_exec(sys.executable, *map(str, command), stdout=asyncio.subprocess.PIPE)
    try:
        said, _ = await asyncio.wait_for(child.communicate(), seconds + 60)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode == 0
    return json.loads(said)


@asynccontextmanager
async def engine(redis_url: str, pool: str, *, busy: bool = False) -> AsyncIterator[None]:
    """An engine that answers all requests of a pool, and a scheduler that sweeps. busy: it answers none."""
    async with Pool(redis_url, pool, patience=20) as opened:
        player = Player(opened)
        await player.form()
        works = (player.sweep(),) if busy else (player.sweep(), player.play())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
