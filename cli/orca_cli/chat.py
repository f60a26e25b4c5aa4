"""`orca chat`: a conversation with a model in the terminal.

Exit codes: 0 at its end; 1 with a sentence on stderr when the server cannot be called; 2 for a wrong command line.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .generate import addresses_here, secrets_of


def chat(
    address: Annotated[
        list[str] | None,
        typer.Option(
            help="An endpoint, host:port; those of the run here, or 127.0.0.1:50051, if not given. May be repeated."
        ),
    ] = None,
    system: Annotated[str, typer.Option(help="The system's message, with which the conversation begins.")] = "",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "--max-tokens",
            min=1,
            help="Tokens of an answer at most; what the model says if not given.",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; what the model says, or 1, if not given.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this total share.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed draws the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer. May be repeated.")] = None,
    template_kwargs: Annotated[
        str | None, typer.Option(help="Variables for the chat template, as '{\"enable_thinking\": false}'.")
    ] = None,
    model: Annotated[str, typer.Option(help="The model, where several are served at one address.")] = "",
    tls_dir: Annotated[
        Path | None, typer.Option(help="Folder with ca.crt, and a client's tls.crt and tls.key, as of `orca certs`.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key; a command line would show it to others.")
    ] = None,
) -> None:
    """Talks with a model. Ctrl-C cancels an answer; at the prompt it ends the conversation, as Ctrl-D does."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    arguments = {name: value for name, value in given.items() if value is not None}
    arguments |= {"max_new_tokens": max_new_tokens or 0, "stop": stop or (), "model": model}
    arguments["template_kwargs"] = variables_of(template_kwargs)
    from orca_cli.chatting import talk  # it imports the client, which other commands do without

    failure = talk(address or addresses_here(), system, arguments, secrets_of(tls_dir, api_key_file))
    if failure is not None:
        typer.echo(failure, err=True)
        raise typer.Exit(1)


def variables_of(given: str | None) -> dict[str, Any] | None:
    """The object of a text of JSON."""
    if given is None:
        return None
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter("must be a JSON object", param_hint="--template-kwargs")
    return found
