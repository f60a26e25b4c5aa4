"""The command `orca`."""

import asyncio
import contextlib
import importlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from orca_cli import demo as demonstration
from orca_cli.generate import generate
from orca_cli.stack import DEMO_MODEL, Plan, Stack
from orca_cli.timeline import drawing, plane_table, share_table
from orca_cli.topology import rank_table, slice_table
from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_common.errors import FailedPrecondition, OrcaError
from orca_common.settings import Settings
from orca_lab.timeline import read_run, trace_events
from orca_worker.models import families

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Orca serves Transformer models: iteration-level scheduling, selective batching.",
)
app.command()(generate)
console = Console(highlight=False)
TensorParallel = Annotated[int, typer.Option(min=1, help="Ranks that share each layer of a stage.")]
PipelineParallel = Annotated[int, typer.Option(min=1, help="Stages that share the layers.")]
SERVICES = {
    "endpoint": ("orca_endpoint.settings", "EndpointSettings", "orca_endpoint.app"),
    "scheduler": ("orca_scheduler.settings", "SchedulerSettings", "orca_scheduler.__main__"),
    "worker": ("orca_worker.settings", "SupervisorSettings", "orca_worker.supervisor"),
}


@contextlib.asynccontextmanager
async def running(plan: Plan, run_dir: Path | None) -> AsyncIterator[tuple[Stack, Path]]:
    """A stack from ready to ended. Without a run folder it takes a temporary one and removes it."""
    folder = run_dir or Path(tempfile.mkdtemp(prefix="orca-"))
    folder.mkdir(parents=True, exist_ok=True)
    with console.status("starting") as status:

        def say(step: str) -> None:
            status.update(step)
            console.print(f"[dim]{step}[/]")

        stack = Stack(plan, folder, say)
        try:
            await stack.start()
            status.stop()
            yield stack, folder
        finally:
            status.start()
            status.update("draining")
            await stack.stop()
            if run_dir is None:
                shutil.rmtree(folder, ignore_errors=True)
    console.print("[dim]ended, nothing is left running[/]")


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help="Checkpoint folder or hub name; the demo model without it.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    engines: Annotated[int, typer.Option(min=1, help="Copies of the model, each of tp x pp ranks.")] = 1,
    schedulers: Annotated[int, typer.Option(min=1)] = 1,
    endpoints: Annotated[
        int, typer.Option(min=1, help="The first has --port and --http-port, the others free ones.")
    ] = 1,
    max_batch_size: Annotated[int, typer.Option(min=1, help="max_bs of the paper's Algorithm 1.")] = 8,
    slots: Annotated[int | None, typer.Option(min=1, help="Slots of an engine; without it, what memory holds.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Slots in a block.")] = 16,
    run_ahead: Annotated[
        int, typer.Option(min=0, max=1, help="1: the next iteration of a batch is issued before its tokens are back.")
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            min=0,
            envvar="ORCA_THREADS",
            help="Of a rank's operations on a CPU, 0 is torch's choice; without it, its share of the cores.",
        ),
    ] = None,
    redis_url: Annotated[str | None, typer.Option(help="A Redis of yours; an embedded server without it.")] = None,
    host: Annotated[
        str, typer.Option(help="Address of the doors; the other processes stay on loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC; 0 takes a free one.")] = 50051,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="OpenAI's API; 0 takes a free one.")] = 8000,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of logs, journals, processes.json and the pool.")] = None,
) -> None:
    """Starts everything on this machine, as the processes that a cluster runs, until Ctrl-C."""
    settings = {
        "ORCA_DTYPE": dtype,
        "ORCA_DEVICE": device,
        "ORCA_MAX_BATCH_SIZE": str(max_batch_size),
        "ORCA_BLOCK_SIZE": str(block_size),
        "ORCA_RUN_AHEAD": str(run_ahead),
        # four ranks on two cores, each with two threads: 8.4 s for two requests of 60 tokens; with one: 2.9 s
        "ORCA_THREADS": str(max(1, (os.cpu_count() or 1) // (tp * pp * engines)) if threads is None else threads),
    }
    if slots is not None:
        settings["ORCA_SLOTS"] = str(slots)

    async def body() -> None:
        plan = Plan(
            model=resolve_model(model) if model else DEMO_MODEL,
            tp=tp,
            pp=pp,
            engines=engines,
            schedulers=schedulers,
            endpoints=endpoints,
            host=host,
            port=port,
            http_port=http_port,
            redis_url=redis_url,
            settings=settings,
        )
        async with running(plan, run_dir) as (stack, folder):
            console.print(f"[bold green]Orca serves {plan.model.name}[/]")
            for address, http in zip(stack.grpc_addresses, stack.http_addresses, strict=True):
                console.print(f"  gRPC {address}   OpenAI API http://{http}/v1")
            console.print(
                f"  run folder {folder}\n  try: orca generate 'def main(' --address {stack.grpc_addresses[0]}"
            )
            await asyncio.get_running_loop().create_future()

    _run(body())


@app.command()
def topology(
    model: Annotated[str | None, typer.Option(help="Checkpoint folder or hub name; the demo model without it.")] = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option()] = "bfloat16",
    slices: Annotated[bool, typer.Option(help="Each tensor's slice on each rank too.")] = False,
) -> None:
    """Shows what each rank of an engine would hold: layers, slices and bytes. Starts nothing."""

    async def body() -> None:
        checkpoint = read_checkpoint(resolve_model(model) if model else DEMO_MODEL)
        shares = families.topology(checkpoint, tp, pp, dtype)
        console.print(rank_table(checkpoint, shares, tp, pp, dtype))
        if slices:
            console.print(slice_table(shares))

    _run(body())


@app.command()
def timeline(
    run_dir: Annotated[Path, typer.Argument(help="Run folder of `orca serve`, recorded or still running.")],
    engine: Annotated[str, typer.Option()] = "engine-0",
    last: Annotated[int, typer.Option(min=1, help="Iterations to draw, the last ones.")] = 24,
    width: Annotated[int, typer.Option(min=20, help="Columns of the drawing.")] = 100,
    perfetto: Annotated[
        Path | None, typer.Option(help="Writes the whole run for ui.perfetto.dev or chrome://tracing.")
    ] = None,
) -> None:
    """Draws the stages of a run as the paper's Figure 8, and says what each stage did with its time."""

    async def body() -> None:
        run = read_run(run_dir, engine)
        if run.last is None:
            raise FailedPrecondition(f"run_dir: {run_dir} holds no journal with an iteration of {engine}")
        if perfetto is not None:
            perfetto.write_text(json.dumps(trace_events(run)))
            console.print(f"[dim]{sum(len(life.iterations) for life in run.lives)} iterations in {perfetto}[/]")
        console.print(drawing(run, run.last, last, width), soft_wrap=True)
        console.print(share_table(run.last))
        console.print(plane_table(run.last))

    _run(body())


@app.command()
def demo() -> None:
    """Starts the demo model, sends four requests at different moments, and shows how they share iterations."""

    async def body() -> None:
        settings = {"ORCA_DTYPE": "float32", "ORCA_DEVICE": "cpu", "ORCA_SLOTS": "1024"}
        plan = Plan(model=DEMO_MODEL, port=0, http_port=0, settings=settings)
        folder = Path(tempfile.mkdtemp(prefix="orca-demo-"))
        try:
            async with running(plan, folder) as (stack, _):
                actors = await demonstration.play(stack.grpc_addresses, console)
            console.print(demonstration.iteration_table(actors, demonstration.batches(folder)))
            console.print(demonstration.LEGEND)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    _run(body())


def _service(name: str) -> None:
    """Adds a command that runs one service, with its settings as options."""
    settings_module, class_name, main_module = SERVICES[name]

    def command(context: typer.Context) -> None:
        kind: type[Settings] = getattr(importlib.import_module(settings_module), class_name)
        importlib.import_module(main_module).main(kind.load(**_options(kind, context.args)))

    command.__doc__ = f"Runs one {name}. Options are its settings, as in ORCA_*: --name value."
    extra = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, context_settings=extra)(command)


def _options(kind: type[Settings], arguments: list[str]) -> dict[str, str]:
    """`--name value` pairs as settings. Raises typer.BadParameter for a name that is none."""
    options: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.removeprefix("--").partition("=")
        field = name.replace("-", "_")
        if not argument.startswith("--") or field not in kind.model_fields:
            known = ", ".join("--" + known.replace("_", "-") for known in kind.model_fields)
            raise typer.BadParameter(f"{argument} is no setting; there are {known}")
        try:
            options[field] = value if equals else next(rest)
        except StopIteration:
            raise typer.BadParameter(f"{argument} needs a value") from None
    return options


def _run(body: Coroutine[None, None, None]) -> None:
    """Runs a command until it ends, or SIGINT or SIGTERM ends it in order."""

    async def guarded() -> None:
        task = asyncio.ensure_future(body)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await task

    try:
        asyncio.run(guarded())
    except asyncio.CancelledError:
        raise typer.Exit(0) from None
    except OrcaError as error:
        console.print(f"[red]{error}[/]")
        raise typer.Exit(1) from None


for _name in SERVICES:
    _service(_name)


def main() -> None:
    app()
