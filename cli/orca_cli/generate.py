"""`orca generate`: prompts in, tokens out as they come.

One prompt streams as plain text. Several run at once: side by side on a terminal, else one block after the other.
`--json` prints every event as one line: its message of `orca.v1` in protobuf's JSON, with the contract's field names:

    {"request_id": "..", "accepted": {"request_id": "..", "input_tokens": 4, "queue_position": 0}}
    {"request_id": "..", "token": {"index": 0, "token_id": 17, "text": " a", "iteration": "8", "engine": "engine-0"}}
    {"request_id": "..", "finished": {"reason": "FINISH_REASON_LENGTH", "output_tokens": 64, "text": "", ..}}

Exit codes: 0; 1 with a sentence on stderr for each request that failed; 2 for a wrong command line; 130 after Ctrl-C.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

USUAL_ADDRESS = "127.0.0.1:50051"


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts. Without one, or for -, the prompt is read from stdin.")
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option(
            help="An endpoint, host:port; those of the run here, or 127.0.0.1:50051, if not given. May be repeated."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="Tokens to generate at most.")
    ] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this total share.")
    ] = None,
    min_p: Annotated[
        float,
        typer.Option(min=0, max=1, help="Drop tokens less likely than this share of the likeliest one's probability."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: fewer tokens of the prompt and the output again.")
    ] = None,
    presence_penalty: Annotated[float, typer.Option(help="Above 0: fewer tokens of the output again.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same for each time that a token came.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help='Added to a token\'s logit, as in "17=-100". May be repeated.')
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema: the answer is JSON that it describes.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this regular expression.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="File with a grammar in llguidance's variant of Lark: the answer follows it.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed draws the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the generation. May be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-sequence token.")] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: the log probability of each token.")
    ] = False,
    top_logprobs: Annotated[
        int, typer.Option(min=0, help="With --json: so many of the likeliest tokens at each place.")
    ] = 0,
    prompt_logprobs: Annotated[
        bool, typer.Option("--prompt-logprobs", help="With --json: the prompt's tokens and their log probabilities.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per event.")] = False,
    token_ids: Annotated[str | None, typer.Option(help='A prompt as token ids, as in "1,2,3".')] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message, for the model's chat template.")
    ] = False,
    system: Annotated[str, typer.Option(help="With --chat: the system's message before it.")] = "",
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds that each request may take.")] = None,
    model: Annotated[str, typer.Option(help="The model, where several are served at one address.")] = "",
    tls_dir: Annotated[
        Path | None, typer.Option(help="Folder with ca.crt, and a client's tls.crt and tls.key, as of `orca certs`.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key; a command line would show it to others.")
    ] = None,
) -> None:
    """Generates text for one or several prompts."""
    shown = {"--logprobs": logprobs, "--top-logprobs": top_logprobs, "--prompt-logprobs": prompt_logprobs}
    for option, given_option in shown.items():
        if given_option and not as_json:
            raise typer.BadParameter("is shown only with --json", param_hint=option)
    if system and not chat:
        raise typer.BadParameter("goes only with --chat", param_hint="--system")
    if chat and token_ids is not None:
        raise typer.BadParameter("is no message of a chat", param_hint="--token-ids")
    given = prompts_of(prompts or [], token_ids)
    if chat:
        given = [messages_of(system, str(prompt)) for prompt in given]
    arguments = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": biases_of(logit_bias or []),
        "json_schema": read_form(json_schema, "--json-schema"),
        "regex": regex,
        "grammar": read_form(grammar, "--grammar"),
        "seed": seed,
        "stop": stop or (),
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
        "top_logprobs": top_logprobs,
        "prompt_logprobs": prompt_logprobs,
        "timeout": timeout,
        "model": model,
    }
    from orca_cli.generating import generate_all  # it imports the client, which other commands do without

    secrets = secrets_of(tls_dir, api_key_file)
    try:
        failures = asyncio.run(generate_all(address or addresses_here(), given, arguments, as_json, secrets))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    for failure in failures:
        typer.echo(failure, err=True)
    if failures:
        raise typer.Exit(1)


def addresses_here() -> list[str]:
    """The gRPC doors of the `orca serve` that runs on this machine; the usual one where none does."""
    with suppress(ImportError):  # no service is installed here
        from orca_cli import runs

        return runs.doors() or [USUAL_ADDRESS]
    return [USUAL_ADDRESS]


def secrets_of(tls_dir: Path | None, api_key_file: Path | None) -> dict[str, Any]:
    """The client's `credentials` and `api_key`. Raises Exit with a sentence for a file that cannot be read."""
    from orca_client import tls_credentials

    option = "--tls-dir"
    try:
        credentials = tls_credentials(tls_dir) if tls_dir is not None else None
        option = "--api-key-file"
        return {"credentials": credentials, "api_key": read_key(api_key_file) if api_key_file is not None else None}
    except OSError as error:
        typer.echo(f"{option}: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(1) from None


def messages_of(system: str, user: str) -> list[dict[str, str]]:
    """A conversation that begins: the system's message, unless it is empty, and the user's."""
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": user}]


def prompts_of(prompts: Sequence[str], token_ids: str | None) -> list[Any]:
    """The prompts of a command line. A line break at the very end of stdin is not part of the prompt."""
    if token_ids is not None:
        if prompts:
            raise typer.BadParameter("takes the place of a prompt: give one of the two", param_hint="--token-ids")
        try:
            return [[int(part) for part in token_ids.split(",")]]
        except ValueError:
            raise typer.BadParameter('must be numbers and commas, as in "1,2,3"', param_hint="--token-ids") from None
    if prompts.count("-") > 1:
        raise typer.BadParameter("stdin can be read only once", param_hint="PROMPTS")
    for prompt in prompts:
        if any("\udc80" <= letter <= "\udcff" for letter in prompt):  # what Python makes of other bytes
            raise typer.BadParameter("a prompt is not UTF-8", param_hint="PROMPTS")
    return [read_prompt() if prompt == "-" else prompt for prompt in prompts or ["-"]]


def biases_of(given: Sequence[str]) -> dict[int, float]:
    """Token id -> bias, of options such as "17=-100"."""
    try:
        pairs = [part.split("=") for part in given]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        raise typer.BadParameter('must be TOKEN_ID=BIAS, as in "17=-100"', param_hint="--logit-bias") from None


def read_form(file: Path | None, option: str) -> str | None:
    """The text of a schema's or a grammar's file."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint=option) from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{file} is not UTF-8", param_hint=option) from None


def read_key(file: Path) -> str:
    """The API key of a file. gRPC would fail with a traceback on what cannot be one, as on all that `orca key` says."""
    key = file.read_text(errors="replace").strip()
    if not (key.isascii() and key.isprintable() and len(key.split()) == 1):
        raise typer.BadParameter(f"{file} must hold an API key alone", param_hint="--api-key-file")
    return key


def read_prompt() -> str:
    if sys.stdin.isatty():
        typer.echo("the prompt, until Ctrl-D:", err=True)
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        typer.echo(f"the prompt on stdin is not UTF-8: {error}", err=True)
        raise typer.Exit(1) from None
