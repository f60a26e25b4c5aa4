"""Compiles forms of answers in a process of its own: `python -m orca_endpoint.requests.form_compiler`, a helper.

A stranger's grammar may make the library run for minutes, take gigabytes or overflow the stack, which no thread could
survive. So this process has little time for each form, and bounded memory, and may die: `helpers` has another one.

Its opening is the checkpoint's folder. A question is a line of JSON (`Question`), and the form: a text, or for tools a
serialized Chat with them alone. The answer is {"grammar": "..", "left_out": [["f", ".propertyNames"]]}, with functions
and places in their schemas that an answer is not held to; {"problem": "..", "place": ".."} where the form is wrong, for
tools also with a "field"; {"lacking": ".."} where the model is.
"""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypedDict, cast

from orca.v1.orca_pb2 import Chat
from orca_common.checkpoint import read_checkpoint
from orca_common.forms import FormError, Forms, as_grammar

from ..text.tool_calls import SYNTAXES
from .answering import Answer, answer_all
from .schemas.kept import CannotKeep, Schema, SchemaError, kept, read
from .tool_grammar import Function, ToolForm, tool_grammar
from .tools import TOOLS, tools_of

SECONDS = 0.5  # of CPU time for one form; 60 fields of a schema take 7 ms. The rank that samples needs it once more
BYTES = 1 << 30  # of memory
STACK = 4 << 20  # less than a rank's thread has
PLACES = 64  # parts of a schema that are compiled alone, to find the one that is wrong

TRIES = 4  # of one schema, each without the part that the library did not take
COERCED = "coerce_one_of"

SAID = {  # for what it says in words that a caller cannot use
    COERCED: "an answer may fit two of its schemas, which cannot be ruled out: write anyOf, or give each schema"
    " a property that is in its required and has another const than in the others",
    "NoExtensionBias": "no answer fits it",
    "lookarounds": "^ and $ are supported at its ends only",
}


class Question(TypedDict):
    """A question about a form."""

    kind: str  # a name of `sampling.FORMS`, or TOOLS
    loose: bool  # the nearest form that can be enforced is wanted; of tools for the functions that are not strict
    bare: bool  # and at once without any schema: it was too much
    syntax: str  # of calls
    schema: str | None  # of the text beside tools, where that is JSON


def opened(opening: bytes) -> Callable[[bytes], Answer]:
    """Reads the tokenizer. Returns the function that answers."""
    forms = Forms(read_checkpoint(opening.decode()))
    try:
        forms.open()
        lacking = None
    except FormError as error:
        lacking = str(error)

    def answer(question: bytes) -> Answer:
        head, _, form = question.partition(b"\n")
        return {"lacking": lacking} if lacking is not None else compiled(forms, json.loads(head), form)

    return answer


def compiled(forms: Forms, asked: Question, form: bytes) -> Answer:
    """The answer to one form."""
    if asked["kind"] == TOOLS:
        return compiled_tools(forms, asked, Chat.FromString(form))
    text = form.decode()
    if asked["kind"] == "json_schema":
        try:
            schema = read(text)
        except (ValueError, RecursionError) as error:
            return {"problem": f"not valid JSON ({error})", "place": ""}
        if not isinstance(schema, dict | bool):
            return {"problem": "must be a JSON schema, which is an object", "place": ""}
        return compiled_schema(forms, schema, loose=asked["loose"], bare=asked["bare"])
    try:
        grammar = as_grammar(asked["kind"], text)
        forms.check(grammar)
    except (FormError, ValueError) as error:
        return {"problem": str(error), "place": ""}
    return {"grammar": grammar, "left_out": []}


def compiled_schema(forms: Forms, schema: Schema, *, loose: bool, bare: bool = False) -> Answer:
    """The answer to a schema, as `read` returns it."""
    try:
        made = fitted(forms, schema, loose=loose, bare=bare)
    except SchemaError as error:
        return {"problem": sendable(str(error)), "place": sendable(error.place)}
    except RecursionError:
        return {"problem": "is too deep", "place": ""}
    return {"grammar": as_json_grammar(made.schema), "left_out": [["", place] for place in made.left_out]}


def sendable(text: str) -> str:
    """A text in which halves of surrogate pairs, as names of a schema may hold them, are spelled as in JSON."""
    return text.encode(errors="backslashreplace").decode()


class Fitted(NamedTuple):
    """A schema to compile, as `kept` returns it, and the places of what it leaves out of the caller's."""

    schema: dict[str, Any]
    left_out: list[str]


def fitted(forms: Forms, schema: Schema, *, loose: bool, bare: bool = False) -> Fitted:
    """The schema to compile, which is tried. Raises SchemaError, RecursionError.

    loose: the nearest one that can be enforced. bare: any object, or value, at once: it is too much.
    """
    cut, any_of = list[str](), False
    for _ in range(0 if bare else TRIES):
        left_out: list[str] = []
        try:
            made = kept(schema, left_out if loose else None, any_of)
            forms.check(as_json_grammar(made))
            return Fitted(made, [*cut, *left_out])
        except (FormError, ValueError) as error:
            problem = error
        if isinstance(problem, SchemaError):
            if not (loose and isinstance(problem, CannotKeep)):
                raise problem
            place = problem.place
        else:
            if loose and not any_of and COERCED in str(problem):
                any_of = True
                continue
            said = next((ours for theirs, ours in SAID.items() if theirs in str(problem)), str(problem))
            unions = overlapping(schema) if COERCED in str(problem) else []
            place = unions[0] if unions else place_of(forms, schema, str(problem), loose)
            if not loose:
                raise SchemaError(place, said)
        if (shorter := without(schema, place)) is None:
            break
        schema = shorter
        cut.append(place)
    is_object = isinstance(schema, dict) and schema.get("type") == "object"
    return Fitted({"type": "object"} if is_object else {}, [""])


