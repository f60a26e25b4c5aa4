"""Carries out `orca chat`: reads a line, shows the answer as it comes, and remembers both."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

from orca_client import Cancelled, Finished, Message, OrcaClient, OrcaError, Stream, Token, Unauthenticated, Unreachable

from .generating import HELLO_TIMEOUT

PROMPT = "> "
COMMANDS = {"/help": "shows this", "/clear": "forgets the conversation", "/exit": "ends it, as Ctrl-D does"}
HELP = "\n".join(f"{name:<8}{what}" for name, what in COMMANDS.items())


def talk(
    addresses: Sequence[str], system: str, arguments: dict[str, Any], secrets: dict[str, Any] | None = None
) -> str | None:
    """Talks until the user ends it. Returns a sentence when the server cannot be called.

    arguments: of `generate`; what is missing is what the model says of sampling. secrets: the client's `credentials`
    and `api_key`, if it needs them.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  # `input` then edits lines, and remembers them
    try:
        client = OrcaClient(addresses, fail_fast=True, **secrets or {})
    except OrcaError as error:  # not an address
        return str(error).replace("addresses:", "--address:", 1)
    with client:
        try:
            model = client.get_model(timeout=HELLO_TIMEOUT, model=arguments["model"])
        except Unauthenticated as error:
            return f"{error} (--api-key-file FILE)"
        except Unreachable as error:
            return f"{error}; `orca serve` starts a server"
        except OrcaError as error:
            return str(error)
        if not model.has_chat_template:
            return f"{model.name} has no chat template; `orca generate` completes prompts"
        arguments = {**model.sampling_defaults, **arguments}
        beginning: list[Message] = [{"role": "system", "content": system}] if system else []
        messages, here = beginning, sys.stdin.isatty()
        if here:
            print(f"{model.name}, at {', '.join(addresses)}. Ctrl-C cancels an answer; /help shows what else there is.")
        while (line := read_line()) is not None:
            command = line.strip()
            if not command:
                continue
            if here and command.startswith("/"):  # from a file it is a message
                if command in ("/exit", "/bye", "/quit"):
                    return None
                messages = beginning if command == "/clear" else messages
                print("forgotten" if command == "/clear" else HELP)
                continue
            asked: list[Message] = [*messages, {"role": "user", "content": line}]
            try:
                text = answer(client, asked, arguments)
            except Unreachable as error:
                return str(error)
            except OrcaError as error:  # the message is forgotten: another one may be possible
                print(error, file=sys.stderr)
            except KeyboardInterrupt:  # while the answer was being cancelled
                print()
                return None
            else:
                messages = [*asked, {"role": "assistant", "content": text}]
    return None


def read_line() -> str | None:
    """The user's next line; None at the end. A line that is no UTF-8 ends the conversation, too."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one, while the client closes, would end in a traceback
    except EOFError:
        pass
    if sys.stdin.isatty():
        print()
    return None


def answer(client: OrcaClient, messages: Sequence[Message], arguments: dict[str, Any]) -> str:
    """Shows the answer as it comes, and returns its text: a part of it where Ctrl-C has cancelled the rest."""
    pieces: list[str] = []
    with client.generate(messages, **arguments) as stream, cancelled_by_ctrl_c(stream) as cancelled:
        try:
            for event in stream:
                if isinstance(event, Token | Finished) and event.text:
                    pieces.append(event.text)
                    print(event.text, end="", flush=True)
        except Cancelled:
            if not cancelled.is_set():
                raise
    text = "".join(pieces)
    if cancelled.is_set():
        print(" (cancelled)")
    elif not text.endswith("\n"):
        print()
    return text


@contextmanager
def cancelled_by_ctrl_c(stream: Stream) -> Iterator[Event]:
    """Lets Ctrl-C cancel an answer, and a second one raise KeyboardInterrupt. The event is set when it was cancelled.

    The first one raises nothing: a KeyboardInterrupt in a library's callback would be lost.
    """
    cancelled = Event()

    def cancel() -> None:
        with suppress(OrcaError):
            stream.cancel()
        stream.detach()

    def interrupted(*_: object) -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt
        cancelled.set()
        Thread(target=cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield cancelled
    finally:
        signal.signal(signal.SIGINT, before)
