"""`orca bench`: measures the engine, a server, and single kernels. docs/bench.md says what each number means.

Results are JSON lines on standard output. Progress is on standard error, and a table of a load's results.
"""

import json
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from orca_cli import tables
from orca_cli.sentences import sentences
from orca_cli.several import numbers
from orca_common.errors import FailedPrecondition
from orca_worker.settings import WorkerSettings

app = typer.Typer(no_args_is_help=True, help="Measures the engine, a server, and single kernels, as JSON lines.")
errors = Console(stderr=True, highlight=False, markup=False)

DTYPE: str = WorkerSettings.model_fields["dtype"].default

Model = Annotated[
    str | None, typer.Option(help="Checkpoint folder, hub name, or gpt3-13b and the like; the demo model if not given.")
]
Dtype = Annotated[str, typer.Option(help="Type of the weights: float32 or bfloat16.")]
Quantize = Annotated[
    str | None, typer.Option(help="Format of the matrices of layers: int8 or int4; dtype if not given.")
]
KVDtype = Annotated[str | None, typer.Option(help="Type of keys and values, on a CPU: int8; dtype if not given.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads of a CPU's operations; 0: one for each core.")]
Kernels = Annotated[str, typer.Option(help="Kernels of a CPU, by instruction set; torch: plain torch, none of them.")]
MaxBatchSize = Annotated[int, typer.Option(min=1, help="Requests of a batch at most.")]
Cases = Annotated[Path | None, typer.Option(help="A file of cases; the bench's own if not given.")]
CaseNames = Annotated[
    list[str] | None, typer.Option(help="A case to run; all that the model can run if not given. May be repeated.")
]
JsonFile = Annotated[Path | None, typer.Option(help="File that gets the JSON lines too.")]


@app.command()
def engine(
    model: Model = None,
    cases: Cases = None,
    case: CaseNames = None,
    dtype: Dtype = DTYPE,
    device: Device = "auto",
    threads: Threads = 0,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 3,
    max_batch_size: MaxBatchSize = 32,
    kernels: Kernels = "auto",
    quantize: Quantize = None,
    kv_dtype: KVDtype = None,
    json_file: JsonFile = None,
) -> None:
    """Times whole cases on the engine alone: scheduler core and worker in one process, no network."""
    from orca_bench.engine import EngineOptions, lines

    with reported(json_file) as say:
        options = EngineOptions(model, dtype, device, threads, max_batch_size, kernels, quantize, kv_dtype)
        for line in lines(options, cases, case or [], runs):
            say(line)


@app.command()
def kernels(
    model: Model = None,
    dtype: Dtype = DTYPE,
    device: Device = "auto",
    threads: Threads = 0,
    only: Annotated[str, typer.Option(help="Time only those whose name contains this.")] = "",
    seconds: Annotated[float, typer.Option(min=0, help="Time to repeat each for.")] = 1.0,
    json_file: JsonFile = None,
) -> None:
    """Times iterations and single kernels against their floors on this machine, whose ceilings it measures first."""
    from orca_bench.engine import EngineOptions
    from orca_bench.kernels import lines

    with reported(json_file) as say:
        for line in lines(EngineOptions(model, dtype, device, threads), only, seconds):
            say(line)


