"""The lines of the embedded Redis in the form of all others: JSON, with time, level, service, logger and event."""

import asyncio
import logging
import re
from contextlib import suppress
from pathlib import Path

from orca_common.logs import JsonFormatter

from .run_folder import open_log

# "4711:M 22 Nov 2026 12:00:00.123 * Ready to accept connections": process and role, local time, level, event
LINE = re.compile(r"\d+:[A-Z] \d+ \w+ \d+ [\d:.]+ ([.*#-]) (.*)")
LEVELS = {".": logging.DEBUG, "-": logging.DEBUG, "*": logging.INFO, "#": logging.WARNING}
LONGEST = 1 << 16  # bytes of a line

formatter = JsonFormatter("redis")


def line_of(said: str) -> str:
    """A line of Redis as a line of the log. Its time is that of now."""
    known = LINE.fullmatch(said)
    level, event = (LEVELS[known[1]], known[2]) if known else (logging.INFO, said)
    record = logging.LogRecord("redis", level, "", 0, "%s", (event,), None)
    return formatter.format(record)


async def copy_lines(said: asyncio.StreamReader, log: Path) -> None:
    """Appends what Redis says to a log, until it has ended. A full disk loses lines, and ends nothing."""
    rest = b""
    while chunk := await said.read(LONGEST):
        *whole, rest = (rest + chunk).split(b"\n")
        lines = [line_of(line.decode(errors="replace").strip()) for line in whole if line.strip()]
        append(log, lines)
        rest = rest[-LONGEST:]


def append(log: Path, lines: list[str]) -> None:
    with suppress(OSError), open(open_log(log), "a") as file:
        file.writelines(line + "\n" for line in lines)
