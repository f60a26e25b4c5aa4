"""Commands whose options are settings. A shell that asks for completions gets the settings and their choices."""

import inspect
from importlib import import_module
from typing import Annotated, Any, Literal, get_args, get_origin

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
    """Leaves its arguments to the settings, which know more than the shell's completion asks for."""

    def get_params(self, ctx: Any) -> list[Any]:
        known = super().get_params(ctx)
        if not ctx.resilient_parsing:  # which is how a shell asks
            return known
        return [*known, *_options(settings_of(ctx.info_name if ctx.info_name in KINDS else "serve"))]


def _options(kind: Any) -> list[Any]:
    """Settings as options of Typer."""

    def command(**settings: object) -> None: ...

    options = {name: _option(name, field.annotation) for name, field in kind.model_fields.items()}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in options.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = options
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return [param for param in typer.main.get_command(app).params if param.name in options]


def _option(name: str, kind: Any) -> Any:
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}")]
    choices = [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []
    return Annotated[str | None, typer.Option(flag, autocompletion=lambda: choices)]
