"""The command `orca`. Each command imports what it needs: `orca generate` runs where no service is installed."""

import asyncio
import importlib
import json
import math
import signal
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from orca_cli.chat import chat
from orca_cli.credentials import certs, key
from orca_cli.generate import generate
from orca_cli.reflexes import understood
from orca_cli.sentences import sentences
from orca_cli.settings_command import KINDS, SettingsCommand, redis_url_of, settings_of
from orca_cli.suggestions import Command, Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Orca serves Transformer models: iteration-level scheduling, selective batching.",
)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command(cls=Command)(certs)
app.command(cls=Command)(key)
console = Console(highlight=False, markup=False)

# These commands leave their arguments to settings.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
SERVICES = {  # command -> the module with its main, and what it does
    "endpoint": (
        "orca_endpoint.app",
        "Runs one endpoint: the gRPC and HTTP doors, which validate, tokenize and stream.",
    ),
    "scheduler": (
        "orca_scheduler.app",
        "Runs one scheduler: it claims requests, selects batches, and drives the engines.",
    ),
    "worker": (
        "orca_worker.pod.supervisor",
        "Runs one worker pod: a supervisor, and below it a process for each rank.",
    ),
    "ui": ("orca_ui.app", "Serves the live page: engines, requests and failures as they are, and a chat."),
}
# timeout(1) and other programs that start one signal it and then its whole group: that is no second Ctrl-C.
SAME_SECONDS = 0.5
RunDir = Annotated[Path | None, typer.Option(help="Run folder of `orca serve`; that of the last run if not given.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from orca_client import __version__

        print(f"orca {__version__}")
        raise typer.Exit


@app.callback()
def orca(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Takes the options that belong to no command."""


@app.command("version", hidden=True)
def version_of_orca() -> None:
    """The same as --version."""
    _show_version(True)


@app.command("help", hidden=True)
def help_of_orca(context: typer.Context) -> None:
    """The same as --help."""
    assert context.parent is not None
    print(context.parent.get_help())


@app.command(context_settings=SETTINGS, cls=SettingsCommand)
def serve(context: typer.Context) -> None:
    """Starts everything on this machine, as the processes that a cluster runs, until Ctrl-C."""
    from orca_cli import serving

    with suppress(Interrupted):  # the end that it waits for
        _run(serving.serve(settings_of("serve").load(understood(context.args)), context.obj))


@app.command(cls=Command)
def status(
    run_dir: RunDir = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            help="Status port of an endpoint or scheduler, host:port, instead of a run here; may be repeated."
        ),
    ] = None,
) -> None:
    """Shows the processes of a run on this machine, why those that are not ready are not, and the load.

    With --status the services behind those ports, as on a cluster. Ends with status 0 when all are ready, else with 1.
    """
    from orca_cli import looking, runs
    from orca_local.run_folder import unwritable

    async def body() -> None:
        if status:
            lines, ready = looking.state_of(status)
            console.print(*lines, sep="\n", soft_wrap=True, highlight=False)
            if not ready:
                raise typer.Exit(1)
            return
        folder = runs.run_folder(run_dir)
        table, ready = runs.state_of(folder)
        console.print(f"run folder {folder}" if table.row_count else f"nothing runs in {folder}", soft_wrap=True)
        if table.row_count:
            console.print(table)
            console.print(f"load: {looking.load(folder)}", soft_wrap=True)
        if not ready:
            if table.row_count and (why := unwritable(folder)):
                console.print(
                    f"{folder} cannot be written ({why}): what writes there ends again and again", soft_wrap=True
                )
            raise typer.Exit(1)

    _run(body())


@app.command(cls=Command)
def logs(
    service: Annotated[
        str | None, typer.Argument(help="A process, as endpoint-0, or a role, as scheduler; all if not given.")
    ] = None,
    run_dir: RunDir = None,
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="How many of the last lines to show.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as they are: JSON.")] = False,
) -> None:
    """Shows what the processes of a run on this machine said, in the order of time."""
    from orca_cli import runs

    with sentences(interrupted=0):
        found = runs.logs_of(runs.run_folder(run_dir), service)
        runs.show(runs.last_lines(found, last), as_json)
        if follow:
            runs.show(runs.new_lines(found), as_json)


@app.command(context_settings=SETTINGS, cls=SettingsCommand)
def config(context: typer.Context) -> None:
    """Prints the settings that `orca serve` would have, as TOML, and where each of them comes from.

    Takes the arguments of `orca serve`. For one service, put its name first: `orca config endpoint --model ..`.
    """
    from orca_cli.config import listing

    name, arguments = "serve", list(context.args)
    if arguments and not arguments[0].startswith("-"):
        name = arguments.pop(0)
    if name not in KINDS:
        typer.echo(f"{name}: is no service; {', '.join(KINDS)} have settings", err=True)
        raise typer.Exit(1)
    print(listing(settings_of(name).load(arguments), arguments))


@app.command(cls=Command)
def topology(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder, hub name, or gpt3-13b and the like; the demo model if not given."),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor ranks: how many share each layer of a stage.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages: how many share the layers of the model.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of the weights: auto, float32, bfloat16 or float16.")] = None,
    quantize: Annotated[
        str | None, typer.Option(help="Format of the matrices of layers: int8 or int4; dtype if not given.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Type of keys and values: int8; dtype if not given.")] = None,
    slices: Annotated[bool, typer.Option("--slices", help="Also shows each tensor's slice on each rank.")] = False,
    values: Annotated[
        list[Path] | None,
        typer.Option(help="Values of the Helm chart, as for helm install; may be repeated. Also shows the pods."),
    ] = None,
) -> None:
    """Shows what each rank of an engine would hold: layers, slices and bytes. Starts nothing.

    Options that are not given come from the files of --values; without files they are the settings of `orca serve`.
    """

    from orca_cli.chart_values import read_values
    from orca_cli.topology import pod_table, rank_table, slice_table
    from orca_common.adapters import read_adapters
    from orca_common.checkpoint import read_checkpoint, resolve_model
    from orca_common.errors import FailedPrecondition
    from orca_local.stack import DEMO_MODEL
    from orca_worker.models import families
    from orca_worker.partition import Types

    async def body() -> None:
        types = {"dtype": dtype, "quantize": quantize, "kv_dtype": kv_dtype}
        options = {"model": model, "tp": tp, "pp": pp, **types}
        release = read_values(values).with_options(options) if values else None
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        given = settings_of("serve").load(**release.settings()) if release else settings_of("serve").load(flags)
        try:
            folder = resolve_model(given.model, families.check_type) if given.model else DEMO_MODEL
        except FailedPrecondition as error:
            raise FailedPrecondition(given.said(str(error))) from None
        checkpoint = read_checkpoint(folder, given.quantize, read_adapters(given.adapters))
        shares = families.topology(checkpoint, given.tp, given.pp, Types.of(given.dtype, given.kv_dtype))
        said = " and ".join(filter(None, (families.layout_sentence(checkpoint), given.quantize, given.dtype)))
        said += f", keys and values in {given.kv_dtype}" if given.kv_dtype is not None else ""
        console.print(rank_table(checkpoint, shares, given.tp, given.pp, said))
        if release:
            console.print(pod_table(release.shape(), release.engines))
        if slices:
            console.print(slice_table(shares))

    _run(body())


@app.command(cls=Command)
def timeline(
    run_dir: Annotated[
        Path | None,
        typer.Argument(help="Run folder of `orca serve`, which may still run; that of the last run if not given."),
    ] = None,
    engine: Annotated[str, typer.Option(help="The engine to show.")] = "engine-0",
    last: Annotated[int, typer.Option(min=1, help="How many of the last iterations to draw.")] = 24,
    width: Annotated[
        int | None, typer.Option(min=40, help="Columns of the drawing; those of the terminal if not given.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="File to write the whole run to, for ui.perfetto.dev or chrome://tracing.")
    ] = None,
) -> None:
    """Draws a run's stages over time as in the paper's Figure 8, and shows what each stage spent its time on."""

    from orca_cli.runs import run_folder
    from orca_cli.timeline import drawing, life_table, plane_table, share_table, why_nothing
    from orca_common.errors import FailedPrecondition
    from orca_lab.timeline import read_run, trace_events

    async def body() -> None:
        folder = run_dir or run_folder(None)
        if run_dir is None:
            console.print(f"run folder {folder}", style="dim", soft_wrap=True)
        run = read_run(folder, engine)
        if run.last is None:
            raise FailedPrecondition(why_nothing(folder, engine))
        if perfetto is not None:
            try:
                perfetto.write_text(json.dumps(trace_events(run)))
            except OSError as error:
                raise FailedPrecondition(f"--perfetto: {perfetto} cannot be written ({error.strerror})") from None
            count = sum(len(life.iterations) for life in run.lives)
            console.print(f"{count} iterations in {perfetto}", style="dim", soft_wrap=True)
        console.print(drawing(run, run.last, last, width or console.width), soft_wrap=width is not None)
        if len(run.lives) > 1:
            console.print(life_table(run))
        console.print(share_table(run.last))
        console.print(plane_table(run.last))

    _run(body())


@app.command("explain", cls=Command)
def explain_request(
    request: Annotated[str, typer.Argument(help="Id of the request as the client shows it, or its X-Request-Id.")],
    run_dir: RunDir = None,
    scheduler: Annotated[
        list[str] | None,
        typer.Option(help="Status port of a scheduler, host:port, instead of a run on this machine; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
) -> None:
    """Explains why a request took as long as it did, or why it still waits: part by part, for what and how long."""
    from orca_cli import explaining

    async def body() -> None:
        addresses = scheduler or []
        told = explaining.explanation(request, explaining.run_folder(run_dir, addresses), addresses)
        print(json.dumps(told) if as_json else "\n".join(explaining.lines(told)))

    _run(body())


@app.command(cls=Command)
def top(
    run_dir: RunDir = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            help="Status port of an endpoint or scheduler, host:port, instead of a run here; may be repeated."
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Shows engines, stages, slots, the queue, rates and the oldest requests, live; enter explains a request."""
    from orca_cli import top as view
    from orca_cli.explaining import run_folder

    with sentences(interrupted=0):
        given = status or []
        view.run(run_folder(run_dir, given), given, interval)


@app.command(cls=Command)
def journal(
    source: Annotated[
        Path | None, typer.Argument(help="Run folder, or one journal; the last run of `orca serve` if not given.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Show this engine's journals alone.")] = None,
    request: Annotated[str | None, typer.Option(help="Show the lines about this request alone.")] = None,
    last: Annotated[int | None, typer.Option("--last", "-n", min=0, help="How many of the last lines to show.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as they are: JSON.")] = False,
) -> None:
    """Shows an engine's journals, one line an event: what came, and after an arrow what the scheduler did."""
    from orca_cli import journal as journals
    from orca_cli.runs import run_folder

    with sentences(interrupted=0):
        place = source or run_folder(None)
        if follow and last is not None:
            raise typer.BadParameter("ends where --follow goes on: give one of the two", param_hint="--last")
        files = journals.journals(place, engine)
        written = ((path, line) for path in files for line in journals.written(path))
        lines = journals.followed(place, engine) if follow else written
        journals.show(journals.described(lines), as_json, last, request)


@app.command(cls=Command)
def demo(
    context: typer.Context,
    kill: Annotated[
        bool,
        typer.Option("--kill", help="One slow stream instead, beside the commands that kill its processes."),
    ] = False,
) -> None:
    """Starts the demo model, sends four requests at different moments, and shows how they share iterations."""
    from orca_cli import serving

    _run(serving.demo_of_kills(context.obj) if kill else serving.demo(context.obj))


@app.command(context_settings=SETTINGS)
def chaos(
    context: typer.Context,
    seed: Annotated[int, typer.Option(help="Decides everything that chance decides.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds of faults.")] = 20,
    first: Annotated[int, typer.Option(min=1, help="The first round: a failed one can be run again alone.")] = 1,
    streams: Annotated[int, typer.Option(min=1, help="Requests that run at the same time.")] = 12,
    only: Annotated[
        list[str] | None, typer.Option(help="Hit only this role, such as rank or 'scheduler > redis'; may be repeated.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Rounds in this file are not run again; those that end are added to it.")
    ] = None,
    release: Annotated[str | None, typer.Option(help="Instead of a stack of its own: a release on a cluster.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Of the release.")] = None,
    address: Annotated[
        list[str] | None, typer.Option(help="Of the release's endpoints, host:port; may be repeated.")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="Of the release's pool, to look at what is left in it. With a password: as ORCA_REDIS_URL."),
    ] = None,
) -> None:
    """Does harm to Orca under load, at random moments, and checks that no stream notices but by a pause.

    Without --release it starts a stack of its own, and also takes the arguments of `orca serve`.
    """
    from orca_cli import chaos as command

    plan = command.Plan(seed, rounds, first, streams, tuple(only or ()), record)
    if release is None:
        if redis_url is not None:
            raise typer.BadParameter(
                "is the Redis of a --release; a stack of its own has its own", param_hint="--redis-url"
            )
        _run(command.on_this_machine(plan, context.args, console))
    elif not address:
        raise typer.BadParameter("a release needs the --address of its endpoints")
    else:
        _run(command.on_a_cluster(plan, release, namespace, address, redis_url_of(redis_url), console))


@app.command(cls=Command)
def doctor(
    release: Annotated[str | None, typer.Option(help="Name of the release; orca if not given.")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Its namespace; that of the current context if not given.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of KUBECONFIG; the current one if not given.")] = None,
    rendered: Annotated[
        Path | None, typer.Option(help="Instead of a cluster: a file with what `helm template` prints, or - for stdin.")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="Ask this Redis of the pool from here, not from a pod. With a password: as ORCA_REDIS_URL."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Checks an installation on Kubernetes, or a rendered chart, for what would go wrong. Changes nothing."""
    from orca_cli.doctor import command

    async def body() -> None:
        if rendered is not None:
            command.show(command.check_rendered(rendered, release), as_json)
        else:
            command.show(await command.check_cluster(release, namespace, context, asked), as_json)

    asked = redis_url_of(redis_url)
    _run(body())


@app.command("wait", cls=Command)
def wait_for_rollout(
    release: Annotated[str, typer.Option(help="Name of the release.")] = "orca",
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Its namespace; that of the current context if not given.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of KUBECONFIG; the current one if not given.")] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds for all.")] = 600.0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds for which a stop must last: more where nodes are added on demand.")
    ] = 30.0,
) -> None:
    """Waits until an installation on Kubernetes has ready engines of its current revision alone.

    Ends with status 1 and the reason when the rollout stops, or when the time is over.
    """
    from orca_cli.waiting import wait_for

    _run(wait_for(release, namespace, context, timeout, patience))


def _add_service(name: str) -> None:
    """Adds the command that runs one service."""
    module, what = SERVICES[name]

    def command(context: typer.Context) -> None:
        settings = settings_of(name).load(context.args)
        importlib.import_module(module).main(settings)

    app.command(name, help=what, context_settings=SETTINGS, cls=SettingsCommand)(command)


for _name in SERVICES:
    _add_service(_name)

try:
    from orca_cli import bench, lab

    app.add_typer(bench.app, name="bench")
    app.add_typer(lab.app, name="lab")
except ModuleNotFoundError:

    @app.command("bench", context_settings={**SETTINGS, "help_option_names": []})
    def bench_is_missing(context: typer.Context) -> None:
        """Measures the engine, a server, and single kernels. It is not installed."""
        importlib.import_module("orca_cli.bench")  # `__main__` says which extra brings what this lacks

    @app.command("lab", context_settings={**SETTINGS, "help_option_names": []})
    def lab_is_missing(context: typer.Context) -> None:
        """The paper's experiments, and what another setting would do. It is not installed."""
        importlib.import_module("orca_cli.lab")


class Interrupted(typer.Exit):
    """A signal has ended a command: its status is the shell's, 130 for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


def _run(body: Coroutine[None, None, None], same: float = SAME_SECONDS) -> None:
    """Runs a command to its end; SIGINT and SIGTERM cancel it, and it then ends in order. Raises Interrupted.

    same: seconds within which two signals are one.
    """
    came: list[int] = []

    async def guarded() -> None:
        task = asyncio.ensure_future(body)
        now, last = asyncio.get_running_loop().time, -math.inf

        def stop(number: int) -> None:
            nonlocal last
            twice, last = now() - last < same, now()
            if not twice:
                came.append(number)
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await task

    try:
        with sentences():
            asyncio.run(guarded())
    except asyncio.CancelledError:
        raise Interrupted(came[0]) from None


def main() -> None:
    app(prog_name="orca")
