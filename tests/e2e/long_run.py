"""Streams over all features while every role is killed and frozen in turn: no byte may differ. A long run, in parts.

    python tests/e2e/long_run.py FILE [--phase decoder] [--kills 500] [--streams 5000] [--seconds 300] [--seed 1]
    python tests/e2e/long_run.py FILE --table

FILE gets a JSON line for each kill with the streams that ended meanwhile, and a run goes on behind the lines that it
finds there, until its phase has this number of kills and of streams, or for a number of seconds. At the end no key and
no slot may be left, and in no log a verdict or an end that no fault explains. The answers that streams are compared
with are in `FILE.PHASE.json`: each was made once, alone, on a stack that nothing disturbed. `FILE.wrong` gets a line
for each stream that differs or fails.

decoder   two engines of two stages of GPT-2, two endpoints, two schedulers; all features of `long_streams.py`
encoder   the same with a T5, which has no chats

A kill is SIGKILL; a freeze is SIGSTOP for FROZEN seconds, after which a process that still lives goes on. The next
victim is hit when all processes run again, each stream has gone on, and it has lived for some seconds. The pause of a
kill is the longest wait inside a stream, or for a stream's first token, whatever it waited for. "nothing" is a freeze
of no process: its pauses are those that the machine's other load makes.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import psutil  # noqa: E402
from checkpoints import make_gpt2, make_tokenizer  # noqa: E402
from e2e.long_streams import BYTES, COMMENTS, Ask, Clients, Waits, Wrong, asks  # noqa: E402
from encoder_decoders import make_t5  # noqa: E402
from stacks import of_themselves  # noqa: E402
from tool_templates import HERMES  # noqa: E402

from orca_chaos.client import Violation  # noqa: E402
from orca_chaos.faults import Fault, Kind, Victim  # noqa: E402
from orca_chaos.late import WORTH_TELLING, watched  # noqa: E402
from orca_chaos.local_target import LocalTarget, local_target  # noqa: E402
from orca_chaos.rounds import HEALED, healed, nothing_left  # noqa: E402
from orca_common.backoff import WORKED  # noqa: E402
from orca_lab.timeline import percentile  # noqa: E402
from orca_local.settings import ServeSettings  # noqa: E402

MARKS = ["</s>", "<tool_call>", "</tool_call>"]
VOCABULARY = BYTES + len(MARKS)
ENGINES, STAGES = 2, 2
SETTINGS = {"engines": ENGINES, "pp": STAGES, "endpoints": 2, "schedulers": 2, "max_batch_size": 4, "threads": 1}
TOGETHER = 6  # requests at a time
DISTINCT = 208  # requests of a phase, which come again and again
FROZEN = 4.0  # seconds
WAYS = {Kind.KILL: "SIGKILL", Kind.STOP: f"SIGSTOP, {FROZEN:g} s"}
NOTHING = Victim("nothing", "nothing", ())  # as long as a freeze, for what the machine's other load does to streams
EACH = (Kind.KILL, Kind.KILL, Kind.STOP)  # of each role in a round: a freeze takes as long as three kills


@dataclass
class Ended:
    """The streams that have ended since the last line."""

    streams: Counter[str] = field(default_factory=Counter)  # by feature
    differing: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # by kind
    resumed: Counter[str] = field(default_factory=Counter)  # taken up again over HTTP, by their path


@dataclass
class Line(Ended):
    """A line of the file. Without a role it is the end of a part, whose last streams it has. Times in seconds."""

    phase: str = ""
    role: str = ""  # of the victim
    name: str = ""
    kind: str = ""
    of: str = ""  # the feature of the stream that waited longest
    inside: float = 0.0  # the longest wait inside a stream
    first: float = 0.0  # the longest wait for a first token
    late: float = 0.0  # the longest time for which this program itself did not run
    took: float = 0.0  # until the next could be


# -- stacks


def make_decoder(folder: Path) -> Path:
    make_gpt2(
        folder,
        heads=4,
        layers=4,
        hidden=32,
        vocab=VOCABULARY,
        positions=8192,
        seed=7,
        tokenizer=True,
        special=MARKS,
        eos_token_id=BYTES,
    )
    config = {"chat_template": HERMES, "bos_token": "", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_encoder(folder: Path) -> Path:
    make_t5(folder, seed=7, tied=False, num_heads=4, num_layers=2, vocab_size=VOCABULARY, eos_token_id=BYTES)
    make_tokenizer(MARKS).save(str(folder / "tokenizer.json"))
    return folder


PHASES = {"decoder": make_decoder, "encoder": make_encoder}


def row(victim: Victim) -> str:
    """The role of a victim, for the table: ranks by their stage."""
    if victim.role != "rank":
        return victim.role
    return f"rank of stage {int(victim.name.removeprefix('rank-').partition('.')[0]) % STAGES}"


def faults(victims: Sequence[Victim], seed: int, skip: int) -> Iterator[Fault]:
    """Each role as often as EACH says, round after round, in orders by the seed. skip: those at the beginning that an
    earlier run did."""
    roles = sorted({row(victim) for victim in victims})
    pairs = [(role, kind) for role in roles for kind in EACH] + [(NOTHING.role, Kind.STOP)]
    done = skip
    while True:
        draw = random.Random(f"{seed}/{done // len(pairs)}")
        order = [(draw.choice([v for v in (*victims, NOTHING) if row(v) == role]), kind) for role, kind in pairs]
        draw.shuffle(order)
        for victim, kind in order[done % len(pairs) :]:
            yield Fault(0, kind, victim, FROZEN if kind is Kind.STOP else 0.0)
            done += 1


# -- the run


class Load:
    """Keeps TOGETHER requests running, and compares what each brings."""

    def __init__(self, clients: Clients, known: Sequence[tuple[Ask, str]], seed: int, report: Path) -> None:
        """report: gets a line for each stream that was wrong."""
        self._clients, self._report = clients, report
        self._draw = random.Random(seed)
        self._known = known
        self._ending = asyncio.Event()
        self.ended = Ended()

    async def run(self) -> None:
        """Returns when `end` was called and all requests have ended."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(TOGETHER):
                tasks.create_task(self._keep())

    def end(self) -> None:
        self._ending.set()

    async def _keep(self) -> None:
        while not self._ending.is_set():
            ask, wanted = self._draw.choice(self._known)
            try:
                brought = await self._clients.answer(ask)
            except Wrong as wrong:
                self.ended.errors[wrong.kind] += 1
                self._tell(ask, wrong.kind, str(wrong))
                continue
            finally:
                self.ended.streams[ask.feature] += 1
            if brought != wanted:
                self.ended.differing[ask.feature] += 1
                self._tell(ask, wanted, brought)

    def _tell(self, ask: Ask, *said: str) -> None:
        with self._report.open("a") as file:
            file.write(json.dumps([time.time(), asdict(ask), *said]) + "\n")


