"""The costs that benches of stacks print, of times that are known."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orca_bench import control_plane, stack, start
from orca_bench.cases import Request
from orca_bench.control_plane import processes, show
from orca_bench.measures import Answer
from orca_bench.perplexity import report
from orca_bench.stack import between, cost, rounds, seconds_run
from orca_bench.start import Rest, Start
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import Unavailable
from orca_lab.timeline import Iteration, Life, Run, Times
from orca_local.stack import DEMO_MODEL
from orca_local.timed_model import make_timed_model

MS = 1_000_000
ROW = {
    "batch": 8,
    "iterations_per_second": 25.0,
    "tokens_per_second": 200.0,
    "tokens_per_message": 4.0,
    "microseconds": {"rank": 2000.0, "endpoint": pytest.approx(10000.0)},
    "total": pytest.approx(12000.0),
    "floor": 2 * 70 + 2 * 20 + 8 * 4.5,
}
SHOWN = (
    "batch   8:  12000 us CPU per iteration (floor 216): endpoint 10000, rank 2000; "
    "25 iterations/s, 200 tokens/s delivered, 4.0 a message"
)


class Lines:
    """Stands for the process that makes the load: what it says at both ends of the window."""

    def __init__(self, *lines: dict[str, float]) -> None:
        self._lines = iter(lines)
        self.stdout, self.ended = self, False

    async def readline(self) -> bytes:
        return json.dumps(next(self._lines)).encode()

    async def wait(self) -> None:
        self.ended = True


async def test_the_cost_of_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a window divided by its iterations, beside the rates of its load."""
    process = Lines(
        {"tokens": 100, "messages": 50, "iteration": 10, "time": 1.0},
        {"tokens": 500, "messages": 150, "iteration": 60, "time": 3.0},
    )
    commands, looks = list[tuple[str, ...]](), iter(({"endpoint": 1.0, "rank": 2.0}, {"endpoint": 1.5, "rank": 2.1}))

    async def begin(*command: str, stdout: int) -> Lines:
        commands.append(command)
        return process

    monkeypatch.setattr(control_plane.asyncio, "create_subprocess_exec", begin)
    monkeypatch.setattr(control_plane, "cpu_seconds", lambda run_dir: next(looks))
    of: Any = SimpleNamespace(grpc_addresses=["a:1", "a:2"])
    row = await control_plane.measure(of, Path("run"), 8, 2.5)
    row["microseconds"]["rank"] = round(row["microseconds"]["rank"], 6)
    assert row == ROW
    assert process.ended
    given = ("--load", "a:1", "--batches", "8", "--seconds", "2.5")
    assert commands == [(sys.executable, "-m", "orca_bench.control_plane", *given)]


