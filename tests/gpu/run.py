"""Runs the steps of a first hour on a GPU, each within its bound and all within a budget.

    python tests/gpu/run.py [--node] [--rehearse] [--out build/gpu]

The most important step is first, and each prints its results as it has them, so what is there counts when a later step
fails. A step that would begin too late is dropped; one that runs is ended at its bound. OUT gets two files:

results.jsonl   the machine; each line of JSON that a step prints, with the step's name; what became of each step
log             all that the steps print

--node: those for 2 to 8 GPUs. --rehearse: without a GPU, with small models, plain torch and gloo; tests are collected.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

BUDGET = 380.0  # seconds, of one GPU: a machine is lent for 15 minutes, and starting it a second time takes some, too
NODE_BUDGET = 3000.0
PYTEST = "-m pytest -rs -p no:cacheprovider --durations=5"
DECODE = "-m orca_lab.decode --model"
SMALL = f"{DECODE} llama-small --repetitions 1 --context 20"
ON_CPU = "--device cpu"
LOOP = f"{ON_CPU} --kernels device-loop"
KILLS = "tests/e2e/kill_rounds.py --run-ahead 1"


@dataclass(frozen=True)
class Step:
    """A command of Python's, and the one that rehearses it without a GPU."""

    name: str
    expected: float  # seconds on an H100: an estimate until it was seen
    bound: float
    command: str
    rehearsal: str
    under: str = ""  # a program with options that runs the command
    interpreted: bool = False  # the rehearsal runs Triton's interpreter


def tests(name: str, expected: float, bound: float, what: str, workers: int) -> Step:
    command = f"{PYTEST} {what}"
    return Step(name, expected, bound, f"{command} -n {workers} --dist load", f"{command} --collect-only -q")


def one_gpu() -> list[Step]:
    """The order is that of worth: without right kernels no token is right, without right tokens no time counts."""
    seven, on_cpu = f"{DECODE} llama-7b", f"{SMALL} {ON_CPU} --batch 1"
    kernels = "tests/kernels/triton_kernels tests/gpu/test_triton.py tests/gpu/test_graphs.py"
    few = f"{ON_CPU} --model gpt2-124m --dtype float32"
    times, shards = "-m orca_lab.cuda_kernels", "-m orca_lab.shards --json -"
    paper = f"{DECODE} gpt3-13b --dtype float16 --batch 1 8 32 --context 128 512"
    checker = "compute-sanitizer --tool memcheck --error-exitcode 9"
    return [
        Step("first", 20, 90, f"{SMALL} --batch 1", on_cpu),
        tests("kernels", 40, 120, kernels, workers=12),
        tests("stacks", 35, 90, "tests/gpu/test_cuda.py", workers=4),
        Step("decode", 60, 110, seven, on_cpu),
        Step("codes", 20, 60, f"{seven} --quantize int4 --context 512", f"{on_cpu} --quantize int4"),
        Step("peer", 30, 60, f"{seven} --peer", f"{on_cpu} --peer"),
        Step("serve", 40, 80, "tests/gpu/served.py", f"tests/gpu/served.py --model llama-small {ON_CPU}"),
        kills("kills", 1, 1, seconds=(20, 60), rounds=3),
        Step("no-graphs", 20, 45, f"{seven} --no-graphs --batch 1 32 --context 512", f"{on_cpu} --no-graphs"),
        Step("paper", 30, 60, paper, on_cpu),
        Step(
            "times",
            25,
            60,
            f"{times} --model gpt3-13b",
            f"{times} {few} --batch 2 --context 20 --prompt 8",
            interpreted=True,
        ),
        Step(
            "shard",
            20,
            45,
            f"{shards} --device cuda --model gpt3-175b --batch 1 8 32 --prompt 128",
            f"{shards} {few} --batch 1 --prompt 8 --repetitions 1",
        ),
        Step("memcheck", 20, 45, f"{SMALL} --batch 2 --no-graphs", on_cpu, checker),
    ]


def kills(
    name: str, tp: int, pp: int, more: str = "", seconds: tuple[float, float] = (150, 300), rounds: int = 20
) -> Step:
    cut = f"{KILLS} --tp {tp} --pp {pp} {more}"
    return Step(name, *seconds, f"{cut} --rounds {rounds} --device cuda", f"{cut} --rounds 2 {LOOP}")


def node(ranks: int) -> list[Step]:
    """First two ranks: where they do not meet, nothing else can. Then all, whose all-reduce is what tp costs."""

    def tokens(name: str, more: str = "") -> Step:
        grid = f"tests/e2e/token_grid.py --ranks {ranks} --model odd {more}"
        return Step(name, 300, 600, f"{grid} --device cuda", f"{grid} {LOOP} --sample 2")

    def groups(count: int) -> Step:
        meet = f"-m orca_lab.groups --ranks {count}"
        few = f"--epochs 2 --bytes 4096 65536 {ON_CPU}"
        return Step(f"groups-{count}", 120, 240, f"{meet} --epochs 20 --device cuda", f"{meet} {few}")

    return [
        *(groups(count) for count in dict.fromkeys((2, ranks))),
        tokens("tokens"),
        tokens("tokens-graphs", "--graphs-tp"),
        kills("kills-tp", 2, 1),
        kills("kills-graphs", 2, 1, "--graphs-tp"),
        kills("kills-pp", 1, 2),
        *([kills("kills-both", 2, 2)] if ranks >= 4 else []),
    ]


