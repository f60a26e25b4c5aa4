"""`orca serve` and `orca demo`: a stack from its first process to its last, and what the terminal shows of it."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from orca_cli import demo as demonstration
from orca_common.checkpoint import resolve_model
from orca_common.roles import Role
from orca_common.service import in_thread
from orca_local.run_folder import new_run
from orca_local.settings import ServeSettings, StackSettings, StateSettings
from orca_local.stack import DEMO_MODEL, Stack

console = Console(highlight=False, markup=False)


@contextlib.asynccontextmanager
async def running(settings: StackSettings) -> AsyncIterator[tuple[Stack, Path]]:
    """A stack from ready to ended, and its run folder, which stays."""
    settings = settings.model_copy(update={"model": await found(settings.model)})
    given = settings.run_dir
    folder = Path(given) if given is not None else new_run(StateSettings().runs)
    with console.status("starting") as status:

        def say(step: str) -> None:
            console.print(step, style="dim", soft_wrap=True)

        def show(reason: str) -> None:
            status.update(Text(reason))

        stack = Stack(settings, folder, say, show=show)
        try:
            await stack.start()
            status.stop()
            yield stack, folder
        finally:
            began = stack.began
            status.start()
            status.update("draining; Ctrl-C again kills everything")
            try:
                await stack.stop()
            except asyncio.CancelledError:
                stack.kill()
                say("killed")
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
    if not model.startswith((".", "/")):  # a path is never a name of the hub
        console.print(f"{model} is no folder here: asking the hub", style="dim", soft_wrap=True)
    return str(await in_thread(partial(resolve_model, model)))


async def serve(settings: StackSettings) -> None:
    """Serves until it is cancelled."""
    async with running(settings) as (stack, folder):
        console.print(f"Orca serves {stack.model_name}", style="bold green", end="")
        console.print(f" in {stack.computed_by}")
        scheme = "https" if settings.tls_dir else "http"
        for address, http in zip(stack.grpc_addresses, stack.http_addresses, strict=True):
            console.print(f"  gRPC {address}   OpenAI API {scheme}://{http}/v1", soft_wrap=True)
        console.print(f"  run folder {folder}", soft_wrap=True)
        options = f"--address {stack.grpc_addresses[0]}"
        if settings.tls_dir:
            options += f" --tls-dir {Path(settings.tls_dir) / Role.CLIENT}"
        console.print(f"  try: orca generate 'def main(' {options}", soft_wrap=True)
        await stack.wait()


async def demo() -> None:
    """Serves the demo model for four requests, and shows which iterations they shared."""
    settings = ServeSettings.load(model=str(DEMO_MODEL), dtype="float32", device="cpu", slots=1024, port=0, http_port=0)
    async with running(settings) as (stack, folder):
        actors = await demonstration.play(stack.grpc_addresses, console)
    console.print(demonstration.iteration_table(actors, demonstration.batches(folder)))
    console.print(demonstration.LEGEND, markup=True)
