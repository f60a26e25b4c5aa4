"""`orca serve` and `orca demo`: a stack from its first process to its last, and what the terminal shows of it."""

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rich.text import Text

from orca_common.checkpoint import resolve_model, shape_names
from orca_common.errors import Aborted, FailedPrecondition
from orca_common.roles import Role
from orca_common.service import in_thread
from orca_local.pod import Program
from orca_local.run_folder import new_run
from orca_local.settings import ServeSettings, StackSettings, StateSettings
from orca_local.stack import DEMO_MODEL, Stack
from orca_worker.models.families import check_type
from orca_worker.processes.beginning import Begun

from .generate import USUAL_ADDRESS
from .stdout import Lossy

console = Console(file=cast(TextIO, Lossy(sys.stdout)), highlight=False, markup=False)
KEY_FILE = "FILE_WITH_YOUR_KEY"  # the hashes that the stack knows tell no key


@contextlib.asynccontextmanager
async def running(
    settings: StackSettings, forks: Begun | None = None, ui: bool = False, scheduler: Program | None = None
) -> AsyncIterator[tuple[Stack, Path]]:
    """A stack from ready to ended, and its run folder, which stays. forks: its fork server, if it has been begun. ui:
    with the live page. scheduler: another program that schedules.

    Raises FailedPrecondition with the names of settings as the user gave them.
    """
    try:
        settings = settings.model_copy(update={"model": await found(settings.model)})
    except FailedPrecondition as error:
        raise FailedPrecondition(settings.said(str(error))) from None
    given = settings.run_dir
    folder = Path(given) if given is not None else new_run(StateSettings().runs)
    with console.status("starting") as status:

        def say(step: str) -> None:
            console.print(step, style="dim", soft_wrap=True)

        def show(reason: str) -> None:
            status.update(Text(reason))

        stack = Stack(settings, folder, say, show=show, forks=forks, ui=ui, scheduler=scheduler)
        try:
            try:
                await stack.start()
            except FailedPrecondition as error:
                raise FailedPrecondition(settings.said(str(error))) from None
            status.stop()
            yield stack, folder
        finally:
            began = stack.began
            if began:
                status.start()
                status.update("Ctrl-C again kills everything")
            try:
                await stack.stop()
            except asyncio.CancelledError:
                await stack.kill()
                raise Aborted(f"killed before all was drained; logs and journals: {folder}") from None
            finally:
                status.stop()
            if began:
                said = f"ended, nothing is left running; logs and journals: {folder}"
                console.print(said, style="dim", soft_wrap=True)
            elif given is None:
                shutil.rmtree(folder, ignore_errors=True)


async def found(model: str | None) -> str | None:
    """A model's folder. One of the hub is downloaded first; the hub's library shows how far it is."""
    if model is None or Path(model).exists():
        return model
    if model not in shape_names() and not model.startswith((".", "/")):  # a path is never a name of the hub
        console.print(f"{model} is no folder here: asking the hub", style="dim", soft_wrap=True)
    return str(await in_thread(partial(resolve_model, model, check_type)))


async def serve(settings: StackSettings, forks: Begun | None = None, scheduler: Program | None = None) -> None:
    """Serves until it is cancelled. forks: the stack's fork server, if it has been begun. scheduler: another program
    that schedules."""
    async with running(settings, forks, settings.ui, scheduler) as (stack, folder):
        console.print(f"Orca serves {stack.model_name}", style="bold green", end="")
        console.print(f" in {stack.computed_by}")
        scheme = "https" if settings.tls_dir else "http"
        for address, http in zip(stack.grpc_addresses, stack.http_addresses, strict=True):
            console.print(f"  gRPC {address}   OpenAI API {scheme}://{http}/v1", soft_wrap=True)
        console.print(f"  run folder {folder}", soft_wrap=True)
        if not stack.reads_text:
            console.print("  no tokenizer.json: prompts are token ids, and answers have no text", soft_wrap=True)
        tried = example(stack.grpc_addresses[0], settings, text=stack.reads_text, chats=stack.chats)
        console.print(f"  try: {tried}", soft_wrap=True)
        if stack.ui_address is not None:
            console.print(f"  live page {scheme}://{stack.ui_address}", soft_wrap=True)
        await stack.wait()


def example(
    address: str, settings: StackSettings, program: str = sys.argv[0], *, text: bool = True, chats: bool = False
) -> str:
    """A command that calls the stack, as it can be pasted into the shell that `orca serve` was called from.

    text: the model has a tokenizer. chats: and a chat template.
    """
    called = os.path.abspath(program) if os.access(program, os.X_OK) and "/" in program else "orca"
    prompt = ["def main("] if text else ["--token-ids", "1,2,3", "--json"]
    command = [called, *(["chat"] if text and chats else ["generate", *prompt])]
    if address != USUAL_ADDRESS:  # `orca generate` finds a run by itself, but perhaps another one
        command += ["--address", address]
    if settings.tls_dir is not None:
        command += ["--tls-dir", str((Path(settings.tls_dir) / Role.CLIENT).absolute())]
    if settings.api_keys or settings.api_keys_file:
        command += ["--api-key-file", KEY_FILE]
    return shlex.join(command)


async def demo_of_kills(forks: Begun | None = None) -> None:
    """Serves a slow model for one stream, and shows how to kill what serves it. forks: as for `serve`."""
    from orca_cli import killing
    from orca_local.timed_model import make_timed_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_timed_model(Path(folder), killing.SECONDS)
        settings = ServeSettings.load(model=str(model), device="cpu", slots=1024, schedulers=2, port=0, http_port=0)
        async with running(settings, forks) as (stack, run_dir):
            watched = await killing.play(stack.grpc_addresses, run_dir, console)
    console.print(f"{watched.tokens} tokens came, each once; killed meanwhile: {', '.join(watched.killed) or 'none'}.")


async def demo(forks: Begun | None = None) -> None:
    """Serves the demo model for four requests, and shows which iterations they shared. forks: as for `serve`."""
    from orca_cli import demo as demonstration  # `orca serve` does without: it imports the client

    settings = ServeSettings.load(model=str(DEMO_MODEL), dtype="float32", device="cpu", slots=1024, port=0, http_port=0)
    async with running(settings, forks) as (stack, folder):
        actors = await demonstration.play(stack.grpc_addresses, console)
    console.print(demonstration.iteration_table(actors, demonstration.batches(folder)))
    console.print(demonstration.LEGEND, markup=True)
