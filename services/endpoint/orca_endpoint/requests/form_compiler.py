"""Compiles forms of answers in a process of its own: `python -m orca_endpoint.requests.form_compiler FOLDER`.

A stranger's grammar may make the library run for minutes, take gigabytes or overflow the stack, which no thread could
survive. So this process has little time for each form, and bounded memory, and may die: `FormCompiler` has another one.

Writes {} once it is ready. Reads {"kind": "regex", "text": ".."} from each line of standard input, and writes a line
for each: {"grammar": ".."}; {"problem": "..", "place": ".."} where the form is wrong; {"lacking": ".."} where the model
is.
"""

import json
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

from orca_common.checkpoint import read_checkpoint
from orca_common.forms import FormError, Forms, as_grammar

from .schemas.kept import Schema, SchemaError, kept, read
from .tool_grammar import ToolForm, tool_grammar
from .tools import TOOLS

SECONDS = 0.5  # of CPU time for one form; 60 fields of a schema take 7 ms. The rank that samples needs it once more
BYTES = 1 << 30  # of memory
STACK = 4 << 20  # less than a rank's thread has
PLACES = 64  # parts of a schema that are compiled alone, to find the one that is wrong

SAID = {  # for what it says in words that a caller cannot use
    "coerce_one_of": "an answer may fit two of its schemas, which cannot be ruled out: write anyOf, or give each schema"
    " a property that is in its required and has another const than in the others",
    "NoExtensionBias": "no answer fits it",
    "lookarounds": "^ and $ are supported at its ends only",
}


def main(folder: str) -> None:
    """Answers until standard input ends."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    forms = Forms(read_checkpoint(folder))
    try:
        forms.open()
        lacking = None
    except FormError as error:
        lacking = str(error)
    print("{}", flush=True)  # it is ready
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process
        asked = json.loads(line)
        answer = {"lacking": lacking} if lacking is not None else compiled(forms, asked["kind"], asked["text"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def compiled(forms: Forms, kind: str, text: str) -> dict[str, str]:
    """The answer to one form."""
    if kind == TOOLS:
        return compiled_tools(forms, read(text))
    if kind == "json_schema":
        try:
            schema = read(text)
        except (ValueError, RecursionError) as error:
            return {"problem": f"not valid JSON ({error})", "place": ""}
        if not isinstance(schema, dict | bool):
            return {"problem": "must be a JSON schema, which is an object", "place": ""}
        return compiled_schema(forms, schema)
    try:
        grammar = as_grammar(kind, text)
        forms.check(grammar)
    except (FormError, ValueError) as error:
        return {"problem": str(error), "place": ""}
    return {"grammar": grammar}


def compiled_schema(forms: Forms, schema: Schema) -> dict[str, str]:
    """The answer to a schema, as `read` returns it."""
    try:
        grammar = grammar_of(schema)
        forms.check(grammar)
    except SchemaError as error:
        return {"problem": str(error), "place": error.place}
    except RecursionError:
        return {"problem": "is too deep", "place": ""}
    except (FormError, ValueError) as error:
        place = place_of(forms, schema, str(error)) if isinstance(schema, dict) else ""
        return {
            "problem": next((ours for theirs, ours in SAID.items() if theirs in str(error)), str(error)),
            "place": place,
        }
    return {"grammar": grammar}


def grammar_of(schema: Schema) -> str:
    """The grammar of a schema, as `read` returns it. Raises SchemaError, RecursionError."""
    return as_grammar("json_schema", json.dumps(kept(schema)))


def compiled_tools(forms: Forms, form: ToolForm) -> dict[str, str]:
    """The answer to the form of tools. The schema of a text was compiled before."""
    try:
        functions = [
            {**function, "parameters": {"type": "object", **kept(function["parameters"])}}
            for function in form["functions"]
        ]
        text = form["schema"] if form["schema"] is None else kept(form["schema"])
        grammar = tool_grammar(cast(ToolForm, {**form, "functions": functions, "schema": text}), forms.token)
        forms.check(grammar)
    except (FormError, ValueError, RecursionError) as error:
        for function in form["functions"]:
            alone = compiled_schema(forms, function["parameters"])
            if "problem" in alone:
                return {**alone, "place": f"[{function['at']}].function.parameters{alone['place']}"}
        return {"problem": str(error), "place": ""}
    return {"grammar": grammar}


def place_of(forms: Forms, schema: dict[str, Any], problem: str) -> str:
    """The smallest part of a schema that alone has the same problem, and its keyword, as ".properties.name.anyOf"."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, left, found = "", PLACES, True
    while found:
        found = False
        for name, part in parts(schema):
            left -= 1
            if left < 0:
                return place
            if problem_of(forms, {**shared, **part}) == problem:
                place, schema, found = place + name, part, True
                break
    for keyword in [*schema][::-1]:
        rest = {name: value for name, value in schema.items() if name != keyword}
        if keyword != "type" and problem_of(forms, shared | rest) != problem:
            return f"{place}.{keyword}"
    return place


def problem_of(forms: Forms, schema: dict[str, Any]) -> str | None:
    """Returns the problem that the library has with a schema."""
    try:
        forms.check(grammar_of(schema))
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
    thread = threading.Thread(target=main, args=(sys.argv[1],))
    thread.start()
    thread.join()
