"""Rewrites a JSON schema into one whose every constraint an answer keeps, or refuses by the keyword's place.

llguidance 1.9 compiles some schemas into grammars of answers that the schema forbids: numbers that a double does not
hold, days like 2023-02-29, `prefixItems` beside `additionalItems`, an array's `additionalItems` behind an `allOf`. It
compiles others only after they are written in another way. What `kept` returns holds only keywords that are kept, in
one dialect (2020-12), and describes no answer that the given schema does not. Annotations are dropped, and so is what
demands nothing, as `uniqueItems: false`.

A caller who did not ask for strictness gets a wider schema where a keyword cannot be kept: the nearest one without it.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, InvalidOperation
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from orca_common.errors import echo

from .patterns import PatternError, sayable, translated

Schema = dict[str, Any] | bool

# Keywords of any draft that say something about a value, and that the library does not enforce.
UNKEPT = frozenset(
    [
        *("not", "if", "then", "else", "contains", "propertyNames", "uniqueItems", "divisibleBy"),
        *("unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$dynamicRef", "$recursiveRef", "extends", "disallow"),
    ]
)
KEYWORDS = UNKEPT | {  # that may be left out for a caller who did not ask for strictness
    *("const", "enum", "anyOf", "oneOf", "allOf", "$ref", "$id", "pattern", "format", "multipleOf", "required"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "properties", "patternProperties", "additionalProperties", "items"),
    *("prefixItems", "additionalItems", "type"),
}
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
HANG_ON = {
    "then": "if",
    "else": "if",
    "minContains": "contains",
    "maxContains": "contains",
}  # which is refused for them
ABOUT = frozenset(["title", "description", "default", "examples", "deprecated", "$comment"])  # for people
LARGEST = 2.0**63 - 1024  # the last double below 2^63: the library computes integers in 64 bits
ENDLESS = 10**18  # the library cannot leave the numbers from here on unbounded
# It reads a number to the last bit if its digits are below 2^53, and it has at most 22 of them behind the point.
EXACT, DIGITS, PLACES = 2**53, 15, Decimal("1e-22")
EXPONENT = 1000  # numbers beyond are of no use in a schema
TINY = Decimal("1e-20")  # above 0, where 0 itself cannot be left out
MULTIPLE = 2**32  # the library computes multiples in 32 bits
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
REMAINDERS = 80_000  # of a division, times digits of a bound: more than that end some answers as FORM_STUCK
TOO_HARD = "beside long bounds, or other multiples, of the same value, which is too hard to follow"
OUTER = 8  # levels of two schemas that are compared to see that no value is in both
FORMATS = frozenset(["duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
HOSTNAME = 253  # characters at most, by RFC 1123
LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
# RFC 3339's. There is no year 0 in most libraries, and no leap second: none is foreseen.
DATE = (
    "(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-"
    f"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP}-02-29)"
)
HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{HOUR})"
MOMENTS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}T{TIME}$"}
JSON_SPACE = re.compile(r"(?:\\x(?:20|09|0[ADad])|\\[nrt]|[ \n\r\t]|\[|\]|\(\?:|[()|?*+]|\{[0-9]*,?[0-9]*\})*")


class SchemaError(ValueError):
    """A schema that is wrong or cannot be kept. place: of the keyword, as ".properties.name.pattern"."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(problem)
        self.place = place


class CannotKeep(SchemaError):
    """A keyword that is right, and that no answer can be held to here."""


class Written(float):
    """A number of a schema as a double, with the number that was written."""

    exact: Decimal

    def __new__(cls, text: str) -> "Written":
        made = super().__new__(cls, text)
        try:
            made.exact = Decimal(text)
        except InvalidOperation:
            made.exact = Decimal("Infinity")
        if abs(made.exact) > 0 and not -EXPONENT < made.exact.adjusted() < EXPONENT:
            raise ValueError(f"the exponent of {echo(text, 40)} has no use")
        return made


def read(text: str) -> Any:
    """The value of a JSON text, with numbers as they are written. Raises ValueError, RecursionError."""

    def constant(name: str) -> None:
        raise ValueError(f"{name} is no value of JSON")

    return json.loads(text, parse_float=Written, parse_constant=constant)


