"""Conversations as prompts: checked, and made a text by the model's chat template in a thread."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from orca.v1.orca_pb2 import Chat
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument

from ..text.chat_template import CannotRender, ChatTemplate
from .threads import Threads
from .tools import Tools, calls_of, json_in, tools_of

ROLES = ("system", "developer", "user", "assistant", "tool")
# Variables that a request cannot give: the template itself is the model's, and the others have fields of their own.
RESERVED = ("chat_template", "messages", "tools")


class Names(Protocol):
    """Makes errors that name the request's fields as the caller does: `validation.Fields`."""

    def name(self, field: str) -> str: ...

    def error(self, field: str, problem: str, position: int | None = None, place: str = "") -> InvalidArgument: ...


class Chats:
    """Makes texts of conversations, for a model with a chat template or without one."""

    def __init__(
        self,
        template: ChatTemplate | None,
        threads: Threads,
        max_bytes: int,
        tokens: int,
        special: Sequence[str] = (),
    ) -> None:
        """threads: render. max_bytes: of a prompt's text, and so characters of what a template may make. tokens: of the
        answer to a chat that does not say how long it may be. special: tokens that are text in messages."""
        self._template, self._threads, self._max_bytes = template, threads, max_bytes
        self._special = (
            re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        )
        self.tokens = tokens

    @property
    def possible(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def syntax(self) -> str:
        """How the model spells calls of tools; empty where a chat cannot have them."""
        syntax = self._template.tool_use.syntax if self._template is not None else None
        return syntax.name if syntax is not None else ""

    def tools(self, chat: Chat, names: Names) -> Tools | None:
        """The tools of a chat; None where it has none. Raises InvalidArgument, and FailedPrecondition for a model that
        cannot have them."""
        if not chat.tools:
            for field in ("tool_choice", "tool_names", "one_tool_call"):
                if getattr(chat, field):
                    raise names.error(f"chat.{field}", "is allowed only with tools")
            return None
        template, field = self._given(names, "chat.tools").tool_use, names.name("chat.tools")
        if template.syntax is None:
            problem = "takes tools, but in no way that is known here" if template.takes_tools else "takes no tools"
            raise FailedPrecondition(
                f"{field}: this model's chat template {problem}", field, reason=ErrorReason.NO_TOOLS
            )
        return tools_of(chat, template.syntax, names.error)

    async def text(self, chat: Chat, tools: Tools | None, names: Names) -> tuple[str, str]:
        """The text of a prompt, and the mark in it (`Vocabulary.encode_marked`), empty without one. Raises
        InvalidArgument, FailedPrecondition without a template, ResourceExhausted.

        tools: those of the chat.
        """
        template = self._given(names, "chat.messages")
        if tools is not None:
            template = template.tool_use
        if not chat.messages:
            raise names.error("chat.messages", "is missing: a chat has at least one message")
        return await self._threads.run(partial(self._rendered, chat, tools, template, names))

    def _rendered(self, chat: Chat, tools: Tools | None, template: ChatTemplate, names: Names) -> tuple[str, str]:
        variables = variables_of(chat.template_kwargs, names)
        if tools is not None:
            variables["tools"] = tools.given
        messages = [message_of(chat, n, template, names) for n in range(len(chat.messages))]
        mark = ""
        if self._special is not None and any(map(self._special.search, texts_in([messages, variables]))):
            mark = unused_in("".join(texts_in([messages, variables])))
            messages = [one if one["role"] == "assistant" else self._marked(one, mark) for one in messages]
            variables = self._marked(variables, mark)
        try:
            return template.render(messages, variables, self._max_bytes), mark
        except CannotRender as refusal:
            raise names.error("chat.messages", str(refusal)) from None

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

    def _given(self, names: Names, needed_for: str) -> ChatTemplate:
        """The model's template. Raises FailedPrecondition without one."""
        if self._template is None:
            field = names.name(needed_for)
            problem = f"{field}: this model has no chat template; give the prompt as text"
            raise FailedPrecondition(problem, field, reason=ErrorReason.NO_CHAT_TEMPLATE)
        return self._template


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


def message_of(chat: Chat, n: int, template: ChatTemplate, names: Names) -> dict[str, Any]:
    """One message as the template sees it. A template that knows no developer sees a system message."""
    one = chat.messages[n]
    if one.role not in ROLES:
        raise names.error("chat.messages", f"has the role {one.role[:20]!r}; the roles are {', '.join(ROLES)}", n)
    role = "system" if one.role == "developer" and not template.knows_developer else one.role
    content = [{"type": "text", "text": one.content}] if template.walks_parts else one.content
    message: dict[str, Any] = {"role": role, "content": content}
    message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(one, name))}
    if one.tool_calls:
        place = f"[{n}].tool_calls"
        if role != "assistant":
            raise names.error("chat.messages", "is allowed only in a message of the assistant", place=place)
        if not template.knows_calls:  # it would leave them out without a word
            raise names.error("chat.messages", "is refused: this model's chat template knows no calls", place=place)
        message["tool_calls"] = calls_of(one.tool_calls, n, names.error)
    return message


def variables_of(raw: str, names: Names) -> dict[str, Any]:
    """The variables of a JSON object."""
    if not raw:
        return {}
    field = "chat.template_kwargs"
    variables = json_in(raw, field, names.error)
    if not isinstance(variables, dict):
        raise names.error(field, "must be a JSON object")
    for name in RESERVED:
        if name in variables:
            raise names.error(field, f"cannot hold {name}: {reserved(name)}")
    return variables


def reserved(name: str) -> str:
    """Why a request cannot give this variable."""
    return "the template is the model's own" if name == "chat_template" else "it is a field of its own"