class Run:
    """One run of steps, and its two files."""

    def __init__(self, out: Path, budget: float, rehearse: bool, interpreter: bool = True) -> None:
        """interpreter: whether this machine's Triton can interpret its kernels."""
        out.mkdir(parents=True, exist_ok=True)
        self._results, self._log = (out / "results.jsonl").open("w"), (out / "log").open("w")
        self._budget, self._rehearse, self._interpreter = budget, rehearse, interpreter
        self._began = time.monotonic()
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._results.close()
        self._log.close()

    def say(self, row: dict[str, Any]) -> None:
        """Writes a row to results.jsonl, at once, and prints it."""
        for file in (self._results, sys.stdout):
            file.write(json.dumps(row) + "\n")
            file.flush()

    def step(self, step: Step) -> None:
        elapsed = time.monotonic() - self._began
        why = None
        if self._rehearse:
            if step.interpreted and not self._interpreter:
                why = "the interpreter of Triton 3.6 fails with numpy 2.4 and newer"
        elif step.under and shutil.which(step.under.split()[0]) is None:
            why = f"there is no program {step.under.split()[0]}"
        elif elapsed + step.expected > self._budget:
            why = f"after {elapsed:.0f} s of {self._budget:.0f}, it would take {step.expected:g}"
        if why is not None:
            self.say({"step": step.name, "dropped": why})
            return
        words = [sys.executable, *shlex.split(step.rehearsal if self._rehearse else step.command)]
        command = words if self._rehearse else [*step.under.split(), *words]
        environment = {"TRITON_INTERPRET": "1"} if self._rehearse and step.interpreted else {}
        self._log.write(f"==== {step.name}\n")
        status, took = run(
            command,
            step.bound * (10 if self._rehearse else 1),  # a bound of a GPU says nothing about a CPU
            self._log,
            lambda row: self.say({"step": step.name, **row}),
            environment,
        )
        self.say({"step": step.name, "status": status, "seconds": took, "expected": step.expected, "bound": step.bound})
        self.failed |= status != 0


def run(
    command: Sequence[str], bound: float, log: TextIO, result: Callable[[dict[str, Any]], None], more: Mapping[str, str]
) -> tuple[int, float]:
    """Runs a command with `more` in its environment, copies its output to the log, and calls `result` with each line of
    JSON.

    Returns its exit status (124: it was ended at its bound) and its seconds."""
    began, late = time.monotonic(), threading.Event()
    environment = os.environ | more | {"NVIDIA_TF32_OVERRIDE": "0"}  # float32 tokens are compared with transformers'
    if "-n" in command:
        environment["OMP_NUM_THREADS"] = "1"  # of each of pytest's workers
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment
    ) as process:

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(bound, end)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            row = row_of(line)
            if row is not None:
                result(row)
            else:
                print(line, end="", flush=True)
        status = process.wait()
        timer.cancel()
    return 124 if late.is_set() else status, round(time.monotonic() - began, 1)


def row_of(line: str) -> dict[str, Any] | None:
    """A result that a step printed as a line of JSON; None for any other line, such as one of a service's log."""
    try:
        row = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return row if row and "event" not in row else None


def machine() -> dict[str, Any]:
    """The GPUs and their driver, and the versions of what computes."""
    code = (
        "import json, platform, torch, transformers, numpy\n"
        "try: import triton; triton = triton.__version__\n"
        "except ImportError: triton = None\n"
        "cuda = torch.cuda.is_available()\n"
        "nccl = '.'.join(map(str, torch.cuda.nccl.version())) if cuda else None\n"
        "gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []\n"
        "print(json.dumps({'python': platform.python_version(), 'torch': torch.__version__, 'triton': triton,\n"
        "    'nccl': nccl, 'transformers': transformers.__version__, 'numpy': numpy.__version__, 'gpus': gpus}))"
    )
    found = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1])
    driver = None
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[0] or None
    return {**found, "driver": driver}


def interprets(here: Mapping[str, Any]) -> bool:
    """Whether Triton's interpreter works with this machine's numpy, as it does from Triton 3.7 on."""
    triton, numpy = (tuple(map(int, str(here[name]).split(".")[:2])) for name in ("triton", "numpy"))
    return triton >= (3, 7) or numpy < (2, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu")))
    parser.add_argument("--only", nargs="+", default=[], help="names of steps")
    given = parser.parse_args()
    here = machine()
    ranks = 4 if given.rehearse else len(here["gpus"])
    if not given.rehearse and ranks < (2 if given.node else 1):
        raise SystemExit(f"there are {ranks} GPUs here; --rehearse runs without one")
    budget = NODE_BUDGET if given.node else BUDGET
    with Run(given.out, budget, given.rehearse, interprets(here)) as runs:
        runs.say({"machine": here})
        for step in node(ranks) if given.node else one_gpu():
            if not given.only or step.name in given.only:
                runs.step(step)
    return runs.failed


if __name__ == "__main__":
    sys.exit(main())
