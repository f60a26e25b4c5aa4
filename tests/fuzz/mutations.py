"""Changes of an input: of its bytes, of its JSON, of two inputs joined. All from one seeded generator."""

import json
import random
from collections.abc import Sequence
from typing import Any

LARGEST = 1 << 16  # bytes of an input
NUMBERS = (
    0,
    1,
    -1,
    2,
    127,
    128,
    255,
    256,
    65535,
    1 << 24,
    1 << 31,
    (1 << 32) - 1,
    1 << 53,
    1 << 63,
    -(1 << 63),
    10**30,
)
WORDS = (
    b"",
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"null",
    b"1e400",
    b"NaN",
    b"-0",
    b"\\ud800",
    b"\xed\xa0\x80",
)
VALUES = (None, True, False, 0.5, 1e308, -0.0, "", "a", "\0", "\ud83d\ude00", "x" * 3000, [], {}, [[]], [None])


def mutated(raw: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """A changed input. Half of the JSON stays JSON."""
    if chance.random() < 0.5:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            pass
        else:
            for _ in range(chance.choice((1, 1, 2, 4))):
                value = _value(value, chance)
            return _dumped(value)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        raw = _bytes(raw, others, chance)
    return raw[:LARGEST]


def _dumped(value: Any) -> bytes:
    """Its JSON, as far as it is an input: what was repeated in what was repeated would fill the memory."""
    text = ""
    for part in json.JSONEncoder().iterencode(value):
        text += part
        if len(text) >= LARGEST:
            break
    return text.encode("utf-8", "surrogatepass")[:LARGEST]


def _bytes(raw: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    at = chance.randint(0, len(raw))
    end = min(len(raw), at + chance.choice((1, 2, 4, 16, 200)))
    match chance.randrange(7):
        case 0:  # a bit
            return raw[:at] + bytes(byte ^ 1 << chance.randrange(8) for byte in raw[at : at + 1]) + raw[at + 1 :]
        case 1:  # some bytes
            return raw[:at] + chance.randbytes(end - at) + raw[end:]
        case 2:  # less
            return raw[:at] + raw[end:]
        case 3:  # again
            return raw[:end] + raw[at:end] * chance.choice((1, 2, 50)) + raw[end:]
        case 4:  # a word, or a number in some form
            return raw[:at] + (chance.choice(WORDS) if chance.random() < 0.5 else _number(chance)) + raw[at:]
        case 5:  # a part of another input
            other = chance.choice(others)
            return raw[:at] + other[chance.randint(0, len(other)) :]
        case _:  # cut
            return raw[:at]


def _number(chance: random.Random) -> bytes:
    number = chance.choice(NUMBERS)
    if chance.random() < 0.5:
        return str(number).encode()
    return (number % (1 << 64)).to_bytes(8, chance.choice(("little", "big")))


def _value(value: Any, chance: random.Random) -> Any:
    """A JSON value, changed at one place."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        match chance.randrange(4):
            case 0:
                return {key: inner for key, inner in value.items() if key != name}
            case 1:
                return {**value, chance.choice((name + "x", "", "type", "\0")): value[name]}
            case _:
                return {**value, name: _value(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        match chance.randrange(4):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value + [value[at]] * chance.choice((1, 10, 1000))
            case _:
                return [*value[:at], _value(value[at], chance), *value[at + 1 :]]
    match chance.randrange(4):
        case 0:
            return chance.choice(NUMBERS)
        case 1:
            return [value] * chance.choice((1, 2, 100))
        case 2:
            return {"a": value}
        case _:
            return chance.choice(VALUES)
