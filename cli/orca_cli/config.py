"""Prints for `orca config`: settings as a TOML file, with the origin of each value as a comment."""

import json
from collections.abc import Sequence

from orca_common.settings import Settings, without_password


def listing(settings: Settings, arguments: Sequence[str]) -> str:
    """The effective settings, one line each; `arguments` are those that the settings were loaded with.

    A setting without a value is a comment. Passwords in URLs are not shown.
    """
    origins = settings.origins(arguments)
    lines = []
    for name, value in settings.model_dump(mode="json", exclude={"config"}).items():
        said = without_password(value) if isinstance(value, str) else value
        shown = f"{name} = {json.dumps(said)}" if value is not None else f"# {name} is not set"
        lines.append(f"{shown:<40} # {origins[name]}")
    return "\n".join(lines)
