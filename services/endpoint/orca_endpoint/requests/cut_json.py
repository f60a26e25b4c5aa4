"""Closes an object of JSON whose text was cut, as `max_tokens` cuts the arguments of a call."""

import re

CLOSERS = {"{": "}", "[": "]"}
PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # two escapes for one character
TEXT = re.compile(
    rf'"(?:[^"\\]|\\[^u]|{PAIR}|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}})*'
)  # of a string, as far as it is whole


def closed(text: str) -> str:
    """The text of an object with all of the cut one that is whole in it, and the beginning of a string that is a value.

    Raises ValueError for any other text.
    """
    open_now, whole, open_then = list[str](), 0, list[str]()  # `whole` characters and these closers are JSON
    quoted, start, escaped, is_value = False, 0, False, False
    for n, character in enumerate(text):
        if quoted:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                quoted = False
                whole, open_then = (n + 1, open_now[:]) if is_value else (whole, open_then)
        elif character == '"':
            quoted, start, is_value = True, n, is_value or open_now[-1:] == ["]"]
        elif character in CLOSERS:
            open_now.append(CLOSERS[character])
            whole, open_then, is_value = n + 1, open_now[:], False
        elif character in "}]" and open_now:
            open_now.pop()
            whole, open_then = n + 1, open_now[:]
        elif character == ":":
            is_value = True
        elif character == ",":
            whole, open_then, is_value = n, open_now[:], False
    if not text.lstrip().startswith("{") or not open_now:
        raise ValueError("it is no object that was cut")
    if quoted and is_value:
        said = TEXT.match(text, start)
        return text[: said.end() if said else len(text)] + '"' + "".join(reversed(open_now))
    return text[:whole] + "".join(reversed(open_then))
