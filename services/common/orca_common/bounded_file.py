"""Files that strangers wrote: only regular ones are read, of bounded size, and JSON of bounded depth."""

import json
import os
import stat
from pathlib import Path
from typing import Any, Never

from .errors import FailedPrecondition

SHOWN = 100  # characters of a value that a sentence repeats


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file. Raises FileNotFoundError, and FailedPrecondition with a sentence.

    A FIFO, a device or a directory is refused at once: a FIFO would be waited for until somebody writes to it.
    """
    try:
        with open(open_regular(path), "rb") as file:
            raw = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FailedPrecondition(f"model: {path} cannot be read ({error.strerror})") from None
    if len(raw) > limit:
        raise FailedPrecondition(f"model: {path} has more than {limit} bytes, which is the limit for it")
    return raw


def open_regular(path: Path) -> int:
    """Opens a regular file for reading, as a descriptor. Raises OSError, and FailedPrecondition for other files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FailedPrecondition(f"model: {path} is not a regular file")
    return descriptor


def json_object(raw: bytes | str, what: object) -> dict[str, Any]:
    """The JSON object of a text. Raises FailedPrecondition for anything else, NaN and deep nesting included."""
    try:
        found = json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        raise FailedPrecondition(f"model: {what} is nested too deeply") from None
    except ValueError as error:  # also of text that is not UTF-8, and of numbers with thousands of digits
        raise FailedPrecondition(f"model: {what} is not JSON ({str(error)[:SHOWN]})") from None
    if not isinstance(found, dict):
        raise FailedPrecondition(f"model: {what} holds {shown(found)}, not a JSON object")
    return found


def shown(value: object) -> str:
    """A value of JSON for a sentence."""
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= SHOWN else text[:SHOWN] + ".."
    return {"list": "a list", "dict": "an object"}.get(type(value).__name__, type(value).__name__)


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is no number of JSON")
