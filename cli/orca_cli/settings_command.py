"""Commands whose options are settings. A shell that asks for completions gets the settings and their choices."""

import inspect
from importlib import import_module
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

KINDS = {  # command -> its settings
    "serve": "orca_local.settings.ServeSettings",
    "endpoint": "orca_endpoint.settings.EndpointSettings",
    "scheduler": "orca_scheduler.settings.SchedulerSettings",
    "worker": "orca_worker.settings.SupervisorSettings",
    "ui": "orca_ui.settings.UiSettings",
}


def settings_of(command: str) -> Any:
    """The class of a command's settings. Imports what it needs, which may not be installed."""
    module, _, name = KINDS[command].rpartition(".")
    return getattr(import_module(module), name)


def redis_url_of(flag: str | None) -> str | None:
    """The Redis that a command asks by itself, from its flag or from the settings; None where neither names one.

    Raises SystemExit for a flag with a password: everybody could read it in the list of processes.
    """
    from orca_common.settings import PoolSettings

    arguments = [] if flag is None else ["--redis-url", flag]
    settings = PoolSettings.load(arguments)
    return None if settings.origins(arguments)["redis_url"] == "default" else settings.redis_url


class SettingsCommand(TyperCommand):
    """Leaves its arguments to the settings, which know more than the shell's completion and --help ask for."""

    shows_help = False

    def get_params(self, ctx: Any) -> list[Any]:
        known = super().get_params(ctx)
        if ctx.resilient_parsing:  # which is how a shell asks
            kind = settings_of(ctx.info_name if ctx.info_name in KINDS else "serve")
            return [*known, *_options(kind, negatives=True)]
        if self.shows_help and ctx.info_name in KINDS:
            return [*_options(settings_of(ctx.info_name)), *known]
        return known

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from orca_common.settings import EPILOG

        self.shows_help, self.epilog = True, EPILOG
        super().format_help(ctx, formatter)


def _options(kind: Any, negatives: bool = False) -> list[Any]:
    """Settings as options of Typer. negatives: with the --no- of switches, which help has in their sentence."""
    from orca_common.settings import heading_of

    def command(**settings: object) -> None: ...

    types = get_type_hints(kind)  # without the bounds, which `Positive | None` has inside
    options = {
        name: _option(name, field, types[name], heading_of(kind, name), negatives)
        for name, field in kind.model_fields.items()
    }
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in options.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = options
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return [param for param in typer.main.get_command(app).params if param.name in options]


def _option(name: str, field: Any, kind: Any, heading: str, negatives: bool) -> Any:
    """A setting as an option, which is shown below the heading of the others of its class."""
    flag = "--" + name.replace("_", "-")
    value = "none" if field.default is None else str(field.default).lower() if kind is bool else field.default
    notes = ["required" if field.is_required() else f"default: {value}"]
    choices = [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []
    if choices:
        notes.append(f"one of {', '.join(choices)}")
    negative = f"--no-{flag[2:]}"
    if kind is bool:
        notes.append(negative)
    shown: Any = {
        "help": f"{field.description} ({'; '.join(notes)})",
        "rich_help_panel": heading.capitalize(),
        "show_default": False,
    }
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/{negative}" if negatives else flag, **shown)]
    word = "INTEGER" if int in (kind, *get_args(kind)) else "NUMBER" if kind is float else "TEXT"
    return Annotated[str | None, typer.Option(flag, metavar=word, autocompletion=lambda: choices, **shown)]
