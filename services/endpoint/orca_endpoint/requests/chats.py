"""Conversations as prompts: checked, and made a text by the model's chat template in a thread."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from orca.v1.orca_pb2 import Chat
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument

from ..text.chat_template import CannotRender, ChatTemplate
from .threads import Threads

ROLES = ("system", "developer", "user", "assistant", "tool")
# Variables that a request cannot give: the template itself is the model's, and the others have fields of their own.
RESERVED = ("chat_template", "messages", "tools")

Error = Callable[..., InvalidArgument]  # of a field, what is wrong with it, and the position in it


class Chats:
    """Makes texts of conversations, for a model with a chat template or without one."""

    def __init__(self, template: ChatTemplate | None, threads: Threads, max_bytes: int, tokens: int) -> None:
        """threads: render. max_bytes: of a prompt's text, and so characters of what a template may make. tokens: of the
        answer to a chat that does not say how long it may be."""
        self._template, self._threads, self._max_bytes = template, threads, max_bytes
        self.tokens = tokens

    @property
    def possible(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    async def text(self, chat: Chat, error: Error, field: str) -> str:
        """The text of a prompt. Raises InvalidArgument, FailedPrecondition without a template, ResourceExhausted.

        error: makes the error of a field. field: the caller's name of the messages.
        """
        if self._template is None:
            problem = f"{field}: this model has no chat template; give the prompt as text"
            raise FailedPrecondition(problem, field, reason=ErrorReason.NO_CHAT_TEMPLATE)
        if not chat.messages:
            raise error("chat.messages", "is missing: a chat has at least one message")
        variables = variables_of(chat.template_kwargs, error)
        messages = [self._message(chat, n, error) for n in range(len(chat.messages))]
        try:
            return await self._threads.run(partial(self._template.render, messages, variables, self._max_bytes))
        except CannotRender as refusal:
            raise error("chat.messages", str(refusal)) from None

    def _message(self, chat: Chat, n: int, error: Error) -> dict[str, Any]:
        """One message as the template sees it. A template that knows no developer sees a system message."""
        assert self._template is not None
        one = chat.messages[n]
        if one.role not in ROLES:
            raise error("chat.messages", f"has the role {one.role[:20]!r}; the roles are {', '.join(ROLES)}", n)
        role = "system" if one.role == "developer" and not self._template.knows_developer else one.role
        given = {"role": role, "content": one.content}
        return given | {name: value for name in ("name", "tool_call_id") if (value := getattr(one, name))}


def variables_of(raw: str, error: Error) -> dict[str, Any]:
    """The variables of a JSON object."""
    if not raw:
        return {}
    field = "chat.template_kwargs"
    try:
        variables = json.loads(raw)
    except (ValueError, RecursionError) as wrong:
        raise error(field, f"is not JSON ({wrong})") from None
    if not isinstance(variables, dict):
        raise error(field, "must be a JSON object")
    for name in RESERVED:
        if name in variables:
            raise error(field, f"cannot hold {name}: {reserved(name)}")
    return variables


def reserved(name: str) -> str:
    """Why a request cannot give this variable."""
    return "the template is the model's own" if name == "chat_template" else "it is a field of its own"