def kept(schema: Schema, left_out: list[str] | None = None, any_of: bool = False) -> dict[str, Any]:
    """The schema to compile. schema: as `read` returns it. Raises SchemaError, RecursionError.

    left_out: takes the places of keywords that cannot be kept, and are left out. None: they are refused by CannotKeep.
    With it CannotKeep is raised only for keywords that cannot be kept together. any_of: each `oneOf` that may fit twice
    is left out, too: it becomes an `anyOf`.
    """
    if schema is False:
        raise SchemaError("", "is false: no answer fits it")
    if schema is True:
        return {}
    return _Keeper(schema, left_out, any_of).all()


class _Keeper:
    def __init__(self, root: dict[str, Any], left_out: list[str] | None, any_of: bool) -> None:
        self._root, self._left_out, self._any_of = root, left_out, any_of
        draft = str(root.get("$schema"))
        self._old, self._lone = re.search("draft-0|2019-09", draft), re.search("draft-0", draft)
        self._targets: dict[str, str] = {}  # names of the definitions, by the references to them
        self._waiting: list[tuple[str, Any, str]] = []  # definitions to rewrite: name, schema, place
        self._multiples: dict[str, Decimal] = {}  # by their places
        self._lengths: dict[str, int] = {}  # of bounds in digits, by their places
        self._above: dict[str, str] = {}  # places of schemas: to one whose schema is for the same value
        bounds = [one.get(bound) for one, _ in everything(root, "") for bound in LOWER + UPPER]
        self._near_zero = any(isinstance(one, int | float) and 0 < abs(one) <= 1 for one in bounds)

    def all(self) -> dict[str, Any]:
        made = self._schema(self._root, "")
        assert isinstance(made, dict)
        definitions: dict[str, Schema] = {}
        while self._waiting:
            name, target, place = self._waiting.pop()
            definitions[name] = self._schema(target, place)
        self._no_circle(made, definitions)
        self._check_multiples()
        if definitions:
            made["$defs"] = definitions
        if "x-guidance" in self._root:
            made["x-guidance"] = white_space(self._root["x-guidance"])
        return made

    def _schema(self, given: Any, place: str) -> Schema:
        if isinstance(given, bool):
            return given
        given = an_object(given, place, "must be a schema: an object, true or false")
        given = self._alone(given)
        if place and "$id" in given and any("$ref" in one for one, _ in everything(given, "")):
            with self._or_left_out():
                raise CannotKeep(f"{place}.$id", "is supported at the top only, where a schema has references")
            return True
        unions: dict[str, Any] = {}  # what holds schemas for the same value
        plain: dict[str, Any] = {}  # all else, in one piece: the library forgets what is cut by the former
        ahead, more = 0, []  # members come in the order of `properties` and of schemas before it
        for keyword, value in given.items():
            at = f"{place}.{keyword}"
            with self._or_left_out():
                if keyword in ("allOf", "anyOf", "oneOf", "$ref", "const", "enum"):
                    name, found = self._same_value(keyword, value, at)
                    if name in unions:
                        more.append({name: found})
                    else:
                        unions[name] = found
                else:
                    plain |= self._plain(keyword, value, at, given, more)
                    ahead = len(unions) if keyword == "properties" else ahead
        at = f"{place}.additionalProperties"
        if "additionalProperties" in plain and self._lacks_one(f"{place}.patternProperties", given):
            self._leave_out(at)  # it is about members that no pattern fits
            del plain["additionalProperties"]
        if more:
            unions["allOf"] = [*unions.get("allOf", []), *more]
        parts = list(unions.items())
        return {**dict(parts[:ahead]), **plain, **dict(parts[ahead:])}

    @contextmanager
    def _or_left_out(self) -> Iterator[None]:
        """Leaves out what the block cannot keep, if the caller is not strict."""
        try:
            yield
        except CannotKeep as error:
            if self._left_out is None:
                raise
            self._leave_out(error.place)

    def _leave_out(self, place: str) -> None:
        if self._left_out is not None:
            self._left_out.append(place)

    def _lacks_one(self, at: str, given: Mapping[str, Any]) -> bool:
        """Whether a pattern of `patternProperties` was left out."""
        return bool(self._left_out) and any(
            f"{at}.{one}" in self._left_out for one in given.get("patternProperties", ())
        )

    def _alone(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema without what stands beside a reference, which drafts before 2019-09 ignore."""
        return {"$ref": schema["$ref"]} if self._lone and "$ref" in schema else schema

    def _same_value(self, keyword: str, value: Any, at: str) -> tuple[str, Any]:
        """A keyword whose schemas or constants are for the same value as its neighbours."""
        match keyword:
            case "const":
                return keyword, constant(value, at)
            case "enum":
                constants = list[Any]()
                for n, one in enumerate(a_list(value, at)):
                    with self._or_left_out():
                        constants.append(constant(one, f"{at}[{n}]"))
                if value and not constants:
                    raise CannotKeep(at, "has no value that answers can hold")
                return keyword, constants
            case "$ref":
                return keyword, self._reference(value, at)
        options = a_list(value, at)
        for n in range(len(options)):
            self._join(schema_of(at), f"{at}[{n}]")
        found = [self._schema(one, f"{at}[{n}]") for n, one in enumerate(options)]
        if keyword == "oneOf":
            if all(self._disjoint(a, b, OUTER) for a, b in combinations(options, 2)):
                return "anyOf", found
            if self._any_of:
                self._leave_out(at)
                return "anyOf", found
        return keyword, found

    def _plain(self, keyword: str, value: Any, at: str, given: dict[str, Any], more: list[Schema]) -> dict[str, Any]:
        """A keyword for one type of values. more: takes schemas that must hold beside it."""
        if keyword in HANG_ON or self._demands_nothing(keyword, value, given):
            return {}
        if keyword in UNKEPT:
            raise CannotKeep(at, "cannot be enforced")
        match keyword:
            case "type":
                return {keyword: types(value, at)}
            case "minLength" | "maxLength" | "minItems" | "maxItems" | "maxProperties":
                return {keyword: count(value, at)}
            case "minProperties":
                least = count(value, at)
                named = len(set(map(str, a_list(given.get("required", []), at))))
                with self._or_left_out():
                    if least > named + 1:
                        problem = f"is {least}, which cannot be enforced: names may come twice; at most {named + 1} can"
                        raise CannotKeep(at, f"{problem}, one more than are required")
                return {keyword: min(least, named + 1)}
            case "pattern":
                return {keyword: pattern(value, at)}
            case "format":
                return self._format(value, at, given, more)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return self._bound(keyword, value, at, given, more)
            case "multipleOf":
                return {keyword: self._multiple(value, at, given)}
            case "required":
                names = list[str]()
                for n, one in enumerate(a_list(value, at)):
                    with self._or_left_out():
                        names.append(text_in(one, f"{at}[{n}]"))
                return {keyword: names}
            case "properties":
                members: dict[str, Schema] = {}
                for one, part in an_object(value, at, "must be an object").items():
                    with self._or_left_out():
                        name = text_in(one, f"{at}.{one}")
                        members[name] = self._schema(part, f"{at}.{one}")
                return {keyword: members}
            case "patternProperties":
                found: dict[str, Schema] = {}
                for one, part in an_object(value, at, "must be an object").items():
                    with self._or_left_out():
                        key, made = pattern(one, f"{at}.{one}"), self._schema(part, f"{at}.{one}")
                        found[key] = {"allOf": [found[key], made]} if key in found else made
                return {keyword: found}
            case "additionalProperties":
                return {keyword: self._schema(value, at)}
            case "items" | "prefixItems" | "additionalItems":
                return self._items(keyword, value, at, given)
            case _:
                return {}  # an annotation, or a word of the caller's own

    def _demands_nothing(self, keyword: str, value: Any, given: Mapping[str, Any]) -> bool:
        """Whether every value fits a keyword that is otherwise not kept."""
        match keyword:
            case "uniqueItems" | "not":
                return value is False
            case "if":
                return "then" not in given and "else" not in given
            case "contains":  # drafts before 2019-09 know no minContains
                return not self._lone and given.get("minContains") == 0 and "maxContains" not in given
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                return isinstance(value, dict) and all(one in ([], {}) or one is True for one in value.values())
            case "unevaluatedItems" | "unevaluatedProperties":
                return value is True or value == {}
            case "propertyNames":  # names are strings
                return value is True or (
                    isinstance(value, dict)
                    and value.keys() <= ABOUT | {"type"}
                    and "string" in (value.get("type", "string"), *as_list(value.get("type")))
                )
        return False

    def _items(self, keyword: str, value: Any, at: str, given: dict[str, Any]) -> dict[str, Any]:
        if keyword == "additionalItems":  # of older drafts; says nothing unless `items` is a list
            return {"items": self._schema(value, at)} if isinstance(given.get("items"), list) else {}
        if keyword == "items" and not isinstance(value, list):
            return {"items": self._schema(value, at)}
        if keyword == "items" and "prefixItems" in given:
            raise SchemaError(at, "must be a schema beside prefixItems")
        if keyword == "prefixItems" and self._old:
            raise CannotKeep(at, "is not a keyword of the draft that $schema names: use items, or no $schema")
        return {"prefixItems": [self._schema(one, f"{at}[{n}]") for n, one in enumerate(a_list(value, at))]}

    def _format(self, value: Any, at: str, given: dict[str, Any], more: list[Schema]) -> dict[str, Any]:
        types = given.get("type", "string")
        if types != "string" and not (isinstance(types, list) and "string" in types):
            return {}
        if not isinstance(value, str):
            raise SchemaError(at, "must be a string")
        if value not in FORMATS | MOMENTS.keys():
            return {}  # an annotation, as JSON Schema has it
        if value == "hostname":
            more.append({"maxLength": HOSTNAME})
        if value not in MOMENTS:
            return {"format": value}
        if "pattern" not in given:
            return {"pattern": MOMENTS[value]}
        more.append({"pattern": MOMENTS[value]})
        return {}

    def _bound(self, keyword: str, value: Any, at: str, given: dict[str, Any], more: list[Schema]) -> dict[str, Any]:
        """A bound of numbers, moved inwards. It is itself allowed: above 50 and below 50.1 the library allows 50."""
        strict, bound = keyword.startswith("exclusive"), keyword.replace("exclusiveM", "m")
        if isinstance(value, bool):  # draft 4: says how the other bound is meant
            if not value or bound not in given:
                return {}
            value = given[bound]
        exact, side = number(value, at), 1 if bound == "minimum" else -1
        if strict and exact == 0:
            if not self._near_zero:
                return {keyword: 0}
            exact, strict = side * TINY, False
        found = {bound: inward(exact, at, side, strict=strict)}
        self._lengths[at] = length(exact)
        if keyword != bound and bound in given:
            more.append(found)
            return {}
        return found

    def _multiple(self, value: Any, at: str, given: dict[str, Any]) -> Any:
        exact = number(value, at)
        if exact <= 0:
            raise SchemaError(at, "must be above 0")
        digits, places = float(exact), 0  # as the library reads it
        while digits % 1 and digits < EXACT:
            digits, places = digits * 10, places + 1
        if digits >= MULTIPLE or places > -PLACES.adjusted() or Decimal(int(digits)).scaleb(-places) != exact:
            raise CannotKeep(at, f"is {shown(exact)}, which has too many digits to be enforced")
        bounds = [one for one in LOWER + UPPER if one in given and not isinstance(given[one], bool)]
        lengths = [length(number(given[one], f"{schema_of(at)}.{one}")) for one in bounds]
        if digits * max(lengths, default=1) > REMAINDERS:
            raise CannotKeep(at, f"is {shown(exact)} {TOO_HARD}")
        self._multiples[at] = exact
        return value

    def _check_multiples(self) -> None:
        """Raises CannotKeep where schemas for the same value have multiples that are too much together.

        The value is one of their least common multiple, which the library computes in 32 bits, within all of their
        bounds.
        """
        lengths, multiples = Counter[str](), defaultdict[str, dict[str, Decimal]](dict)
        for at, digits in self._lengths.items():
            value = self._value_of(schema_of(at))
            lengths[value] = max(lengths[value], digits)
        for at, exact in self._multiples.items():
            multiples[self._value_of(schema_of(at))][at] = exact
        for value, found in multiples.items():
            last, scale = [*found][-1], Decimal(10) ** max(max(0, digits_of(one)[1]) for one in found.values())
            scaled = {int(one * scale) for one in found.values()}
            common = math.lcm(*scaled)
            if len(scaled) > 1 and common * max(scaled) >= MULTIPLE:
                raise CannotKeep(last, "has too many digits in common with the others")
            if common * max(lengths[value], 1) > REMAINDERS:
                raise CannotKeep(last, f"is {shown(found[last])} {TOO_HARD}")

    def _join(self, one: str, other: str) -> None:
        """Notes that the schemas at two places are for the same value."""
        if (above := self._value_of(one)) != (below := self._value_of(other)):
            self._above[below] = above

    def _value_of(self, place: str) -> str:
        """The place that stands for those of all schemas for the same value."""
        while (above := self._above.get(place)) is not None:
            self._above[place] = place = self._above.get(above, above)
        return place

    # -- references

    def _reference(self, value: Any, at: str) -> str:
        target, place = self._target(value, at)
        self._join(schema_of(at), place)
        if value == "#":
            return value
        if place not in self._targets:
            self._targets[place] = str(len(self._targets))
            self._waiting.append((self._targets[place], target, place))
        return f"#/$defs/{self._targets[place]}"

    def _no_circle(self, root: Schema, definitions: dict[str, Schema]) -> None:
        """Raises SchemaError where a schema refers to itself for the same value."""
        places = {name: place for place, name in self._targets.items()}
        try:
            TopologicalSorter({name: referred(one) for name, one in {**definitions, "": root}.items()}).prepare()
        except CycleError as error:
            place = max(places.get(name, "") for name in error.args[1])
            raise CannotKeep(f"{place}.$ref", "leads back to its own schema, for the same value") from None

    def _target(self, value: Any, at: str) -> tuple[Any, str]:
        """The schema that a reference names, and its place."""
        if not isinstance(value, str) or not value.startswith("#"):
            raise CannotKeep(at, "must begin with #: only references inside of the schema are supported")
        target: Any = self._root
        place = ""
        if not value.startswith("#/") and value != "#":
            found = next(
                ((one, where) for one, where in everything(target, "") if one.get("$anchor") == value[1:]), None
            )
            if found is None:
                raise CannotKeep(at, f"names {echo(value, 64)!r}, which is no $anchor")
            return found
        for part in value[2:].split("/") if value != "#" else ():
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target, place = target[int(key)], f"{place}[{int(key)}]"
            elif isinstance(target, dict) and key in target:
                target, place = target[key], f"{place}.{key}"
            else:
                raise CannotKeep(at, f"names {echo(value, 64)!r}, which is not there")
        return target, place

    # -- schemas of which no value is in both

    def _disjoint(self, one: Any, other: Any, levels: int) -> bool:
        """Whether it is sure that no value is in both."""
        if one is False or other is False:
            return True
        if not levels:
            return False
        ones, others = self._all_of(one, levels), self._all_of(other, levels)
        for a in ones:
            if any(self._all_disjoint(a.get(union), other, levels) for union in ("anyOf", "oneOf")):
                return True
        for b in others:
            if any(self._all_disjoint(b.get(union), one, levels) for union in ("anyOf", "oneOf")):
                return True
        left, right = values_of(ones), values_of(others)
        if left is not None and right is not None:
            return not left & right
        left, right = types_of(ones), types_of(others)
        if not left & right:
            return True
        return left & right == {"object"} and any(
            self._disjoint(a["properties"][key], b["properties"][key], levels - 1)
            for key in required_of([*ones, *others])
            for a in ones
            if key in members_of(a)
            for b in others
            if key in members_of(b)
        )

    def _all_disjoint(self, options: Any, other: Any, levels: int) -> bool:
        return isinstance(options, list) and all(self._disjoint(one, other, levels - 1) for one in options)

    def _all_of(self, schema: Any, levels: int) -> list[dict[str, Any]]:
        """The schemas that hold for each value of a schema: itself, what it refers to, and its allOf."""
        if not isinstance(schema, dict) or not levels:
            return []
        schema = self._alone(schema)
        parts = schema.get("allOf")
        inner = list(parts) if isinstance(parts, list) else []
        if "$ref" in schema:
            with suppress(CannotKeep):
                inner.append(self._target(schema["$ref"], "")[0])
        return [schema, *(deep for part in inner for deep in self._all_of(part, levels - 1))]


# -- the parts of a schema


def referred(schema: Schema) -> list[str]:
    """The definitions whose schemas hold for the same value."""
    if isinstance(schema, bool):
        return []
    own = [schema["$ref"].removeprefix("#").removeprefix("/$defs/")] if "$ref" in schema else []
    return [*own, *(name for part in schema.get("allOf", []) for name in referred(part))]


def schema_of(at: str) -> str:
    """The place of a keyword's schema."""
    return at.rpartition(".")[0]


def an_object(value: Any, at: str, problem: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SchemaError(at, problem)
    return value


def a_list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaError(at, "must be a list")
    return value


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def types(value: Any, at: str) -> Any:
    """The types of a value: one, or a list."""
    for one in value if isinstance(value, list) else [value]:
        if one not in TYPES:
            raise SchemaError(at, f"is {echo(str(one), 40)!r}; the types of JSON are {', '.join(TYPES)}")
    return value


def count(value: Any, at: str) -> int:
    """A number of characters, items or members; 3.0 is one, too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
        raise SchemaError(at, "must be a whole number of at least 0")
    return int(value)


def text_in(value: Any, at: str) -> str:
    """A string that an answer can hold."""
    if not isinstance(value, str):
        raise SchemaError(at, "must be a string")
    if wrong := sayable(value):
        raise CannotKeep(at, f"holds {wrong}, which answers cannot")
    return value


def pattern(value: Any, at: str) -> str:
    """A pattern in Rust's syntax."""
    if not isinstance(value, str):
        raise SchemaError(at, "must be a string")
    try:
        return translated(value)
    except PatternError as error:
        raise CannotKeep(at, str(error)) from None


def number(value: Any, at: str) -> Decimal:
    """A number as it is written."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SchemaError(at, "must be a number")
    return value.exact if isinstance(value, Written) else Decimal(repr(value))


def length(exact: Decimal) -> int:
    """The digits of a number before the point; 0 has one."""
    return max(exact.adjusted(), 0) + 1 if exact else 1  # 0e5 would have six


def digits_of(exact: Decimal) -> tuple[int, int]:
    """The digits of a number without zeros at their end, and how many of them are behind the point."""
    _, digits, exponent = exact.as_tuple()
    text = "".join(map(str, digits)).rstrip("0")
    assert isinstance(exponent, int)
    return int(text or "0"), len(text) - len(digits) - exponent


def shown(exact: Decimal) -> str:
    return echo(f"{exact:f}" if abs(exact.adjusted()) < 40 else str(exact), 60)


def constant(value: Any, at: str) -> Any:
    """A value of `const` or `enum`."""
    match value:
        case dict():
            return {text_in(key, at): constant(one, f"{at}.{key}") for key, one in value.items()}
        case list():
            return [constant(one, f"{at}[{n}]") for n, one in enumerate(value)]
        case str():
            return text_in(value, at)
        case bool() | None:
            return value
    exact = number(value, at)
    if not abs(exact) <= Decimal(LARGEST):
        raise CannotKeep(at, f"is {shown(exact)}; numbers from {-LARGEST:.0f} to {LARGEST:.0f} can be enforced")
    if exact == exact.to_integral_value():
        if int(float(exact)) != exact:
            raise CannotKeep(at, f"is {shown(exact)}, which no double is: the next one is {float(exact):.0f}")
        return int(exact)
    digits, places = digits_of(exact)
    if digits >= EXACT or places > -PLACES.adjusted():
        raise CannotKeep(at, f"is {shown(exact)}, which has too many digits to be enforced")
    return float(exact)


def inward(exact: Decimal, at: str, side: int, *, strict: bool) -> float | int:
    """The next bound that the library reads as it is written, and that is not outside of this one.

    side: 1 for a lower bound, -1 for an upper one. strict: the bound itself is outside.
    """
    if not -(2**63) <= exact <= 2**63 or exact * side >= ENDLESS:
        most = "from -2^63 to below 10^18" if side > 0 else "from above -10^18 to 2^63"
        raise CannotKeep(at, f"is {shown(exact)}; {most} can be enforced")
    digits = Context(prec=DIGITS, rounding=ROUND_CEILING if side > 0 else ROUND_FLOOR)
    if abs(exact) < 10**DIGITS:
        found = digits.create_decimal(exact)
        if strict and found == exact:
            found = digits.next_plus(found) if side > 0 else digits.next_minus(found)
        found = found.quantize(PLACES, digits.rounding, Context(prec=60))
        return int(found) if found % 1 == 0 else float(found)
    whole = int(exact.to_integral_value(digits.rounding))
    whole += side if strict and whole == exact else 0
    near = min(max(float(whole), -LARGEST), LARGEST)
    while min((reading - whole) * side for reading in (Decimal(near), Decimal(repr(near)))) < 0:
        near = math.nextafter(near, side * math.inf)
    if near * side >= ENDLESS:
        raise CannotKeep(at, f"is {shown(exact)}, which is too near to 10^18")
    return int(near)


def white_space(given: Any) -> dict[str, Any]:
    """The library's options that leave answers JSON of the schema."""
    place = ".x-guidance"
    for option, value in an_object(given, place, "must be an object").items():
        at = f"{place}.{option}"
        match option:
            case "whitespace_flexible":
                if not isinstance(value, bool):
                    raise SchemaError(at, "must be true or false")
            case "whitespace_pattern":
                if value is not None and not (isinstance(value, str) and JSON_SPACE.fullmatch(value)):
                    raise SchemaError(at, "must be a regular expression of JSON's white space")
            case _:
                raise SchemaError(at, "is not supported: whitespace_pattern and whitespace_flexible are")
    return {"whitespace_pattern": None, **given}  # otherwise ours would count, whatever `whitespace_flexible` is


# -- what is sure of values, for `_disjoint`


def everything(value: Any, place: str) -> Iterable[tuple[dict[str, Any], str]]:
    """All objects inside of a value, with their places."""
    if isinstance(value, dict):
        yield value, place
        for key, one in value.items():
            yield from everything(one, f"{place}.{key}")
    elif isinstance(value, list):
        for n, one in enumerate(value):
            yield from everything(one, f"{place}[{n}]")


def values_of(schemas: list[dict[str, Any]]) -> set[str] | None:
    """The values that are allowed, where a schema lists them."""
    for schema in schemas:
        if "const" in schema:
            return {equal(schema["const"])}
        if isinstance(schema.get("enum"), list):
            return {equal(one) for one in schema["enum"]}
    return None


def equal(value: Any) -> str:
    """The same text for values that are equal in JSON."""
    match value:
        case dict():
            return json.dumps({key: equal(one) for key, one in value.items()}, sort_keys=True)
        case list():
            return json.dumps([equal(one) for one in value])
        case bool() | str() | None:
            return json.dumps(value)
    return f"number {number(value, '').normalize()}"


def types_of(schemas: list[dict[str, Any]]) -> set[str]:
    """The types that a value may have."""
    found = {"null", "boolean", "number", "string", "array", "object"}
    for schema in schemas:
        if "type" in schema:
            given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            found &= {"number" if one == "integer" else str(one) for one in given}
        values = values_of([schema])
        if values is not None:
            found &= {kind(one) for one in values}
    return found


def kind(value: str) -> str:
    """The type of a value by its text in `equal`."""
    starts = {"n": "null", "t": "boolean", "f": "boolean", '"': "string", "[": "array", "{": "object"}
    return "number" if value.startswith("number") else starts[value[0]]


def members_of(schema: dict[str, Any]) -> dict[str, Any]:
    members = schema.get("properties")
    return members if isinstance(members, dict) else {}


def required_of(schemas: list[dict[str, Any]]) -> list[str]:
    lists = [schema["required"] for schema in schemas if isinstance(schema.get("required"), list)]
    return [one for names in lists for one in names if isinstance(one, str)]
