"""Random JSON schemas over all keywords, numbers and keys above all, spellings that answers may try, and a second
validator of answers.

Many of the schemas cannot be kept, and some are wrong.
"""

import datetime
import json
import random
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any

import jsonschema
from jsonschema.validators import validator_for

Schema = dict[str, Any] | bool

NAMES = ["a", "b", "a1", "kind", "größe", 'q"', "\n", "", "x y", "\\"]
# Names for objects that may have others, too: of ASCII and not, with escapes and without.
SPELLED = ["a", 'q"', "\n", "\b", "\\", "\\u0061", "/", "größe", "\u2028", "😀", "a\tb"]
UNSAYABLE = ["\x01", "\x7f", "\ud800"]  # names that no answer can hold
NUMBERS = [
    *(
        "0",
        "-0.0",
        "1",
        "-1",
        "2",
        "3",
        "7",
        "10",
        "99",
        "100",
        "101",
        "255",
        "1000",
        "-17",
        "0.1",
        "0.3",
        "0.5",
        "1.5",
    ),
    *("-2.5", "0.07", "1e-7", "3.14159", "5.0", "1e2", "12.50", "-0.001", "9007199254740991", "9007199254740992"),
    *("9007199254740993", "-9007199254740993", "999999999999999999", "1000000000000000000", "-1000000000000000001"),
    *("1152921504606846976", "9223372036854775807", "-9223372036854775808", "18446744073709551615", "1e300", "-1e20"),
    *("100000000000000000000", "1e400", "0.1000000000000000055511151231257827", "3.141592653589793", "123456789.5"),
    *("0.1234567890123456", "3.0000000000000000001"),
]
PATTERNS = [
    "^[a-z]{1,4}$",
    "^[!-/:-@[-`{-~]+$",
    "a",
    "^a",
    "b$",
    "^(?:ab?|[0-9])*$",
    '^[^"a-z]{2}$',
    "^a.b$",
    r"^\d{2}-\d$",
    "^[a&&b]$",
    "^(x|yy){1,2}$",
    "(?=a)",
    r"(a)\1",
]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "duration", "hostname", "uri", "int64"]
TYPES = ["null", "boolean", "number", "integer", "string", "array", "object"]
CONSTANTS = ['"fixed"', '""', '"\\u0001"', '"é"', "true", "null", "[]", "{}", '[1, "x"]', '{"k": 1, "a": [0.5]}']
DRAFTS = ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"]


class Literal:
    """A number as it is written."""

    def __init__(self, text: str) -> None:
        self.text = text


def a_schema(draw: random.Random) -> str:
    """The text of a schema."""
    made = AnySchema(draw)
    top = made.schema(3)
    if isinstance(top, dict):
        if made.referenced or draw.random() < 0.1:
            top["$defs"] = {name: made.schema(1) for name in ("one", "two")}
        if draw.random() < 0.1:
            top = {"$schema": draw.choice(DRAFTS), **top}
    return written(top)


