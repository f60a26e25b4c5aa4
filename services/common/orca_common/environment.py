"""Variables that are no settings, and the environment of child processes.

It imports nothing slow: a process may begin its children before all else.
"""

import os
from collections.abc import Mapping

PREFIX = "ORCA_"  # of the variables that are settings
# C-core would write plain lines into the JSON log, for example one for each compressed call of a stranger. Services see
# errors as statuses. A value in the environment has precedence.
VERBOSITY = {"GRPC_VERBOSITY": "NONE"}


def child_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: this process's own without its `ORCA_*`, and the child's settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
    return {**VERBOSITY, **inherited, **settings}


def own_pod() -> str | None:
    """The name of this process's own pod, where the pod's manifest gives it as ORCA_OWN_POD."""
    return os.environ.get(f"{PREFIX}OWN_POD")


def take(settings: Mapping[str, str]) -> None:
    """Adds settings to the environment of a process that was forked before its settings were known."""
    os.environ.update(settings)


def quiet_grpc() -> None:
    """Keeps C-core's lines out of this process's log. Comes before gRPC is imported: C-core reads its level then."""
    for name, value in VERBOSITY.items():
        os.environ.setdefault(name, value)