@pytest.mark.parametrize("fails", [False, True])
async def test_each_batch_has_a_stack_of_its_own(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With as many rows as streams. All stacks end, and their folder goes, even where one cannot be measured."""
    seen = list[Any]()

    class Stack:
        def __init__(self, settings: Any, run_dir: Path, say: Any) -> None:
            say("a step")
            values = settings.model_dump()
            names = ("policy", "max_batch_size", "slots", "port", "http_port")
            assert json.loads(Path(values["model"], "config.json").read_text())["seconds"] == 0.0
            seen.append((run_dir.name, *(values[name] for name in names)))
            self.folder = run_dir.parent

        async def start(self) -> None:
            seen.append("start")

        async def stop(self) -> None:
            seen.append("stop")

    async def measure(of: Stack, run_dir: Path, batch: int, seconds: float) -> dict[str, Any]:
        seen.append((of.folder / "model" == run_dir.parent / "model", batch, seconds, of.folder))
        if fails:
            raise Unavailable("it ended")
        return ROW | {"batch": batch, "microseconds": {"rank": 2000.0, "endpoint": 10000.0}, "total": 12000.0}

    monkeypatch.setattr(control_plane, "Stack", Stack)
    monkeypatch.setattr(control_plane, "measure", measure)
    out = tmp_path / "rows.json"
    ran = control_plane.bench([8, 16], 2.5, "paper", out)
    if fails:
        with pytest.raises(Unavailable):
            await ran
    else:
        await ran
    folder = seen[2][3]
    whole = [
        one
        for batch in (8, 16)
        for one in (
            (f"batch-{batch}", "paper", batch, 1 << 20, 0, 0),
            "start",
            (True, batch, 2.5, folder),
            "stop",
        )
    ]
    assert seen == (whole[:4] if fails else whole)
    assert not folder.exists()
    if not fails:
        assert capsys.readouterr().out.splitlines() == [SHOWN, SHOWN.replace("batch   8", "batch  16")]
        assert [row["batch"] for row in json.loads(out.read_text())] == [8, 16]


def test_a_timed_model_has_positions_for_all_slots(tmp_path: Path) -> None:
    """And the demo model's vocabulary, whose tokens a door can write."""
    model = read_checkpoint(make_timed_model(tmp_path / "model", 0.25))
    assert (model.model_type, model.max_positions, model.config["seconds"]) == ("orca_timed", control_plane.SLOTS, 0.25)
    assert model.vocab_size == read_checkpoint(DEMO_MODEL).vocab_size
    assert model.tokenizer_file is not None
    assert model.tokenizer_file.read_bytes() == (DEMO_MODEL / "tokenizer.json").read_bytes()


def test_the_line_of_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    show(ROW | {"microseconds": {"rank": 2000.0, "endpoint": 10000.0}, "total": 12000.0})
    assert capsys.readouterr().out == SHOWN + "\n"


def test_the_seconds_of_a_role_are_those_of_all_its_processes(tmp_path: Path) -> None:
    rows = [{"role": "rank", "pid": os.getpid(), "name": "rank-0"}, {"role": "rank", "pid": os.getpid()}]
    (tmp_path / "processes.json").write_text(json.dumps([*rows, {"role": "redis", "pid": os.getpid()}]))
    assert processes(tmp_path) == [("rank", os.getpid()), ("rank", os.getpid()), ("redis", os.getpid())]
    before = os.times()
    found = control_plane.cpu_seconds(tmp_path)
    after = os.times()
    least, most = (round(spent.user + spent.system, 2) for spent in (before, after))
    assert list(found) == ["rank", "redis"]
    assert least - 0.02 <= found["redis"] <= most + 0.02
    assert 2 * (least - 0.02) <= found["rank"] <= 2 * (most + 0.02)


def test_the_seconds_of_each_thread(tmp_path: Path) -> None:
    """To a tick of the kernel, which is 10 ms at most."""
    (tmp_path / "processes.json").write_text(json.dumps([{"role": "redis", "pid": os.getpid()}]))
    thread = threading.get_native_id()
    before, began = seconds_run(tmp_path), time.thread_time()
    while time.thread_time() < began + 0.05:
        pass
    after, most = seconds_run(tmp_path), time.thread_time() - began
    for role in ("redis", "client"):
        assert 0.04 <= after[role, thread] - before[role, thread] <= most + 0.02, role


def test_the_busiest_threads_of_a_rank_are_those_that_compute() -> None:
    before = {("rank", 1): 1.0, ("rank", 2): 1.0, ("rank", 3): 1.0, ("redis", 4): 2.0, ("redis", 5): 1.0}
    after = {("rank", 1): 1.5, ("rank", 2): 4.0, ("rank", 3): 3.0, ("redis", 4): 2.25, ("client", 6): 0.5}
    assert cost(before, after | {("redis", 5): 9.0}, 2) == {"rank": 0.5, "kernels": 5.0, "redis": 8.25, "client": 0.5}
    assert cost(before, after, 1) == {"rank": 2.5, "kernels": 3.0, "redis": 0.25, "client": 0.5}


def test_the_time_between_two_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of neighbours that both began within a round: (2, 3), (3, 5) and (5, 4) ms in the first, (9, 7) in the second."""
    moments = [(10, 12), (15, 18), (23, 28), (32, 33), (110, 119), (126, 127)]  # started and computed, in ms
    life = Life(1, 0, 1, 1, 1, 0)
    for n, (started, computed) in enumerate(moments):
        times = Times(0, 0, 0, 0, started * MS, computed * MS, 0, 0, 0, 0)
        life.iterations.append(Iteration(n, (), {(0, 0): times, (0, 1): times._replace(started=0)}))
    empty = Life(2, 0, 1, 1, 1, 0)
    monkeypatch.setattr(stack, "read_run", lambda folder: Run("engine-0", [life, empty], {}))
    assert between(Path(), [(9 * MS, 40 * MS)]) == (3.0, 4.0)
    assert between(Path(), [(9 * MS, 40 * MS), (100 * MS, 130 * MS)]) == (4.0, 4.5)
    assert between(Path(), [(10 * MS, 32 * MS)]) == (3.0, 5.0)


async def test_the_rounds_of_a_stack_and_its_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In turn, after a warm-up of both, by a clock of our own."""
    now, ran, asked = 100.0, list[str](), list[tuple[str, int]]()
    case = [Request([1], 4), Request([2], 8)]
    engine_took, stack_took = iter([9.0, 1.0, 3.0, 2.0]), iter([9.0, 2.0, 4.0, 5.0])

    def run(what: Sequence[Request]) -> SimpleNamespace:
        ran.append(f"engine {len(what)}")
        return SimpleNamespace(seconds=next(engine_took))

    async def closed_case(door: str, what: Sequence[Request]) -> list[Answer]:
        nonlocal now
        ran.append(f"{door} {len(what)}")
        now += next(stack_took)
        return [Answer(one, 0.0, tokens=one.output) for one in what]

    class Door:
        def __init__(self, address: str, interval: int) -> None:
            asked.append((address, interval))

        async def __aenter__(self) -> str:
            return "door"

        async def __aexit__(self, *_: object) -> None:
            ran.append("closed")

    def seconds_run(run_dir: Path) -> dict[tuple[str, int], float]:
        return {("rank", 1): now * 0.5, ("rank", 2): now * 0.25, ("redis", 3): now * 0.125}

    clock = SimpleNamespace(perf_counter=lambda: now, time_ns=lambda: int(now * 1e9))
    for name, stands in (
        ("GrpcDoor", Door),
        ("closed_case", closed_case),
        ("seconds_run", seconds_run),
        ("time", clock),
    ):
        monkeypatch.setattr(stack, name, stands)
    compute = SimpleNamespace(threads=1)
    options, checkpoint = SimpleNamespace(compute=compute), SimpleNamespace(vocab_size=97)
    engine: Any = SimpleNamespace(run=run, options=options, checkpoint=checkpoint)
    whole: Any = SimpleNamespace(grpc_addresses=["a:1"])
    when = await rounds(engine, whole, Path(), "c", case, 3, 8)
    assert when == [(at * 10**9, (at + took) * 10**9) for at, took in ((109, 2), (111, 4), (115, 5))]
    assert (ran, asked) == (["engine 32", "door 32", *["engine 2", "door 2"] * 3, "closed"], [("a:1", 8)])
    parts = ["kernels 125.00, rank 62.50, redis 31.25", "kernels 250.00, rank 125.00, redis 62.50"]
    assert capsys.readouterr().out.splitlines() == [
        f"c: engine 1.000 s, stack 2.000 s; ms of CPU an iteration: {parts[0]}",
        f"c: engine 3.000 s, stack 4.000 s; ms of CPU an iteration: {parts[1]}",
        "c: engine 2.000 s, stack 5.000 s; ms of CPU an iteration: kernels 312.50, rank 156.25, redis 78.12",
        "c: medians of 3 rounds: engine 2.000 s, stack 4.000 s, 50.0% of the engine's throughput",
    ]


@pytest.mark.parametrize("resting", [False, True])
def test_starts_of_two_checkouts(
    resting: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In turn; the first of each is not counted."""
    asked = list[tuple[Path, list[str], float]]()

    def taken() -> Iterator[Start]:
        for seconds in (90.0, 80.0, 1.0, 2.0, 3.0, 5.0, 2.0, 8.0):
            yield Start(seconds, 2 * seconds, 100 * seconds, 3, Rest(seconds / 100, 300 * seconds))

    starts = taken()

    def begin(checkout: Path, settings: list[str], rest: float) -> Start:
        asked.append((checkout, settings, rest))
        return next(starts)

    monkeypatch.setattr(start, "start", begin)
    monkeypatch.setattr(start, "os", SimpleNamespace(cpu_count=lambda: 7))
    options = ["--rest", "25"] if resting else []
    monkeypatch.setattr(sys, "argv", ["start", "--rounds", "3", "--against", "/other", *options, "--pp", "2"])
    start.main()
    here = Path(__file__).parents[2]
    assert asked == [(one, ["--pp", "2"], 25.0 if resting else 0.0) for _ in range(4) for one in (here, Path("/other"))]
    rest = [f"    at rest {n:.2f} % of a core, all processes hold {300 * n} MB" for n in (2, 5)]
    lines = [
        f"{where}: ready after {seconds}, {cpu} s of CPU, 7 cores; 3 processes of pods hold {memory} MB"
        for where, seconds, cpu, memory in (
            (here, "2.00 s (1.00 to 3.00 in 3 starts)", "4.00", 200),
            ("/other", "5.00 s (2.00 to 8.00 in 3 starts)", "10.00", 500),
        )
    ]
    wanted = [lines[0], rest[0], lines[1], rest[1]] if resting else lines
    assert capsys.readouterr().out.splitlines() == wanted


def test_what_formats_lose() -> None:
    """Against the first line, in the table and in the picture's second panel."""
    found = [
        {"model": "m", "format": "float32", "perplexity": 8.0, "weights_MB": 4.5},
        {"model": "m", "format": "int8", "perplexity": 8.1, "weights_MB": 1.25},
    ]
    table, picture = report(found)
    assert table.splitlines() == [
        "| format | weights, MB | perplexity | more |",
        "| --- | --- | --- | --- |",
        "| float32 | 4.5 | 8.0 | 0.00 % |",
        "| int8 | 1.25 | 8.1 | 1.25 % |",
    ]
    words = ("Formats of m&#x27;s weights", "Weights, MB", "Perplexity, % more", "float32", "int8")
    assert [word for word in words if word not in picture and word.replace("&#x27;", "'") not in picture] == []