def written(value: Any) -> str:
    """The JSON text of a value that holds literals."""
    match value:
        case Literal():
            return value.text
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)}: {written(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)


class AnySchema:
    """Draws schemas. referenced: a schema had a reference to a definition."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.referenced = draw, False

    def schema(self, depth: int) -> Schema:
        """A schema of few keywords in any order."""
        draw = self.draw
        if draw.random() < 0.04:
            return draw.random() < 0.7
        kind = draw.choice(TYPES if depth else TYPES[:5])
        keywords = dict[str, Any]()
        match draw.random():
            case chance if chance < 0.75:
                keywords["type"] = kind
            case chance if chance < 0.85:
                keywords["type"] = list(dict.fromkeys([kind, draw.choice(TYPES)]))
        keywords |= self.own(kind, depth)
        if draw.random() < 0.15:
            keywords |= self.for_all(depth)
        if draw.random() < 0.05:
            keywords |= self.own(draw.choice(TYPES), max(depth - 1, 0))
        if draw.random() < 0.03:
            keywords |= self.unkept(depth)
        if draw.random() < 0.1:
            keywords |= {"title": "A", "deprecated": True, "x-word": {"not": {}}}
        names = draw.sample(sorted(keywords), len(keywords)) if draw.random() < 0.3 else list(keywords)
        return {name: keywords[name] for name in names}

    def inner(self, depth: int) -> Schema:
        """A schema inside of one."""
        return self.schema(depth - 1) if depth > 0 else {"type": self.draw.choice(TYPES[:5])}

    def own(self, kind: str, depth: int) -> dict[str, Any]:
        """Keywords for values of a type."""
        match kind:
            case "number" | "integer":
                return self.of_number(depth)
            case "string":
                return self.of_string(depth)
            case "array":
                return self.of_array(depth)
            case "object":
                return self.of_object(depth)
        return {}

    def some(self, **choices: Any) -> dict[str, Any]:
        """A few of the keywords."""
        return {name: make() for name, make in choices.items() if self.draw.random() < 0.4}

    def number(self) -> Literal:
        """A number, near to another one or far from any."""
        draw = self.draw
        if draw.random() < 0.5:
            return Literal(draw.choice(NUMBERS))
        return Literal(draw.choice([str(draw.randint(-200, 200)), f"{draw.uniform(-20, 20):.{draw.randint(1, 4)}f}"]))

    def of_number(self, depth: int) -> dict[str, Any]:
        draw = self.draw
        low = self.number()
        high = Literal(str(Decimal(low.text) + Decimal(draw.choice(["0", "0.1", "1", "12", "5000", "1e17"]))))
        found = {}
        if draw.random() < 0.5:
            found[draw.choice(["minimum", "exclusiveMinimum"])] = low
        if draw.random() < 0.5:
            found[draw.choice(["maximum", "exclusiveMaximum"])] = high
        if draw.random() < 0.2:
            found["multipleOf"] = Literal(
                draw.choice(["1", "3", "0.5", "0.1", "0.01", "0.07", "7", "100", "0", "70000"])
            )
        return found

    def of_string(self, depth: int) -> dict[str, Any]:
        draw = self.draw
        match draw.random():
            case chance if chance < 0.4:
                least = draw.randint(0, 3)
                return self.some(minLength=lambda: least, maxLength=lambda: least + draw.randint(0, 3))
            case chance if chance < 0.7:
                return {"pattern": draw.choice(PATTERNS)} | self.some(maxLength=lambda: draw.randint(1, 6))
        return {"format": draw.choice(FORMATS)} | (self.some(pattern=lambda: "2") if draw.random() < 0.2 else {})

    def of_array(self, depth: int) -> dict[str, Any]:
        draw = self.draw
        least = draw.randint(0, 2)
        if draw.random() < 0.15:
            old = {"items": [self.inner(depth) for _ in range(draw.randint(0, 2))]}
            return old | self.some(additionalItems=lambda: self.inner(depth), minItems=lambda: least)
        return self.some(
            prefixItems=lambda: [self.inner(depth) for _ in range(draw.randint(0, 2))],
            items=lambda: self.inner(depth),
            minItems=lambda: least,
            maxItems=lambda: Literal(f"{least + draw.randint(0, 2)}.0"),
            additionalItems=lambda: draw.random() < 0.5,
        )

    def of_object(self, depth: int) -> dict[str, Any]:
        draw = self.draw
        is_open = draw.random() < 0.6
        names = draw.sample(SPELLED if is_open and draw.random() < 0.7 else NAMES, draw.randint(0, 3))
        if draw.random() < 0.03:
            names.append(draw.choice(UNSAYABLE))
        found: dict[str, Any] = {"properties": {name: self.inner(depth) for name in names}}
        found |= self.some(required=lambda: draw.sample([*names, "a"], draw.randint(0, len(names))))
        if not is_open:
            found["additionalProperties"] = False
        elif draw.random() < 0.6:
            found["additionalProperties"] = draw.choice([True, self.inner(depth), self.inner(depth)])
        if draw.random() < 0.25:
            patterns = draw.sample(["^a", "^[b-k]", "[0-9]$", "^x.$", r'^[\n"\\/]$'], draw.randint(1, 2))
            found["patternProperties"] = {one: self.inner(depth) for one in patterns}
        if draw.random() < 0.2:
            found |= self.some(minProperties=lambda: draw.randint(0, 3), maxProperties=lambda: draw.randint(0, 3))
        if draw.random() < 0.3 and not found["properties"]:
            del found["properties"]
        if depth > 0 and draw.random() < 0.15:
            found[draw.choice(["allOf", "allOf", "anyOf"])] = [
                self.of_object(depth - 1) for _ in range(draw.randint(1, 2))
            ]
        return found

    def constant(self) -> Any:
        return Literal(self.draw.choice(CONSTANTS)) if self.draw.random() < 0.5 else self.number()

    def for_all(self, depth: int) -> dict[str, Any]:
        """Keywords for values of all types."""
        draw = self.draw
        match draw.choice(["const", "enum", "allOf", "anyOf", "anyOf", "oneOf", "oneOf", "$ref"]):
            case "const":
                return {"const": self.constant()}
            case "enum":
                return {"enum": [self.constant() for _ in range(draw.randint(1, 3))]}
            case "$ref":
                self.referenced = True
                return {"$ref": draw.choice(["#/$defs/one", "#/$defs/two", "#"])}
            case "oneOf" if draw.random() < 0.6:
                return {"oneOf": [self.tagged(tag, depth) for tag in ("x", "y")]}
            case union:
                return {union: [self.inner(depth) for _ in range(draw.randint(1, 3))]}

    def tagged(self, tag: str, depth: int) -> dict[str, Any]:
        """An object that a member tells apart, mostly."""
        required = ["kind"] if self.draw.random() < 0.8 else []
        properties = {"kind": {"const": tag}, "a": self.inner(depth)}
        return {"type": "object", "properties": properties, "required": required}

    def unkept(self, depth: int) -> dict[str, Any]:
        """A keyword that is refused."""
        one = lambda: self.inner(depth)  # noqa: E731
        return self.draw.choice(
            [
                {"not": one()},
                {"if": one(), "then": one(), "else": one()},
                {"contains": one(), "minContains": 2},
                {"uniqueItems": True},
                {"propertyNames": {"pattern": "^a"}},
                {"unevaluatedProperties": False},
                {"unevaluatedItems": False},
                {"dependentRequired": {"a": ["b"]}},
                {"dependentSchemas": {"a": one()}},
                {"dependencies": {"a": ["b"]}},
                {"$dynamicRef": "#x"},
            ]
        )


# -- spellings


def strings_in(schema: Any) -> Iterator[str]:
    """The names and constants of a schema, which an answer may spell."""
    if isinstance(schema, list):
        for one in schema:
            yield from strings_in(one)
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        match keyword, value:
            case "properties", dict():
                yield from value
            case "const", str():
                yield value
            case (("required" | "enum"), list()):
                yield from (one for one in value if isinstance(one, str))
        yield from strings_in(value)


def ways(one: str) -> list[str]:
    """The spellings of a character in JSON. The first one is the shortest."""
    shortest, units = json.dumps(one, ensure_ascii=False)[1:-1], one.encode("utf-16-be", "surrogatepass")
    code = "".join(f"\\u{units[n : n + 2].hex()}" for n in range(0, len(units), 2))
    return [shortest, code, code.upper().replace("\\U", "\\u"), *(["\\/"] if one == "/" else [])]


def spelled(draw: random.Random, text: str) -> bytes:
    """A string of JSON, as a writer may spell it who likes escapes."""
    return f'"{"".join(draw.choice(ways(one)) for one in text)}"'.encode(errors="surrogatepass")


# -- the second validator

MOMENTS = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


@MOMENTS.checks("time", raises=ValueError)
def is_time(value: object) -> bool:
    """By Python's datetime, as the format `date` is by jsonschema."""
    return not isinstance(value, str) or bool(datetime.time.fromisoformat(value).tzinfo)


@MOMENTS.checks("date-time", raises=ValueError)
def is_date_time(value: object) -> bool:
    """By Python's datetime."""
    return not isinstance(value, str) or bool(datetime.datetime.fromisoformat(value).tzinfo)


def validator(schema: str, left_out: Iterable[str] = ()) -> Callable[[Any], None]:
    """The second validator, which computes with the numbers as they are written. left_out: places of what is not
    enforced."""
    read = json.loads(schema, parse_float=Decimal)
    for place in sorted(set(left_out), reverse=True):
        leave_out(read, place)
    kind = validator_for(read, jsonschema.Draft202012Validator)
    return kind(judged(read, kind is jsonschema.Draft202012Validator), format_checker=MOMENTS).validate


def leave_out(value: Any, place: str) -> bool:
    """Takes what is at a place, as ".properties.a.enum[0]", out of a schema, and returns whether it was there."""
    keys = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    for key in keys:
        step = f".{key}" if isinstance(value, dict) else f"[{key}]"
        if place == step:
            del value[key]
            return True
        if place.startswith(step) and leave_out(value[key], place[len(step) :]):
            return True
    return False


def judged(value: Any, new: bool) -> Any:
    """A schema as jsonschema reads it rightly: without `additionalItems` that say nothing, and, by a new draft, without
    lists of `items`, for it raises TypeError at some of them; and with patterns of Python, whose $ is an end of lines,
    too."""
    if isinstance(value, list):
        return [judged(one, new) for one in value]
    if not isinstance(value, dict):
        return value
    made = {name: judged(one, new) for name, one in value.items()}
    if not isinstance(made.get("items"), list):
        made.pop("additionalItems", None)
    elif new:
        made["prefixItems"] = made.pop("items")
        made |= {"items": made["additionalItems"]} if "additionalItems" in made else {}
    if "pattern" in made:
        made["pattern"] = made["pattern"].replace("$", r"\Z")
    if "patternProperties" in made:
        made["patternProperties"] = {one.replace("$", r"\Z"): inner for one, inner in made["patternProperties"].items()}
    return made


def number(text: str) -> Decimal:
    """A number of an answer. An exponent beyond those of the schemas is a nearer one: quotients have digits for it."""
    mantissa, _, exponent = text.lower().partition("e")
    return Decimal(f"{mantissa}e{min(max(int(exponent or '0'), -999), 999)}")
