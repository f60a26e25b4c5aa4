"""Live schedulers for tests: real scheduler, supervisor and rank processes on a real Redis. The test is the endpoint.

The model is the timed one, whose tokens can be computed here, so that every stream is compared with an undisturbed run.
Processes are forked from what has imported theirs, as those of `orca serve`. New Pythons are those of another release,
and of a script of a test.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from checkpoints import make_timed
from servers import RedisServer, redis_server
from warm_forks import begin_warm

import orca_common
from orca.v1.pool_pb2 import PoolRequest
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import Unavailable
from orca_common.service import cancel
from orca_local.forked import app_of
from orca_local.pod import Program, ServiceProcess
from orca_pool.keys import Keys
from orca_pool.pool import Pool
from orca_pool.records import Attached, Reason
from orca_scheduler.discovery.candidates import Candidate
from orca_scheduler.master.journal import Line, read, scheduled
from orca_worker.models.families import modules_of
from orca_worker.models.timed.model import mix
from orca_worker.processes.beginning import POD, SERVICE
from orca_worker.processes.forks import Forked, Forks

VOCAB, ENDPOINT = 256, "test"
TOLD_SCHEDULER, TOLD_SCRIPT = "scheduler.told_scheduler", Path(__file__).parent / "told_scheduler.py"


def tokens_of(prompt: Sequence[int], count: int) -> list[int]:
    """What an undisturbed run of the timed model generates."""
    sequence = list(prompt)
    for _ in range(count):
        mixed = mix(np.array(sequence[-1:]), np.array([len(sequence) - 1]))
        sequence.append(int(mixed[0] % np.uint64(VOCAB)))
    return sequence[len(prompt) :]


class ForkedService(ServiceProcess):
    """A service by a fork server, whose standard input stays open."""

    def __init__(self, forked: Forked, told: Mapping[str, Any]) -> None:
        self.stdin = open(os.dup(forked.input), "wb", buffering=0)  # noqa: SIM115  # closed when the process ends
        super().__init__(forked, told)
        self.ended.add_done_callback(lambda ended: self.stdin.close())

    def _printed(self, line: str) -> None:
        if line:  # where output has no buffer, the end of a line may come by itself
            super()._printed(line)


class Process:
    """A service, its first line, and its log."""

    def __init__(
        self, process: ForkedService | asyncio.subprocess.Process, hello: dict[str, str], folder: Path
    ) -> None:
        self._process, self.hello, self.folder = process, hello, folder

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def tell(self, *candidates: Candidate) -> None:
        """To a told scheduler: these are the candidates now."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(candidates) + b"\n")

    async def replaces(self) -> str:
        """The next engine whose pods a told scheduler wants to have replaced."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 60)
        return json.loads(line)["replace"]

    async def ended(self, seconds: float = 60) -> int:
        return await asyncio.wait_for(self._process.wait(), seconds)

    async def end(self) -> None:
        if self._process.returncode is None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            try:
                await self.ended(20)
            except TimeoutError:
                self.send(signal.SIGKILL)
                await self.ended()

    def events(self, name: str) -> list[dict[str, Any]]:
        """What it has logged of this event so far."""
        text = (self.folder / "log").read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def journals(self) -> dict[tuple[str, int], list[Line]]:
        """(engine, term) -> the whole lines of its journal."""
        names = {path: path.stem.rsplit("-", 1) for path in self.folder.glob("journal-*.jsonl")}
        return {(n[0].removeprefix("journal-"), int(n[1])): list(read(path)) for path, n in names.items()}

    def iterations(self) -> dict[tuple[str, int], list[int]]:
        """(engine, term) -> numbers of the batches that were scheduled, in their order."""
        return {key: [batch.iteration for batch in scheduled(lines)] for key, lines in self.journals().items()}


class World:
    """What runs, and the pool as an endpoint sees it."""

    def __init__(self, folder: Path, model: Path, redis: RedisServer, pool: Pool) -> None:
        self.redis, self.pool = redis, pool
        self._folder, self._model = folder, model
        self.supervisors: list[Process] = []
        self.schedulers: list[Process] = []
        self._pods = Forks(partial(begin_warm, POD), modules_of(read_checkpoint(model)), "INFO")
        self._services = Forks(partial(begin_warm, SERVICE), [app_of("scheduler"), TOLD_SCHEDULER], "INFO")
        self._prompts: dict[str, tuple[list[int], int]] = {}
        self._renewing = asyncio.create_task(self._renew())

    async def close(self) -> None:
        await cancel(self._renewing)
        for group in (self.schedulers, self.supervisors):
            await asyncio.gather(*(process.end() for process in group))
        for forks in (self._services, self._pods):
            await forks.stop()

    async def _renew(self) -> None:
        register = True
        while True:
            try:
                register = await self.pool.renew_endpoint(ENDPOINT, register=register) is None
            except Unavailable:
                register = True
            await asyncio.sleep(0.3)

    async def _start(
        self,
        name: str,
        command: Sequence[str],
        settings: Mapping[str, object],
        program: Program | None = None,
        protocol: int | None = None,
    ) -> Process:
        """program: of a forked process; None: it begins by the command. protocol: of the release that it is of, if not
        the present one."""
        folder = self._folder / name
        folder.mkdir()
        variables = {f"ORCA_{key.upper()}": str(value) for key, value in settings.items()}
        with (folder / "log").open("wb") as log:
            if program is not None and protocol is None:
                process = await self._fork(program, variables, log.fileno())
            else:
                release = {} if protocol is None else {"PYTHONPATH": str(self._release(protocol))}
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *command),
                    env=os.environ | variables | release,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60):
                hello = json.loads(await process.stdout.readline())
        except BaseException:  # it is in no list yet: nothing else would end it, and close its standard input
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        return Process(process, hello, folder)

    async def _fork(self, program: Program, variables: Mapping[str, str], log: int) -> ForkedService:
        """A process with these variables. log: a descriptor, for its standard error."""
        pod = program.app == POD
        forked = await (self._pods if pod else self._services).fork(lambda why: None, log)
        service = {"role": "scheduler", **program._asdict(), "environment": variables}
        return ForkedService(forked, variables if pod else service)

    def _release(self, protocol: int) -> Path:
        """A folder with `orca_common` as a release of this protocol has it."""
        folder = self._folder / f"protocol-{protocol}"
        if not folder.exists():
            shutil.copytree(Path(orca_common.__file__).parent, folder / "orca_common")
            path = folder / "orca_common/protocol.py"
            text, count = re.subn(r"(?m)^PROTOCOL = \d+$", f"PROTOCOL = {protocol}", path.read_text())
            assert count == 1
            path.write_text(text)
        return folder

    async def supervisor(self, protocol: int | None = None) -> Process:
        """One more engine, or pod of one."""
        name = f"supervisor-{len(self.supervisors)}"
        settings = {"model": self._model, "dtype": "float32", "device": "cpu", "slots": 4096}
        self.supervisors.append(await self._start(name, ["-m", "orca_worker"], settings, Program(POD), protocol))
        return self.supervisors[-1]

    async def scheduler(
        self, protocol: int | None = None, *, told: bool = False, script: Path | None = None, **settings: object
    ) -> Process:
        """One more scheduler of all engines.

        told: of those that the test tells it (`told_scheduler.py`). script: another one that runs a scheduler.
        """
        name = f"scheduler-{len(self.schedulers)}"
        values = {
            "workers": ",".join(s.hello["address"] for s in self.supervisors),
            "redis_url": self.redis.url,
            "pool": "live",
            "run_dir": self._folder / name,
            "max_batch_size": 4,
        }
        program = None if script else Program(TOLD_SCHEDULER if told else app_of("scheduler"))
        command = [str(script or TOLD_SCRIPT)] if told or script else ["-m", "orca_scheduler"]
        self.schedulers.append(await self._start(name, command, values | settings, program, protocol))
        return self.schedulers[-1]

    @asynccontextmanager
    async def company(self, schedulers: int) -> AsyncIterator[None]:
        """As many others are registered meanwhile, so that the first one to start leaves the next one its share."""

        others = [f"other-{n}" for n in range(schedulers - 1)]

        async def renew() -> None:
            for other in others:
                await self.pool.renew_scheduler(other)

        async def keep() -> None:
            while True:
                await asyncio.sleep(0.3)
                await renew()

        await renew()
        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            await cancel(keeping)
            for other in others:
                await self.pool.leave_scheduler(other)

    # -- the pool

    async def engine(self, name: str) -> dict[str, str]:
        """An engine's record without its load, and its lease; empty when there is none."""
        prefix, command = Keys("live").prefix, self.pool._link.command
        fields = await command("HGETALL", f"{prefix}engine:{name}")
        record = {k.decode(): v.decode() for k, v in zip(fields[::2], fields[1::2], strict=True)}
        for load in ("rows", "free", "pace", "room_at", "listeners"):
            record.pop(load, None)
        if record:
            lease = await command("HGET", f"{prefix}leases", name)
            slots = await command("ZSCORE", f"{prefix}engines", name)
            if lease is None or slots is None:  # it was retired just now
                return {}
            record |= dict(zip(("counter", "term", "owner"), lease.decode().split(" ", 2), strict=True))
            record["slots"] = slots.decode()
        return record

    async def losses(self, request_id: str) -> int:
        """Losses that are counted now."""
        return int(await self.pool._link.command("HGET", f"{Keys('live').prefix}request:{request_id}", "losses"))

    async def until(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        """Waits until a condition, which may be a coroutine function, holds; what it answered."""
        async with asyncio.timeout(seconds):
            while True:
                answer = condition()
                if asyncio.iscoroutine(answer):
                    answer = await answer
                if answer:
                    return answer
                await asyncio.sleep(0.02)

    async def formed(self, *engines: str) -> dict[str, dict[str, str]]:
        """Waits until these engines are mastered and formed; their records."""
        records: dict[str, dict[str, str]] = {}
        for name in engines:

            async def ready(name: str = name) -> bool:
                records[name] = await self.engine(name)
                return bool(records[name].get("owner")) and int(records[name]["slots"]) > 0

            await self.until(ready)
        return records

    async def submit(self, request_id: str, prompt: list[int], count: int) -> None:
        record = PoolRequest(request_id=request_id, prompt_ids=prompt, max_new_tokens=count)
        self._prompts[request_id] = prompt, count
        answer = await self.pool.submit(
            request_id,
            record.SerializeToString(),
            "digest",
            len(prompt) + count,
            len(prompt) + count,
            deadline_in=None,
            detach_grace=60,
            endpoint=ENDPOINT,
            attempt=1,
            max_waiting=1000,
        )
        assert isinstance(answer, Attached), answer

    async def read(self, request_id: str) -> Attached:
        """What is committed of a request."""
        answer = await self.pool.attach(request_id, endpoint=ENDPOINT, attempt=1)
        assert isinstance(answer, Attached), answer
        return answer

    async def progress(self) -> list[int]:
        """Committed tokens of each request."""
        return [len((await self.read(name)).tokens) for name in self._prompts]

    async def tokens(self, name: str, seconds: float = 60) -> list[int]:
        """Waits for a request's end; its tokens."""

        async def finished() -> Attached | None:
            answer = await self.read(name)
            return answer if answer.finish is not None else None

        answer: Attached = await self.until(finished, seconds)
        assert answer.finish is not None
        assert answer.finish.reason is Reason.LENGTH, name
        return [token.token_id for token in answer.tokens]

    async def completed(self, *names: str, seconds: float = 60) -> dict[str, list[int]]:
        """Waits for these requests, or all, and compares their tokens; the iterations that made them."""
        iterations: dict[str, list[int]] = {}
        for name in names or tuple(self._prompts):

            async def finished(name: str = name) -> Attached | None:
                answer = await self.read(name)
                return answer if answer.finish is not None else None

            answer: Attached = await self.until(finished, seconds)
            assert answer.finish is not None
            assert answer.finish.reason is Reason.LENGTH, name
            assert [token.token_id for token in answer.tokens] == tokens_of(*self._prompts[name]), name
            iterations[name] = [token.iteration for token in answer.tokens]
        return iterations

    def rank_pid(self, engine: int) -> int:
        """The process of an engine's rank."""
        return self.supervisors[engine].events("rank started")[-1]["rank_pid"]


@asynccontextmanager
async def world(
    folder: Path, *, engines: int, schedulers: int, run_ahead: int = 0, **model: Any
) -> AsyncIterator[World]:
    """Engines `engine-0`.. and their schedulers; if there are any, the engines are formed.

    `model` are fields of the timed model. Prints logs on a failure.
    """
    checkpoint = make_timed(folder / "model", vocab=VOCAB, **model)
    with redis_server() as redis:
        async with Pool(redis.url, "live", patience=20) as pool:  # the test's own, which is not what is tested
            this = World(folder, checkpoint, redis, pool)
            try:
                for _ in range(engines):
                    await this.supervisor()
                async with this.company(schedulers):
                    for _ in range(schedulers):
                        await this.scheduler(run_ahead=run_ahead)
                    await this.formed(*(f"engine-{n}" for n in range(engines if schedulers else 0)))
                yield this
            except BaseException:
                for log in sorted(folder.glob("*/log")):
                    print(f"---- {log.parent.name}\n{log.read_text()[-4000:]}")
                raise
            finally:
                redis.thaw()
                await this.close()