async def learned(clients: Clients, asked: Sequence[Ask], path: Path) -> list[tuple[Ask, str]]:
    """The requests with what each brings alone: of the file, or of the stack."""
    if path.exists():
        known = json.loads(path.read_text())
        if [body for body, _ in known] != [json.loads(json.dumps(asdict(ask))) for ask in asked]:
            raise ValueError(f"{path} has the answers of other requests: give another file")
        return [(ask, answer) for ask, (_, answer) in zip(asked, known, strict=True)]
    found = [(ask, await clients.answer(ask)) for ask in asked]
    path.write_text(json.dumps([(asdict(ask), answer) for ask, answer in found]))
    return found


class Bounds:
    """Says when a part ends: at a number of kills and of streams, or at a moment."""

    def __init__(self, kills: int, streams: int, seconds: float) -> None:
        self._kills, self._streams, self._until = kills, streams, time.monotonic() + seconds

    def reached(self, kills: int, streams: int) -> bool:
        return time.monotonic() >= self._until or (kills >= self._kills and streams >= self._streams)


async def play(folder: Path, file: Path, phase: str, seed: int, bounds: Bounds) -> None:
    """Runs a part of a phase on a stack of its own."""
    before = [line for line in read(file) if line.phase == phase]
    number, kills = sum(bool(line.role) for line in before), sum(line.role not in ("", NOTHING.role) for line in before)
    streams = sum(line.streams.total() for line in before)
    model = PHASES[phase](folder / "model")
    of_stack: dict[str, Any] = {"model": str(model), "device": "cpu", "dtype": "float32", "slots": 65536, **SETTINGS}
    of_stack |= {"port": 0, "http_port": 0, "served_model_name": "model", "comment_seconds": COMMENTS}
    async with local_target(ServeSettings.load(**of_stack), folder / "run", print, links=False) as target:
        waits = Waits()
        clients = Clients(target.addresses, target.http_addresses, waits)
        asked = asks(seed, DISTINCT, VOCABULARY, chats=phase == "decoder", encoder=phase == "encoder")
        known = await learned(clients, asked, file.with_name(f"{file.name}.{phase}.json"))
        print(f"{phase}: {len(known)} requests, {kills} kills and {streams} streams before", flush=True)
        load = Load(clients, known, number, file.with_name(f"{file.name}.wrong"))

        def write(line: Line) -> None:
            ended, load.ended = load.ended, Ended()
            ended.resumed, clients.resumed = clients.resumed, Counter()
            with file.open("a") as lines:
                lines.write(json.dumps({**vars(line), **vars(ended)}) + "\n")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run())
            for fault in faults(target.victims(), seed, number):
                if bounds.reached(kills, streams):
                    break
                await grown(target, fault.victim.name)
                line = await hit(target, fault, waits, phase)
                streams, kills = streams + load.ended.streams.total(), kills + (line.role != NOTHING.role)
                waited = f"{line.inside:.2f} s inside, first token {line.first:.2f} s ({line.of})"
                print(
                    f"{kills}: {line.kind} {line.name}: {waited}, on after {line.took:.1f} s; {streams} streams",
                    flush=True,
                )
                write(line)
            load.end()
        await clients.close()
        await nothing_left(target)
        load.ended.errors += of_themselves(folder / "run")
        write(Line(phase=phase))


