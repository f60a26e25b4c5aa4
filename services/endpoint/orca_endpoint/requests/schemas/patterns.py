"""The patterns of JSON schemas, which are regular expressions of ECMA-262, in the syntax of Rust's `regex`.

The two share most of their syntax, but not its meaning: `[[:alpha:]]`, `[a-z&&[^x]]`, `\\s`, `.` and `\\<` are other
texts in each. So a pattern is read by ECMA-262's grammar, and every class is written as ranges of code points, without
the characters that an answer cannot hold. Where the standard has two readings, by code points (its flag u, which JSON
Schema asks for) and for old web pages, the first one counts; the second one, where the first is an error.
"""

import re
from bisect import bisect

Ranges = list[tuple[int, int]]  # of code points, both ends inside

LAST = 0x10FFFF
# JSON has no other spelling than \uXXXX for these, which would give keys two spellings, so answers do without them.
UNSAYABLE: Ranges = [(0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F), (0xD800, 0xDFFF)]
DIGITS: Ranges = [(0x30, 0x39)]
WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
LINES: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
SPACES: Ranges = [  # WhiteSpace and LineTerminator of the standard
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
NAMED = {"d": DIGITS, "w": WORD, "s": SPACES}
CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
SYNTAX = "^$\\.*+?()[]{}|/"  # characters that flag u lets a \ stand before
QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})")
PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}")
PAIR = re.compile(r"u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
CODE = re.compile(r"u\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|c([A-Za-z])")
GROUP_NAME = re.compile(r"<[A-Za-z_$][\w$]*>")


class PatternError(ValueError):
    """A pattern that is no regular expression of ECMA-262, or holds a part that cannot be followed."""


def translated(pattern: str) -> str:
    """The pattern for Rust's `regex`. Raises PatternError."""
    return _Reader(pattern).read()


def sayable(text: str) -> str | None:
    """The first character of a text that an answer cannot hold, as "U+0001"."""
    return next((f"U+{ord(one):04X}" for one in text if within(ord(one), UNSAYABLE)), None)


def within(code: int, ranges: Ranges) -> bool:
    """Whether a code point is in one of the ranges, which are in order."""
    at = bisect(ranges, (code, LAST + 1)) - 1
    return at >= 0 and code <= ranges[at][1]


def complement(ranges: Ranges) -> Ranges:
    """All other code points, in order."""
    found: Ranges = []
    following = 0
    for low, high in sorted(ranges):
        if low > following:
            found.append((following, low - 1))
        following = max(following, high + 1)
    return [*found, (following, LAST)] if following <= LAST else found


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._at, self._open = pattern, 0, 0
        self._old = False  # it holds a part that is an error by code points
        self._new = any(ord(one) > 0xFFFF for one in pattern)  # it holds a part that means something else without u

    def read(self) -> str:
        parts: list[str] = []
        bars: list[int] = []  # places in `parts` that part the whole pattern
        can_repeat = False
        while (one := self._next()) != "":
            if quantifier := QUANTIFIER.match(self._pattern, self._at - 1):
                if not can_repeat:
                    raise PatternError(f"{quantifier[0]!r} has nothing to repeat")
                self._at = quantifier.end()
                self._skip("?")  # a lazy one has the same texts
                parts.append(quantifier[0])
                can_repeat = False
                continue
            can_repeat = one not in "^$|("
            match one:
                case "(":
                    self._open += 1
                    parts.append(self._group())
                case ")":
                    self._open -= 1
                    if self._open < 0:
                        raise PatternError("it has a ) too many")
                    parts.append(")")
                case "[":
                    parts.append(self._class())
                case "\\":
                    parts.append(self._escape())
                case ".":
                    parts.append(spelled_class(complement(LINES)))
                case "^" | "$" | "|":
                    bars += [len(parts)] if one == "|" and not self._open else []
                    parts.append(one)
                case "{" if self._pattern[self._at : self._at + 1] == ",":
                    raise PatternError("'{,' is a number of times for some and a text for others: write {0,")
                case _:
                    self._old |= one in "]{}"
                    parts.append(literal(ord(one)))
        if self._open:
            raise PatternError("it has a ( too many")
        if self._old and self._new:
            raise PatternError("it is an error with ECMA-262's flag u, and means something else without it")
        return anchored(parts, bars)

    def _next(self) -> str:
        one = self._pattern[self._at : self._at + 1]
        self._at += 1
        return one

    def _skip(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _group(self) -> str:
        if not self._skip("?") or self._skip(":"):
            return "(?:"
        if name := GROUP_NAME.match(self._pattern, self._at):
            self._at = name.end()
            return "(?:"
        if re.compile("<?[=!]").match(self._pattern, self._at):
            raise PatternError("look-around cannot be followed")
        raise PatternError(f"'(?{self._pattern[self._at : self._at + 1]}' is no group of ECMA-262")

    def _escape(self) -> str:
        one = self._pattern[self._at : self._at + 1]
        if one in ("b", "B"):
            raise PatternError("the edge of a word, \\b, cannot be followed")
        if one == "k" or (one in "123456789" and one):
            raise PatternError("back-references cannot be followed")
        found = self._atom()
        if isinstance(found, int):
            return literal(found)
        return found if isinstance(found, str) else spelled_class(found)

    def _class(self) -> str:
        """A class, after its bracket."""
        negated = self._skip("^")
        ranges: Ranges = []
        properties: list[str] = []
        while not self._skip("]"):
            low = self._member()
            if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                self._at += 1
                high = self._member()
                if isinstance(low, int) and isinstance(high, int):
                    if low > high:
                        raise PatternError(f"a class has a range from {chr(low)!r} to {chr(high)!r}")
                    low = [(low, high)]
                else:  # as in [\w-.]: the - is a character
                    self._old = True
                    ranges.append((0x2D, 0x2D))
                    ranges += high if isinstance(high, list) else [(high, high)] if isinstance(high, int) else []
                    properties += [high] if isinstance(high, str) else []
            if isinstance(low, str):
                properties.append(low)
            else:
                ranges += low if isinstance(low, list) else [(low, low)]
        if properties:
            inner = "".join([*map(spelled_range, sayable_of(ranges)), *properties])
            return f"[^{inner}{''.join(map(spelled_range, UNSAYABLE[:-1]))}]" if negated else f"[{inner}]"
        return spelled_class(complement(ranges) if negated else ranges)

    def _member(self) -> int | Ranges | str:
        one = self._next()
        if one == "":
            raise PatternError("a class does not end")
        if one != "\\":
            return ord(one)
        if self._skip("b"):
            return 0x08
        return ord("-") if self._skip("-") else self._atom()

    def _atom(self) -> int | Ranges | str:
        """Reads what follows a backslash: a code point, ranges, or a property of Unicode in Rust's syntax."""
        if found := PROPERTY.match(self._pattern, self._at):
            self._at, self._new = found.end(), True
            return "\\" + found[0]
        if found := PAIR.match(self._pattern, self._at):
            self._at, self._new = found.end(), True
            return ord(bytes.fromhex(found[1] + found[2]).decode("utf-16-be"))
        if found := CODE.match(self._pattern, self._at):
            self._at = found.end()
            if found[4]:
                return ord(found[4]) % 32
            self._new |= found[1] is not None
            code = int(found[1] or found[2] or found[3], 16)
            if code > LAST:
                raise PatternError(f"U+{code:X} is no character")
            return code
        one = self._next()
        if one.lower() in NAMED and one:
            ranges = NAMED[one.lower()]
            return ranges if one.islower() else complement(ranges)
        if one in CONTROLS:
            return CONTROLS[one]
        if one == "0" and not self._pattern[self._at : self._at + 1].isdigit():
            return 0
        if one == "" or (one.isascii() and one.isalnum()):
            raise PatternError(f"'\\{one}' is no escape of ECMA-262")
        self._old |= one not in SYNTAX
        return ord(one)


def anchored(parts: list[str], bars: list[int]) -> str:
    """The pattern with ^ and $ at its ends alone, where the library knows them. bars: places of | around nothing."""
    ends = [(low + 1, high) for low, high in zip([-1, *bars], [*bars, len(parts)], strict=True)]
    options = [parts[low:high] for low, high in ends]
    if not bars or not any(one in ("^", "$") for one in parts):
        return "".join(parts)
    anything = f"{spelled_class([(0, LAST)])}*"
    found = list[str]()
    for option in options:
        first, last = option[:1] == ["^"], option[-1:] == ["$"]
        inner = "".join(option[first : len(option) - last])
        found.append(f"{'' if first else anything}(?:{inner}){'' if last else anything}")
    return f"^(?:{'|'.join(found)})$"


def sayable_of(ranges: Ranges) -> Ranges:
    """The ranges without what an answer cannot hold, in order."""
    return complement([*complement(ranges), *UNSAYABLE])


def spelled_class(ranges: Ranges) -> str:
    """Raises PatternError where nothing is left that an answer can hold."""
    found = sayable_of(ranges)
    if not found:
        raise PatternError("a class has no character that an answer can hold")
    return f"[{''.join(map(spelled_range, found))}]"


def spelled_range(ends: tuple[int, int]) -> str:
    """A range inside a class of Rust."""
    return spelled(ends[0]) if ends[0] == ends[1] else f"{spelled(ends[0])}-{spelled(ends[1])}"


def literal(code: int) -> str:
    """One character. Raises PatternError where an answer cannot hold it."""
    if within(code, UNSAYABLE):
        raise PatternError(f"an answer cannot hold U+{code:04X}")
    return spelled(code)


def spelled(code: int) -> str:
    """A character in a pattern of Rust, without a meaning of its own."""
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"
