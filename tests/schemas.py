"""Random JSON schemas whose answers are short: strings, numbers and arrays have bounds."""

import random
from typing import Any

Schema = dict[str, Any]


def a_schema(draw: random.Random) -> Schema:
    """An object at the top, as callers mostly ask for."""
    return an_object(draw, 3)


def an_object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(["a", "name", "x y", "größe", "n1", "_", "list", 'q"q'], k=draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: a_value(draw, depth - 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def a_value(draw: random.Random, depth: int) -> Schema:
    kinds = [a_string, a_pattern, a_date, an_integer, a_number, an_enum, a_constant, a_boolean]
    if depth > 0:
        kinds += [an_object, an_array, a_choice, a_reference]
    return draw.choice(kinds)(draw, depth)


def a_string(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}


def a_pattern(draw: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": draw.choice(["^[a-z]{1,5}$", "^(yes|no)$", "^[0-9]{3}-[0-9]{2}$"])}


def a_date(draw: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": draw.choice(["date", "time", "uuid", "ipv4"])}


def an_integer(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 2000)}


def a_number(draw: random.Random, depth: int) -> Schema:
    return {"enum": [round(draw.uniform(-9, 9), 2) for _ in range(3)]}


def an_enum(draw: random.Random, depth: int) -> Schema:
    return {"enum": draw.sample(["red", "green", 7, None, True, [1, 2], {"k": 1}], k=draw.randint(1, 4))}


def a_constant(draw: random.Random, depth: int) -> Schema:
    return {"const": draw.choice(["fixed", 12, False])}


def a_boolean(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(["boolean", "null"])}


def an_array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": a_value(draw, depth - 1),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def a_choice(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [a_value(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


def a_reference(draw: random.Random, depth: int) -> Schema:
    return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": draw.randint(5, 500)}]}
