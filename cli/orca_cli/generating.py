"""Carries out `orca generate`: sends all prompts at once, and shows their events."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orca_client import (
    Accepted,
    AsyncOrcaClient,
    Event,
    Finished,
    FinishReason,
    OrcaError,
    Token,
    Unauthenticated,
    Unreachable,
    message_of,
)
from orca_client import Prompt as PromptEvent
from orca_client.reach import NOBODY

from .stdout import drop

Prompt = str | list[int] | list[dict[str, str]]  # text, token ids, or the messages of a chat
HELLO_TIMEOUT = 5.0  # seconds for the first answer of an endpoint; later outages are waited out
PANEL_WIDTH = 40  # columns that each of several prompts gets at least


async def generate_all(
    addresses: Sequence[str],
    prompts: Sequence[Prompt],
    arguments: dict[str, Any],
    as_json: bool,
    secrets: dict[str, Any] | None = None,
) -> list[str]:
    """Runs all prompts at once. Returns a sentence for each that failed. Ctrl-C cancels all requests.

    secrets: the client's `credentials` and `api_key`, if it needs them.
    """
    failures: dict[int, str] = {}
    unwritten = ""

    async def one(client: AsyncOrcaClient, n: int, prompt: Prompt, output: Output) -> None:
        try:
            async with client.generate(prompt, **arguments) as stream:
                async for event in stream:
                    output.show(n, stream.request_id, event)
            if stream.finished is not None and stream.finished.reason is FinishReason.CANCELLED:
                failures[n] = f"request {stream.request_id} was cancelled"
        except OrcaError as error:
            failures[n] = str(error)
        output.end(n)

    try:
        made = AsyncOrcaClient(addresses, fail_fast=True, **secrets or {})
    except OrcaError as error:  # not an address
        return [str(error).replace("addresses:", "--address:", 1)]
    async with made as client:
        try:
            spells = (await client.get_model(timeout=HELLO_TIMEOUT, model=arguments.get("model", ""))).has_tokenizer
        except Unauthenticated as error:
            return [f"{', '.join(addresses)}: {error} (--api-key-file FILE)"]
        except Unreachable as error:
            return [f"{error}; `orca serve` starts a server" if str(error).endswith(NOBODY) else str(error)]
        except OrcaError as error:
            said = "" if error.answered else "no answer from "
            return [f"{said}{', '.join(addresses)}: {error}"]
        output = output_for(prompts, spells, as_json)
        try:
            async with asyncio.TaskGroup() as group:
                for n, prompt in enumerate(prompts):
                    group.create_task(one(client, n, prompt, output))
        except* BrokenPipeError:
            unwritten = "was closed by its reader"
        except* OSError as errors:
            unwritten = f"cannot be written ({strerror(errors)})"
        finally:
            if unwritten:
                drop()
            output.close()
    if unwritten:
        return [f"stdout {unwritten}; the requests were cancelled"]
    return told_once(failures, len(prompts))


def strerror(errors: ExceptionGroup[OSError]) -> str | None:
    """Returns why output could not be written, by the first of the errors."""
    first = errors.exceptions[0]
    return first.strerror if isinstance(first, OSError) else str(first)


def told_once(failures: dict[int, str], count: int) -> list[str]:
    """Each sentence once, with the prompts, of `count`, that it is about: a server's death ends all of them alike."""
    if count == 1:
        return list(failures.values())
    about: dict[str, list[int]] = {}
    for n in sorted(failures):
        about.setdefault(failures[n], []).append(n + 1)
    return [
        f"{'prompt' if len(numbers) == 1 else 'prompts'} {', '.join(map(str, numbers))}: {sentence}"
        if len(numbers) < count
        else f"all {count} prompts: {sentence}"
        for sentence, numbers in about.items()
    ]


# -- what is shown


class Output(Protocol):
    """Shows the events of all prompts. `n` is a prompt's position on the command line."""

    def show(self, n: int, request_id: str, event: Event) -> None: ...

    def end(self, n: int) -> None:
        """The prompt has ended, with or without an error."""
        ...

    def close(self) -> None: ...


