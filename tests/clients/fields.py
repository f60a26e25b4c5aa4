"""The page of what clients send: fields by client, of captured requests, without their texts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Below these a client's user has written what stands there, not the client.
OWN = {"arguments", "input_schema", "json", "logit_bias", "metadata", "parameters", "parsed_arguments", "schema"}
# Texts of a fixed set, which say how a client asks. Other texts are its user's.
WORDS = {"effort", "format", "include[]", "role", "service_tier", "summary", "tool_choice", "truncation", "type"}
ID = 20  # characters: a piece of a path that is so long is an id

HEAD = """# What clients send

`make clients` makes this page: it runs each client, unmodified, against an endpoint
([`tests/clients`](../tests/clients/README.md)) and keeps the fields of what it sends by its default paths: a text, a
stream, a call of a tool and the turn after it, an answer by a schema, where the client has them. None is refused.
[The OpenAI door](openai.md) and [Ollama's API](ollama.md) say what each field does.

`[]` is an item of a list. Values are left out where they are texts or numbers, and so is what a user writes, as the
arguments of a call and schemas. "all" are all clients that call the path.
"""


SCHEMAS = """
## Schemas

`make schemas` makes this table: it sends schemas of others, each as a tool and as a `response_format`, with `strict`
and without. The servers of MCP are the most used ones of the npm registry, by their downloads of a month, that start
without a network. Without `strict` each schema is accepted, and a header and a metric name the keywords that are [left
out](openai.md#schemas); with `strict` the same ones are refused by their places.

| source | version | tools or types | bytes of schemas | keywords left out without `strict` | refused with `strict` |
| --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Exchange:
    """A request of a client, and the answer's status; refusal: the answer's text where it is an error."""

    method: str
    path: str
    body: Mapping[str, Any]
    status: int
    refusal: str

    @property
    def name(self) -> str:
        """Method and path, without ids."""
        pieces = ["ID" if len(piece) >= ID else piece for piece in self.path.split("/")]
        return f"{self.method} {'/'.join(pieces)}"


def fields(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Each field of a body with its value, where that is no text of the user's."""
    before, _, last = at.rpartition(".")
    own = last in OWN or (last == "input" and before)  # of a call; at the top it is the prompt
    if isinstance(value, Mapping) and not own:
        for name, inner in value.items():
            yield from fields(inner, f"{at}.{name}" if at else name)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for inner in value:
            yield from fields(inner, f"{at}[]")
    elif value is None or isinstance(value, bool):
        yield at, {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, str) and (value == "" or last in WORDS):
        yield at, value or '""'
    else:
        yield at, ""


def page(sent: Mapping[str, Sequence[Exchange]]) -> str:
    """The page, of the exchanges of each client, by its name and version."""
    paths = dict[str, dict[str, dict[str, set[str]]]]()  # method and path -> field -> client -> values
    callers = dict[str, set[str]]()
    for client, exchanges in sent.items():
        name, _, _ = client.rpartition(" ")
        for one in exchanges:
            callers.setdefault(one.name, set()).add(name)
            for field, value in fields(one.body):
                paths.setdefault(one.name, {}).setdefault(field, {}).setdefault(name, set()).add(value)
    lines = [HEAD, "| client | version | calls |", "| --- | --- | --- |"]
    for client, exchanges in sorted(sent.items()):
        name, _, version = client.rpartition(" ")
        lines.append(
            f"| {name} | {version} | {', '.join(f'`{path}`' for path in sorted({e.name for e in exchanges}))} |"
        )
    for path, rows in sorted(paths.items()):
        lines += ["", f"## {path}", "", "| field | values | clients |", "| --- | --- | --- |"]
        for field, clients in sorted(rows.items()):
            values = sorted({value for found in clients.values() for value in found if value})
            who = "all" if clients.keys() == callers[path] else ", ".join(sorted(clients))
            lines.append(f"| `{field}` | {', '.join(f'`{value}`' for value in values)} | {who} |")
    return "\n".join([*lines, ""])


def before_schemas(text: str) -> str:
    """The page without its table of schemas, which stands at the end."""
    return text.partition(SCHEMAS)[0]
