"""The environment of child processes. It imports nothing slow: a process may begin its children before all else."""

import os
from collections.abc import Mapping

PREFIX = "ORCA_"  # of the variables that are settings
VERBOSITY = {"GRPC_VERBOSITY": "ERROR"}


def child_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: this process's own without its `ORCA_*`, and the child's settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
    return {**VERBOSITY, **inherited, **settings}


def take(settings: Mapping[str, str]) -> None:
    """Adds settings to this process's environment: one that was forked, and learns afterwards what it is."""
    os.environ.update(settings)
