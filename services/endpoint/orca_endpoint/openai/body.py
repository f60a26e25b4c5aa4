"""Bodies of HTTP requests as JSON, with nothing left over in silence.

Readers raise InvalidArgument with the field's name for a wrong type.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from orca_common import strict_json
from orca_common.errors import InvalidArgument
from orca_common.spelling import suggestion

HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # a half of a surrogate pair, or the first of both
DIGITS = 10  # of the largest number that `whole` takes


def load(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises InvalidArgument unless it is standard JSON in UTF-8 whose names come once."""

    try:
        body = strict_json.loads(raw.decode())
    except UnicodeDecodeError:
        raise InvalidArgument("body", "not valid UTF-8") from None
    except strict_json.Doubled as doubled:
        raise InvalidArgument(text(doubled.name, "body"), "comes twice in one object") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("body", f"not valid JSON ({error})") from None
    if not isinstance(body, dict):
        raise InvalidArgument("body", "must be a JSON object")
    if HALF.search(raw):
        check_text(body)
    return body


def check_text(body: dict[str, Any]) -> None:
    """Raises InvalidArgument for characters that cannot be encoded, wherever they stand: JSON can spell half of a
    surrogate pair."""
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        at, value = left.pop()
        if isinstance(value, str):
            text(value, at)
        elif isinstance(value, list):
            left += [(f"{at}[{n}]", item) for n, item in enumerate(value) if isinstance(item, str | list | dict)]
        elif isinstance(value, dict):
            for name in value:
                text(name, at or "body")
            left += [(f"{at}.{name}".lstrip("."), item) for name, item in value.items()]


def check_names(given: Iterable[str], known: Collection[str], prefix: str = "") -> None:
    """Raises InvalidArgument for the first name that is not known."""
    for name in given:
        if name not in known:
            raise InvalidArgument(prefix + text(name, "body"), "is not known to Orca" + suggestion(name, known, prefix))


def get(body: Mapping[str, Any], name: str, kind: type, what: str, default: Any, field: str | None = None) -> Any:
    """A field of one type; `default` when it is absent."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidArgument(field or name, f"must be {what}")
    return value


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    return default if value is None else as_number(value, name)


def as_number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(field, "must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(field, "is too large") from None


def whole(text: str) -> int | None:
    """The number below 2^32 that a text of decimal digits spells; None: it spells none."""
    if not (text.isascii() and text.isdecimal()) or len(text.lstrip("0")) > DIGITS:
        return None
    found = int(text.lstrip("0") or "0")
    return found if found < 1 << 32 else None


def strings(value: Any, field: str) -> list[str]:
    """A string or a list of strings, as a list."""
    if isinstance(value, str):
        return [text(value, field)]
    if not isinstance(value, list):
        raise InvalidArgument(field, "must be a string or a list of strings")
    for n, item in enumerate(value):
        if not isinstance(item, str):
            raise InvalidArgument(f"{field}[{n}]", "must be a string")
    return [text(item, f"{field}[{n}]") for n, item in enumerate(value)]


def text(value: str, field: str) -> str:
    """Raises InvalidArgument for characters that cannot be encoded: JSON can spell half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(field, "not valid Unicode: it holds a lone surrogate") from None
    return value
