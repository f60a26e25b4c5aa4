"""Spellings of calls of tools in models' answers: the syntaxes, which of them a template speaks, and their reader.

An answer with calls is

    text first NAME middle ARGUMENTS (next NAME middle ARGUMENTS)* last

where ARGUMENTS is an object of JSON. A grammar (`requests/tool_grammar.py`) holds the answers of requests with tools to
this, so the reader meets nothing else, apart from an answer that is cut.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

ID_LENGTH = 9  # of a call's id: Mistral's templates want letters and digits, and no other length
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


class Syntax(NamedTuple):
    """The spelling of calls by a family of models."""

    name: str
    trigger: str  # the beginning of `first`; it is in no text
    first: str
    middle: str
    next: str | None  # None: one call at most
    last: str
    marks: tuple[str, ...] = ()  # parts that a tokenizer may have as single tokens, which are special to it or not
    leads: bool = False  # calls begin the answer, without a text before them


SYNTAXES: Mapping[str, Syntax] = {
    one.name: one
    for one in (
        Syntax(
            "hermes",  # of Nous Research; Qwen 2.5 and 3
            trigger="<tool_call>",
            first='<tool_call>\n{"name": "',
            middle='", "arguments": ',
            next='}\n</tool_call>\n<tool_call>\n{"name": "',
            last="}\n</tool_call>",
            marks=("<tool_call>", "</tool_call>"),
        ),
        Syntax(
            "llama",  # 3.1 to 3.3
            trigger='{"name": "',
            first='{"name": "',
            middle='", "parameters": ',
            next=None,
            last="}",
            leads=True,
        ),
        Syntax(
            "mistral",
            trigger="[TOOL_CALLS]",
            first='[TOOL_CALLS][{"name": "',
            middle='", "arguments": ',
            next='}, {"name": "',
            last="}]",
            marks=("[TOOL_CALLS]",),
        ),
        Syntax(
            "mistral-args",  # since the tokenizer's version 13
            trigger="[TOOL_CALLS]",
            first="[TOOL_CALLS]",
            middle="[ARGS]",
            next="[TOOL_CALLS]",
            last="",
            marks=("[TOOL_CALLS]", "[ARGS]"),
        ),
    )
}

# What a template's text must hold to speak a syntax, and what it must not: the signs of others that look alike.
SIGNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (("<tool_call>", "</tool_call>", "arguments"), ("<function=", "<arg_key>", "<parameter=")),
    "llama": (("ipython", '"parameters": '), ("<tool_call>", "[TOOL_CALLS]")),
    "mistral": (("[TOOL_CALLS]", '"arguments": '), ("[ARGS]",)),
    "mistral-args": (("[TOOL_CALLS]", "[ARGS]"), ("[CALL_ID]",)),
}


def syntax_in(template: str) -> Syntax | None:
    """The syntax that a chat template speaks; None: no syntax that is known here, or not certainly one."""
    text = re.sub(r'\\(["\'])', r"\1", template)  # texts in a template are quoted
    found = [
        name
        for name, (has, lacks) in SIGNS.items()
        if all(sign in text for sign in has) and not any(sign in text for sign in lacks)
    ]
    return SYNTAXES[found[0]] if len(found) == 1 else None


class CallPart(NamedTuple):
    """A part of a call: its id and its name first, then its arguments in pieces."""

    at: int  # the number of the call in the answer, from 0
    id: str
    name: str
    arguments: str


class Said(NamedTuple):
    """A piece of an answer, read: text for people, and parts of calls."""

    content: str
    calls: tuple[CallPart, ...] = ()


NOTHING = Said("")


class CallReader:
    """Reads an answer that comes in pieces of text: each piece at most once, and nothing held back longer than needed.

    What comes out depends on the text alone, wherever its pieces end: joined, it is the same.
    """

    def __init__(self, syntax: Syntax, request_id: str) -> None:
        """request_id: the calls' ids are made of it, so another endpoint makes the same ones."""
        self._syntax, self._request_id = syntax, request_id
        self._state: Literal["text", "head", "arguments", "between"] = "text"
        self._held = ""  # text whose meaning is not certain yet
        self._plain = False  # no call can begin any more
        self._count = 0  # calls whose arguments have begun
        # Of the arguments so far: the names in each open object, None for a list; the name that is read now.
        self._open, self._quoted, self._escaped = list[set[str] | None](), False, False
        self._name: list[str] | None = None
        self.doubled: str | None = None  # a name that comes twice in an object of a call's arguments

    @property
    def called(self) -> bool:
        """Whether the text so far has calls, and all of them are whole."""
        return self._state == "between"

    def push(self, piece: str) -> Said:
        """Reads the next piece."""
        if not piece:
            return NOTHING
        content, calls = list[str](), list[CallPart]()
        rest = piece
        while rest:
            match self._state:
                case "text":
                    text, rest = self._text(rest)
                    content.append(text)
                case "head":
                    head, rest = self._before(self._syntax.middle, rest)
                    if head is not None:
                        name = head.rpartition('"')[2].strip()  # a function's name holds no quotes and no spaces
                        calls.append(CallPart(self._count, call_id(self._request_id, self._count), name, ""))
                        self._count += 1
                        self._state = "arguments"
                case "arguments":
                    end = self._end_in(rest)
                    calls.append(CallPart(self._count - 1, "", "", rest[:end]))
                    rest = rest[end:]
                case "between":
                    end, rest = self._before(self._syntax.next, rest)
                    if end is not None:
                        self._state = "head"
        return Said("".join(content), tuple(merged(calls)))

    def flush(self) -> Said:
        """The text that was held back, at the end of the answer. The head of a call that was cut there is dropped."""
        held, self._held = self._held, ""
        return Said(held) if self._state == "text" else NOTHING

    # -- the states
    def _text(self, piece: str) -> tuple[str, str]:
        """The text before a call, and what comes after the call's trigger."""
        trigger, held = self._syntax.trigger, self._held + piece
        self._held = ""
        if self._plain:
            return held, ""
        if self._syntax.leads:
            at = 0 if held.startswith(trigger) else -1
            keep = len(held) if trigger.startswith(held) else 0
            self._plain = at < 0 and not keep
        else:
            at = held.find(trigger)
            keep = next((n for n in range(min(len(held), len(trigger) - 1), 0, -1) if trigger.startswith(held[-n:])), 0)
        if at >= 0:
            self._state = "head"
            return held[:at], held[at + len(trigger) :]
        border = len(held) - keep
        self._held = held[border:]
        return held[:border], ""

    def _before(self, end: str | None, piece: str) -> tuple[str | None, str]:
        """The held text before `end`, and what comes after it; None until it has come. Without an end it never does."""
        held = self._held + piece
        before, found, after = held.partition(end) if end is not None else (held, "", "")
        self._held = "" if found else held
        return (before, after) if found else (None, "")

    def _end_in(self, piece: str) -> int:
        """Counts the characters of a piece that belong to the arguments, whose end changes the state."""
        for n, character in enumerate(piece):
            if self._quoted:
                self._in_string(character)
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._open.append(set() if character == "{" else None)
                self._name = [] if character == "{" else None
            elif character == ",":
                self._name = [] if self._open and self._open[-1] is not None else None
            elif character in "}]":
                del self._open[-1:]
                self._name = None
                if not self._open:
                    self._state = "between"
                    return n + 1
        return len(piece)

    def _in_string(self, character: str) -> None:
        """Reads a character of a string, or its end. A name that comes twice is noted: no grammar keeps a model from it
        where an object may have members that its schema does not name."""
        ends = character == '"' and not self._escaped
        self._quoted, self._escaped = not ends, character == "\\" and not self._escaped
        if self._name is None:
            return
        if not ends:
            self._name.append(character)
            return
        names, spelled, self._name = self._open[-1], "".join(self._name), None
        assert names is not None
        try:
            name = json.loads(f'"{spelled}"')
        except ValueError:
            return  # a grammar holds them to JSON
        if name in names:
            self.doubled = name
        names.add(name)


def merged(parts: Sequence[CallPart]) -> list[CallPart]:
    """The parts with those of one call joined."""
    found: list[CallPart] = []
    for part in parts:
        if found and found[-1].at == part.at:
            found[-1] = found[-1]._replace(arguments=found[-1].arguments + part.arguments)
        else:
            found.append(part)
    return found


def call_id(request_id: str, index: int) -> str:
    """The id of a call: the same at each endpoint that shows the answer."""
    number = int.from_bytes(hashlib.sha256(f"{request_id}/{index}".encode()).digest()[:8], "little")
    digits = ""
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(ALPHABET))
        digits += ALPHABET[digit]
    return digits