def output_for(prompts: Sequence[Prompt], spells: bool, as_json: bool) -> Output:
    if as_json:
        return JsonLines()
    if len(prompts) > 1 and sys.stdout.isatty():
        return Panels(prompts, spells, Console())
    return Blocks(prompts, spells)


def piece(event: Event, spells: bool) -> str:
    """The text of an event. For a model without a tokenizer (`spells` is False), the token's id."""
    match event:
        case Accepted() | PromptEvent():
            return ""
        case Token() if not spells:
            return f"{' ' if event.index else ''}{event.token_id}"
        case Token() | Finished():
            return event.text


def title(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    last = prompt[-1] if prompt else 0
    return last["content"] if isinstance(last, dict) else ",".join(map(str, prompt))


class JsonLines:
    """Prints every event as it comes, as a line of JSON."""

    def show(self, n: int, request_id: str, event: Event) -> None:
        message = message_of(event)
        name = type(event).__name__.lower()
        if isinstance(event, PromptEvent):
            fields = MessageToDict(message, preserving_proto_field_name=True)
            print(json.dumps({"request_id": request_id, **fields}, ensure_ascii=False), flush=True)
            return
        fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        ordered = {field.name: fields[field.name] for field in message.DESCRIPTOR.fields if field.name in fields}
        print(json.dumps({"request_id": request_id, name: ordered}, ensure_ascii=False), flush=True)

    def end(self, n: int) -> None:
        pass

    def close(self) -> None:
        pass


class Blocks:
    """Prints plain text in the prompts' order: the first unfinished one as it comes, later ones after its end."""

    def __init__(self, prompts: Sequence[Prompt], spells: bool) -> None:
        self._prompts, self._spells = prompts, spells
        self._shown = 0  # the prompt whose text is written as it comes
        self._waiting = [""] * len(prompts)  # text not yet written
        self._ended = [False] * len(prompts)
        self._last = ""  # what was last written
        self._head(0)

    def show(self, n: int, request_id: str, event: Event) -> None:
        self._waiting[n] += piece(event, self._spells)
        if n == self._shown:
            self._write(n)

    def end(self, n: int) -> None:
        self._ended[n] = True
        while self._shown < len(self._prompts) and self._ended[self._shown]:
            self._finish_line()
            self._shown += 1
            if self._shown < len(self._prompts):
                self._head(self._shown)
                self._write(self._shown)

    def close(self) -> None:
        self._finish_line()

    def _head(self, n: int) -> None:
        if len(self._prompts) > 1:
            self._print(f"{chr(10) if n else ''}==> {title(self._prompts[n])} <==\n")

    def _write(self, n: int) -> None:
        text, self._waiting[n] = self._waiting[n], ""
        self._print(text)

    def _finish_line(self) -> None:
        if self._last and not self._last.endswith("\n"):
            self._print("\n")

    def _print(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._last = text


class Panels:
    """Shows a panel for each prompt, as many side by side as the terminal has room for."""

    def __init__(self, prompts: Sequence[Prompt], spells: bool, console: Console) -> None:
        self._spells = spells
        self._columns = max(1, min(len(prompts), console.width // PANEL_WIDTH))
        self._texts = [Text(title(prompt), style="dim") for prompt in prompts]
        self._states = ["sending"] * len(prompts)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=12)
        self._live.start()

    def show(self, n: int, request_id: str, event: Event) -> None:
        self._texts[n].append(piece(event, self._spells), style="not dim")
        match event:
            case Accepted():
                self._states[n] = f"{event.queue_position} before it" if event.queue_position else "accepted"
            case Token():
                self._states[n] = f"{event.index + 1} tokens"
            case Finished():
                self._states[n] = f"{event.output_tokens} tokens, {event.reason}"

    def end(self, n: int) -> None:
        if "," not in self._states[n]:
            self._states[n] += ", failed"

    def close(self) -> None:
        self._live.vertical_overflow = "visible"  # so that the last picture is complete, however long
        self._live.stop()

    def _render(self) -> Table:
        panels = [Panel(text, subtitle=state) for text, state in zip(self._texts, self._states, strict=True)]
        grid = Table.grid(expand=True)
        for _ in range(self._columns):
            grid.add_column(ratio=1)
        for first in range(0, len(panels), self._columns):
            grid.add_row(*panels[first : first + self._columns])
        return grid
