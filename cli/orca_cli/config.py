"""What `orca config` prints: settings as a TOML file, with the origin of each value as a comment."""

import json
import re
from collections.abc import Sequence

from orca_common.settings import Settings

PASSWORD = re.compile(r"(?<=://)[^/]*@")  # with the user's name, in a URL


def listing(settings: Settings, arguments: Sequence[str]) -> str:
    """The effective settings, one line each; `arguments` are those that the settings were loaded with.

    A setting without a value is a comment. Passwords in URLs are not shown.
    """
    origins = settings.origins(arguments)
    lines = []
    for name, value in settings.model_dump(mode="json", exclude={"config"}).items():
        shown = f"{name} = {json.dumps(value)}" if value is not None else f"# {name} is not set"
        lines.append(f"{PASSWORD.sub('***@', shown):<40} # {origins[name]}")
    return "\n".join(lines)
