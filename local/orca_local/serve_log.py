"""`logs/serve.log`: the messages of `orca serve` itself, in the form of the other logs, with deaths of processes."""

import logging
from pathlib import Path

from orca_common.logs import JsonFormatter

from .redis_log import append

formatter = JsonFormatter("orca-serve")


def write(log: Path, sentence: str, level: int) -> None:
    """Appends a sentence. A full disk loses it, and ends nothing."""
    append(log, [formatter.format(logging.LogRecord("serve", level, "", 0, "%s", (sentence,), None))])