def overlapping(schema: Schema) -> list[str]:
    """The places of the `oneOf`s of which an answer may fit two schemas. Those in a definition have its place."""
    places = list[str]()
    kept(schema, places, any_of=True)
    return places


def without(schema: Any, place: str) -> Any:
    """A schema without the part at a place, as ".properties.a.pattern"; None where that is not in it, or a whole
    schema."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            if place == f".{name}":
                return {key: one for key, one in schema.items() if key != name}
            if place.startswith(f".{name}") and (inner := without(value, place[len(name) + 1 :])) is not None:
                return {**schema, name: inner}
    if isinstance(schema, list):
        for n, value in enumerate(schema):
            if place.startswith(f"[{n}]") and (inner := without(value, place[len(f"[{n}]") :])) is not None:
                return [*schema[:n], inner, *schema[n + 1 :]]
    return None


def as_json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of a schema, as `kept` returns it."""
    return as_grammar("json_schema", json.dumps(schema))


def compiled_tools(forms: Forms, asked: Question, chat: Chat) -> Answer:
    """The answer to a chat's tools."""

    def error(field: str, problem: str, *, place: str = "") -> WrongTools:
        return WrongTools(problem, place, field)

    try:
        tools = tools_of(chat, SYNTAXES[asked["syntax"]], error)
    except WrongTools as wrong:
        return wrong.answer
    # The schema of a text was compiled before: it is right, and what it leaves out was reported.
    text = None if asked["schema"] is None else fitted(forms, read(asked["schema"]), loose=True).schema
    trigger = tools.syntax.trigger
    if text is not None and tools.syntax.leads and tools.functions and forms.begins(as_json_grammar(text), trigger):
        problem = f"its answers may begin with {trigger}, as this model's calls do: let its first member be another one"
        return WrongTools(problem, "", "json_schema").answer
    return compiled_form(forms, tools.form(text), loose=asked["loose"], bare=asked["bare"])


class WrongTools(Exception):
    """The tools are wrong. answer: how."""

    def __init__(self, problem: str, place: str, field: str = TOOLS) -> None:
        super().__init__(problem)
        self.answer: Answer = {"problem": problem, "place": place, "field": field}


def compiled_form(forms: Forms, form: ToolForm, *, loose: bool = False, bare: bool = False) -> Answer:
    """The answer to the form of tools. Each function is tried alone only where all together do not compile."""
    answer: Answer = {}
    for alone in (True,) if bare else (False, True):
        try:
            parts = [fitted_function(forms, one, loose and not one["strict"], alone, bare) for one in form["functions"]]
            grammar = tool_grammar(
                cast(ToolForm, {**form, "functions": [function for function, _ in parts]}), forms.token
            )
            forms.check(grammar)
        except WrongTools as wrong:
            answer = wrong.answer
        except (FormError, ValueError, RecursionError) as error:
            answer = WrongTools(str(error), "").answer
        else:
            return {"grammar": grammar, "left_out": [(one["name"], place) for one, places in parts for place in places]}
    return answer


def fitted_function(
    forms: Forms, function: Function, loose: bool, alone: bool, bare: bool
) -> tuple[Function, list[str]]:
    """A function with the schema to compile, and the places of what that leaves out. Raises WrongTools.

    alone: the schema is tried.
    """
    at, given = f"[{function['at']}].function.parameters", function["parameters"]
    try:
        if alone:
            made = fitted(forms, given, loose=loose, bare=bare and loose)
        else:
            places: list[str] = []
            made = Fitted(kept(given, places if loose else None), places)
    except SchemaError as error:
        raise WrongTools(str(error), at + error.place) from None
    except RecursionError:
        raise WrongTools("is too deep", at) from None
    return {**function, "parameters": {"type": "object", **made.schema}}, made.left_out


def place_of(forms: Forms, schema: Schema, problem: str, loose: bool) -> str:
    """The smallest part of a schema that alone has the same problem, and its keyword, as ".properties.name.anyOf"."""
    if not isinstance(schema, dict):
        return ""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, left, found = "", PLACES, True
    while found:
        found = False
        for name, part in parts(schema):
            left -= 1
            if left < 0:
                return place
            if problem_of(forms, {**shared, **part}, loose) == problem:
                place, schema, found = place + name, part, True
                break
    for keyword in [*schema][::-1]:
        rest = {name: value for name, value in schema.items() if name != keyword}
        if keyword != "type" and problem_of(forms, shared | rest, loose) != problem:
            return f"{place}.{keyword}"
    return place


def problem_of(forms: Forms, schema: dict[str, Any], loose: bool) -> str | None:
    """Returns the problem that the library has with a schema."""
    try:
        forms.check(as_json_grammar(kept(schema, [] if loose else None)))
    except (FormError, ValueError) as error:
        return str(error)
    return None


def parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right inside a schema, by their places."""
    for name, value in schema.items():
        match value:
            case dict() if name in ("properties", "$defs", "definitions", "patternProperties"):
                inner = [(f".{name}.{key}", part) for key, part in value.items()]
            case list():
                inner = [(f".{name}[{n}]", part) for n, part in enumerate(value)]
            case _:
                inner = [(f".{name}", value)]
        yield from ((place, part) for place, part in inner if isinstance(part, dict))


if __name__ == "__main__":
    threading.stack_size(STACK)
    thread = threading.Thread(target=answer_all, args=(opened, SECONDS, BYTES))
    thread.start()
    thread.join()