@app.command()
def serve(
    address: Annotated[str | None, typer.Option(help="An Orca endpoint's gRPC door, host:port.")] = None,
    openai: Annotated[str | None, typer.Option(help="URL of any server with OpenAI's completions instead.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Arrivals per second of an open load.")] = None,
    rates: Annotated[str | None, typer.Option(help="Several rates, one after the other, as in 1,2,4.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = 100,
    seed: Annotated[int, typer.Option(help="The same seed draws the same load.")] = 0,
    lengths: Annotated[
        str, typer.Option(help="Input and output lengths: paper, or ranges as in 32-512,1-128.")
    ] = "paper",
    arrivals: Annotated[
        str, typer.Option(help="poisson, constant, at-once, or gamma:4 for gaps of that burstiness.")
    ] = "poisson",
    batch: Annotated[int | None, typer.Option(min=1, help="Instead of a rate: so many requests at once.")] = None,
    inputs: Annotated[int, typer.Option("--input", min=1, help="With --batch: input tokens of each.")] = 32,
    outputs: Annotated[int, typer.Option("--output", min=1, help="With --batch: output tokens of each.")] = 32,
    cases: Cases = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Instead of a rate: a case, all its requests at once. May be repeated.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each case.")] = 3,
    stream_interval: Annotated[
        int, typer.Option(min=1, max=256, help="With --address: tokens of a message of each stream.")
    ] = 1,
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Token ids stay below this; the server's if it tells, else 30000.")
    ] = None,
    patience: Annotated[float, typer.Option(min=0, help="Seconds after which a request has failed.")] = 600.0,
    label: Annotated[str | None, typer.Option(help="The server's name in the lines and the plot.")] = None,
    plot: Annotated[Path | None, typer.Option(help="SVG file for the latency-throughput curve.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Puts a server under load: Poisson arrivals, whether it keeps up or not, or closed cases."""
    import uvloop

    from orca_bench.cases import VOCABULARY, Case, fixed, own_cases, pick, read_cases, vocabulary_of
    from orca_bench.grpc_door import GrpcDoor
    from orca_bench.openai_door import OpenAIDoor
    from orca_bench.serve import OpenLoad, Start, case_lines, open_lines
    from orca_lab.workload import Lengths

    if (address is None) == (openai is None):
        raise typer.BadParameter("name one server: --address or --openai")
    if sum(given is not None for given in (rate, rates, batch, case)) != 1:
        raise typer.BadParameter("say what to send: one of --rate, --rates, --batch and --case")
    if plot is not None and rate is None and rates is None:
        raise typer.BadParameter("is for --rate and --rates", param_hint="--plot")
    all_rates = numbers("--rates", rates) if rates is not None else [rate] if rate is not None else []

    async def run(start: Start) -> AsyncIterator[dict[str, Any]]:
        door = (
            OpenAIDoor(openai, label or "openai")
            if openai
            else GrpcDoor(address or "", label or "orca-grpc", interval=stream_interval)
        )
        async with door:
            size = vocab_size or door.vocab_size or VOCABULARY.stop
            vocabulary = vocabulary_of(size)
            if all_rates:
                load = OpenLoad(all_rates, requests, seed, lengths, vocabulary, arrivals)
                longest = Lengths.read(lengths).longest
                if isinstance(door, GrpcDoor) and longest > door.model.max_positions:
                    said = f"{longest} tokens; the model has {door.model.max_positions} positions, so some will fail"
                    typer.echo(f"--lengths: {lengths} has requests of up to {said}", err=True)
                found = open_lines(door, load, start, patience)
            else:
                chosen: Mapping[str, Case]
                if batch is not None:
                    name = f"b{batch}_{inputs}_{outputs}"
                    chosen = {name: fixed(batch, inputs, outputs, vocabulary=vocabulary)}
                else:
                    known = read_cases(cases) if cases else own_cases(vocabulary)
                    positions = door.model.max_positions if isinstance(door, GrpcDoor) else sys.maxsize
                    chosen = pick(known, case or [], size, positions)
                found = case_lines(door, chosen, runs, vocabulary, start, patience)
            async for line in found:
                yield line

    with reported(json_file) as say, bar() as start:
        said: list[dict[str, Any]] = []

        async def body() -> None:
            async for line in run(start):
                say(line)
                said.append(line)

        uvloop.run(body())
        errors.print(load_table(said))
        if plot is not None:
            write_plot(said, plot)


@app.command()
def compare(
    peer: Annotated[
        list[str], typer.Option(help="Shell command that prints the lines of a peer, one a case. May be repeated.")
    ],
    model: Model = None,
    cases: Cases = None,
    case: CaseNames = None,
    dtype: Dtype = DTYPE,
    device: Device = "auto",
    threads: Threads = 0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each runs, in turn.")] = 3,
    max_batch_size: MaxBatchSize = 32,
    json_file: JsonFile = None,
) -> None:
    """Runs our engine and its peers in turn, in one sitting, and prints a table in Markdown with ratios and floors."""
    from orca_bench.compare import Sitting
    from orca_bench.engine import EngineOptions

    own = [sys.executable, "-m", "orca_cli", "bench", "engine", "--runs", "1"]
    given = {
        **{"--model": model, "--cases": cases, "--dtype": dtype, "--device": device},
        **{"--threads": threads, "--max-batch-size": max_batch_size},
    }
    own += [word for name, value in given.items() if value is not None for word in (name, str(value))]
    own += [word for name in case or [] for word in ("--case", name)]
    with sentences(), saved(json_file) as save, errors.status("") as status:
        options = EngineOptions(model, dtype, device, threads, max_batch_size)
        sitting = Sitting(options, cases, case or [])
        for line in sitting.rounds([own, *peer], rounds, status.update):
            save(line)
        print(sitting.report(shlex.join(["orca", *sys.argv[1:]])), end="")


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Files with the JSON lines of `orca bench serve`.")],
    out: Annotated[Path, typer.Option(help="SVG file to write.")],
) -> None:
    """Draws the latency-throughput curves of several servers into one picture."""
    with sentences():
        write_plot([line for file in files for line in read_lines(file)], out)


@app.command("cases")
def print_cases() -> None:
    """Prints the bench's own cases as a file of cases, for other engines."""
    from orca_bench.cases import dump, own_cases

    print(dump(own_cases()), end="")


COLUMNS = {  # of the table of a load: a member of its lines
    "requests": "requests",
    "errors": "errors",
    "requests/s": "requests_per_s",
    "tokens/s": "output_tokens_per_s",
    "first token, ms": "first_token_ms_p50",
    "between tokens, ms": "gap_ms_p50",
    "a token of all, ms": "normalized_latency_ms_p50",
}


def load_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """The lines of a load for people: medians."""
    table = tables.plain(("load", *COLUMNS))
    for line in lines:
        load = f"{line['rate']:g} a second" if "rate" in line else f"{line['case']}, run {line['run']}"
        found = [line.get(member) for member in COLUMNS.values()]
        table.add_row(load, *("-" if value is None else f"{value:g}" for value in found))
    return table


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file. Raises FailedPrecondition."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"{path}: no file of JSON lines ({_why(error)})") from None


def write_plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Raises FailedPrecondition when there is nothing to draw."""
    from orca_bench.plot import draw

    try:
        path.write_text(draw(lines))
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"{path}: nothing was drawn ({_why(error)})") from None


def _why(error: OSError | ValueError) -> str | None:
    """An error without its number and the path, which the sentence has."""
    return error.strerror if isinstance(error, OSError) else str(error)


@contextmanager
def saved(path: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that writes a JSON line to a file, at once; without a file it does nothing.

    Raises FailedPrecondition."""
    if path is None:
        yield lambda line: None
        return
    try:
        opened = path.open("w")
    except OSError as error:
        raise FailedPrecondition(f"--json-file: {path} cannot be written ({error.strerror})") from None
    with opened as file:

        def save(line: Mapping[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        yield save


@contextmanager
def reported(path: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that prints a JSON line, and saves it if there is a file for it. Errors become sentences."""
    with sentences(), saved(path) as save:

        def say(line: Mapping[str, Any]) -> None:
            print(json.dumps(line), flush=True)
            save(line)

        yield say


@contextmanager
def bar() -> Iterator[Callable[[str, int], Callable[[object], None]]]:
    """A progress bar on standard error for each load: begun with a name and a number of requests, moved by each end."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:

        def start(name: str, total: int) -> Callable[[object], None]:
            task = progress.add_task(name, total=total)
            return lambda ended: progress.advance(task)

        yield start