async def grown(target: LocalTarget, name: str) -> None:
    """Waits until a process has lived so long that another one follows it at once: a death is to be a single one."""
    async with asyncio.timeout(HEALED):
        while (pid := await asyncio.to_thread(target.pid, name)) is not None:
            with suppress(psutil.NoSuchProcess):
                if time.time() - psutil.Process(pid).create_time() > WORKED + 0.5:
                    return
            await asyncio.sleep(0.2)


async def hit(target: LocalTarget, fault: Fault, waits: Waits, phase: str) -> Line:
    """Kills or freezes a process, and waits until all run again and each stream has gone on."""
    waits.start()
    begun = time.monotonic()
    async with watched() as late:
        try:
            async with asyncio.timeout(HEALED):
                # It may be being started, as a fork server.
                while fault.victim is not NOTHING and not await target.begin(fault):
                    await asyncio.sleep(0.1)
                    waits.start()
        except TimeoutError:
            raise Violation(f"{fault.victim.name} does not run {HEALED:.0f} s after all was well") from None
        await asyncio.sleep(fault.seconds)
        await target.end(fault)
        await healed(target)
        for _ in range(2):  # a stream that waits just now must not leave its wait to the next kill
            await waits.settled()
    took = time.monotonic() - begun
    times = {"inside": waits.inside, "first": waits.first, "late": late.seconds, "took": took}
    rounded: dict[str, Any] = {name: round(seconds, 3) for name, seconds in times.items()}
    return Line(phase=phase, role=row(fault.victim), name=fault.victim.name, kind=fault.kind, of=waits.of, **rounded)


# -- the table


def read(file: Path) -> list[Line]:
    """All lines of a file; one that was cut off as it was written does not count."""
    if not file.exists():
        return []
    lines: list[Line] = []
    for text in file.read_text().splitlines(keepends=True):
        if text.endswith("\n"):
            line = json.loads(text)
            counts = {name: Counter(line.get(name, {})) for name in vars(Ended())}
            lines.append(Line(**{**line, **counts}))
    return lines


def table(lines: Sequence[Line]) -> str:
    """Markdown: a row for each role and way, and the sums of the streams."""
    said = [
        "| role | hit by | times | timed | p50 | p99 | longest | inside a stream | first token |",
        "| --- " * 9 + "|",
    ]
    timed = [line for line in lines if line.role and line.late <= WORTH_TELLING]
    for kind, way in WAYS.items():
        of_kind = [line for line in timed if line.kind == kind]
        for role in sorted({line.role for line in lines if line.kind == kind}):
            times = sum(line.kind == kind and line.role == role for line in lines)
            said.append(f"| {role} | {way} | {times} | {_pauses([one for one in of_kind if one.role == role])} |")
        times = sum(line.kind == kind and line.role != NOTHING.role for line in lines)
        said.append(f"| all | {way} | {times} | {_pauses([one for one in of_kind if one.role != NOTHING.role])} |")
    streams, differing, errors, resumed = (_sum(vars(line)[name] for line in lines) for name in vars(Ended()))
    said += ["", f"{streams.total()} streams: {_listed(streams)}."]
    said.append(f"{differing.total()} of them differ{_of(differing)}, {errors.total()} ended in an error{_of(errors)}.")
    said.append(f"Over HTTP streams were taken up again {resumed.total()} times{_of(resumed)}.")
    return "\n".join(said)


def _pauses(lines: Sequence[Line]) -> str:
    """Cells: how many, and their p50, p99 and longest; the longest of each kind of wait."""
    if not lines:
        return "0 |  |  |  |  | "
    pauses = [max(line.inside, line.first) for line in lines]
    shown = [percentile(pauses, share) for share in (0.5, 0.99, 1)]
    shown += [max(line.inside for line in lines), max(line.first for line in lines)]
    return f"{len(lines)} | " + " | ".join(f"{seconds:.2f} s" for seconds in shown)


def _sum(counts: Iterator[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for one in counts:
        total.update(one)
    return +total


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _of(counts: Counter[str]) -> str:
    return f" ({_listed(counts)})" if counts else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="gets the lines, and has those of earlier runs")
    parser.add_argument("--phase", choices=sorted(PHASES), default="decoder")
    parser.add_argument("--kills", type=int, default=500, help="and freezes of the phase, with those of earlier runs")
    parser.add_argument("--streams", type=int, default=5000, help="the same of streams")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no other kill begins")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="of the logs and journals; a temporary one if not given")
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    given = parser.parse_args()
    if not given.table:
        given.file.parent.mkdir(parents=True, exist_ok=True)
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk that others use stops at times
        with tempfile.TemporaryDirectory(dir=memory, prefix="orca-long-run-", ignore_cleanup_errors=True) as temporary:
            bounds = Bounds(given.kills, given.streams, given.seconds)
            asyncio.run(play(given.folder or Path(temporary), given.file, given.phase, given.seed, bounds))
    lines = read(given.file)
    print(table(lines))
    sys.exit(any(line.differing or line.errors for line in lines))
