"""Makes texts of chats by the model's template, in a process: `python -m orca_endpoint.requests.chat_renderer`.

The template is a program by the model's author. Its steps are bounded where it runs (`ChatTemplate.render`), but inside
of one call of C it may take seconds, or gigabytes. So this process is a helper, and may die: `helpers` has another one.

Its opening is {"folder": "..", "max_length": 1, "special": [".."]}: the checkpoint's, the characters of a prompt, and
the tokens that are text in messages. A question is a serialized Chat. The answer is {"text": "..", "mark": ".."}, or
what is wrong as `Names.error` takes it: {"field": "..", "problem": "..", "position": 1, "place": ".."}.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from orca.v1.orca_pb2 import Chat

from ..text.chat_template import RENDER_SECONDS, CannotRender, ChatTemplate, read_chat_template
from .answering import Answer, answer_all
from .tools import calls_of, json_in, tools_in

SECONDS = 1.5 * RENDER_SECONDS  # of CPU time for a chat: the template has its time, and the rest is for the texts
BYTES = 1 << 29  # of memory; a chat of 1 MB takes some ten
ROLES = ("system", "developer", "user", "assistant", "tool")
# Variables that a request cannot give: the template itself is the model's, and the others have fields of their own.
RESERVED = ("chat_template", "messages", "tools")


class Wrong(Exception):
    """A chat is wrong. `answer`: how."""

    def __init__(self, field: str, problem: str, position: int | None = None, place: str = "") -> None:
        super().__init__(problem)
        self.answer = {"field": field, "problem": problem, "position": position, "place": place}


class Renderer:
    """Renders chats for one model."""

    def __init__(self, template: ChatTemplate, max_length: int, special: Sequence[str]) -> None:
        self._template, self._max_length = template, max_length
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if special else None

    def answer(self, question: bytes) -> Answer:
        """The answer to one chat."""
        try:
            text, mark = self._rendered(Chat.FromString(question))
        except Wrong as wrong:
            return wrong.answer
        except CannotRender as refusal:
            return Wrong("chat.messages", str(refusal)).answer
        return {"text": text, "mark": mark}

    def _rendered(self, chat: Chat) -> tuple[str, str]:
        """The text of a prompt, and the mark in it (`Vocabulary.encode_marked`), empty without one."""
        template, variables = self._template, variables_of(chat.template_kwargs)
        if chat.tools:
            template, variables["tools"] = template.tool_use, tools_in(chat.tools, Wrong)
        messages = [message_of(chat, n, template) for n in range(len(chat.messages))]
        mark = ""
        if self._special is not None and any(map(self._special.search, texts_in([messages, variables]))):
            mark = unused_in("".join(texts_in([messages, variables])))
            messages = [one if one["role"] == "assistant" else self._marked(one, mark) for one in messages]
            variables = self._marked(variables, mark)
        return template.render(messages, variables, self._max_length), mark

    def _marked(self, value: Any, mark: str) -> Any:
        """A value of JSON with a mark behind the first character of each special token's name in its texts."""
        if isinstance(value, str):
            assert self._special is not None
            return self._special.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        if isinstance(value, list):
            return [self._marked(one, mark) for one in value]
        if isinstance(value, dict):
            return {name: self._marked(one, mark) if name != "role" else one for name, one in value.items()}
        return value


def texts_in(value: Any) -> Iterator[str]:
    """The texts of a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts_in(one)


def unused_in(text: str) -> str:
    """A character for private use (Unicode's U+E000 to U+F8FF) that a text does not have."""
    return next(mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in text)


def message_of(chat: Chat, n: int, template: ChatTemplate) -> dict[str, Any]:
    """One message as the template sees it. A template that knows no developer sees a system message."""
    one = chat.messages[n]
    if one.role not in ROLES:
        raise Wrong("chat.messages", f"has the role {one.role[:20]!r}; the roles are {', '.join(ROLES)}", n)
    role = "system" if one.role == "developer" and not template.knows_developer else one.role
    content = [{"type": "text", "text": one.content}] if template.walks_parts else one.content
    message: dict[str, Any] = {"role": role, "content": content}
    message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(one, name))}
    if one.tool_calls:
        place = f"[{n}].tool_calls"
        if role != "assistant":
            raise Wrong("chat.messages", "is allowed only in a message of the assistant", place=place)
        if not template.knows_calls:  # it would leave them out without a word
            raise Wrong("chat.messages", "is refused: this model's chat template knows no calls", place=place)
        message["tool_calls"] = calls_of(one.tool_calls, n, Wrong)
    return message


def variables_of(raw: str) -> dict[str, Any]:
    """The variables of a JSON object."""
    if not raw:
        return {}
    field = "chat.template_kwargs"
    variables = json_in(raw, field, Wrong)
    if not isinstance(variables, dict):
        raise Wrong(field, "must be a JSON object")
    for name in RESERVED:
        if name in variables:
            raise Wrong(field, f"cannot hold {name}: {reserved(name)}")
    return variables


def reserved(name: str) -> str:
    """Why a request cannot give this variable."""
    return "the template is the model's own" if name == "chat_template" else "it is a field of its own"


def opened(opening: bytes) -> Callable[[bytes], Answer]:
    """Reads the template. Returns the function that answers."""
    given = json.loads(opening)
    template = read_chat_template(Path(given["folder"]))
    assert template is not None
    return Renderer(template, given["max_length"], given["special"]).answer


if __name__ == "__main__":
    answer_all(opened, SECONDS, BYTES)
