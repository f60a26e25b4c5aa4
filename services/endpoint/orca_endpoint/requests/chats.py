"""Conversations as prompts: checked, and made a text by the model's chat template, in a process of its own.

`chat_renderer` does the work. A caller has one of its two processes at a time, and callers have turns.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from orca.v1.orca_pb2 import Chat
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument

from ..text.chat_template import ChatTemplate
from ..text.tool_calls import Syntax
from .helpers import COUNT, Helper, Helpers

WAITING = 1024  # chats of one caller that may wait to be rendered
ALL_WAITING = 4096  # chats of all callers; `max_body_bytes` bounds their bytes
TOO_HARD = "the model's chat template took too much time or memory for them"


class Names(Protocol):
    """Makes errors that name the request's fields as the caller does: `validation.Fields`."""

    def name(self, field: str) -> str: ...

    def error(self, field: str, problem: str, position: int | None = None, place: str = "") -> InvalidArgument: ...


class Chats:
    """Makes texts of conversations, for a model with a chat template or without one."""

    def __init__(
        self, folder: Path, template: ChatTemplate | None, max_bytes: int, tokens: int, special: Sequence[str] = ()
    ) -> None:
        """folder: the checkpoint's, with the template in it. max_bytes: of a chat, and so characters of what a template
        may make. tokens: of the answer to a chat that does not say how long it may be; 0: all that fit. special: tokens
        that are text in messages."""
        self._template, self._max_bytes, self.tokens = template, max_bytes, tokens
        opening = json.dumps({"folder": str(folder), "max_length": max_bytes, "special": list(special)}).encode()
        module, name = f"{__package__}.chat_renderer", "the renderer of chats"
        renderers = [Helper(name, module, opening, ErrorReason.NO_RENDERER) for _ in range(COUNT)]
        self.helpers = Helpers(renderers, "chats", WAITING, ALL_WAITING)

    def warm(self) -> None:
        """Starts the renderers of a model with a template, so that the first chat finds them ready."""
        if self._template is not None:
            self.helpers.warm()

    async def close(self) -> None:
        """Ends the renderers."""
        await self.helpers.close()

    @property
    def possible(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def syntax(self) -> str:
        """The model's spelling of calls of tools; empty where a chat cannot have them."""
        syntax = self._template.tool_use.syntax if self._template is not None else None
        return syntax.name if syntax is not None else ""

    def tool_syntax(self, chat: Chat, names: Names) -> Syntax | None:
        """The spelling of calls in the answer to a chat; None where it has no tools. Raises InvalidArgument, and
        FailedPrecondition for a model that cannot have them. The compiler of forms checks the tools themselves."""
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
        self._bounded(chat, names)
        return template.syntax

    async def text(self, chat: Chat, names: Names, caller: str = "") -> tuple[str, str]:
        """The text of a prompt, and the mark in it (`Vocabulary.encode_marked`), empty without one. caller: whose turn
        it is.

        Raises InvalidArgument, FailedPrecondition without a template, ResourceExhausted when too many chats wait,
        Unavailable when renderers end that are not to blame on the chat.
        """
        self._given(names, "chat.messages")
        if not chat.messages:
            raise names.error("chat.messages", "is missing: a chat has at least one message")
        self._bounded(chat, names)
        async with self.helpers.turn(caller) as renderer:
            answer = await renderer.ask(chat.SerializeToString())
        if answer is None:
            raise names.error("chat.messages", TOO_HARD)
        if "problem" in answer:
            raise names.error(**answer)
        return answer["text"], answer["mark"]

    def _bounded(self, chat: Chat, names: Names) -> None:
        if (size := chat.ByteSize()) > self._max_bytes:
            raise names.error("chat.messages", f"the chat has {size} bytes; at most {self._max_bytes} are allowed")

    def _given(self, names: Names, needed_for: str) -> ChatTemplate:
        """The model's template. Raises FailedPrecondition without one."""
        if self._template is None:
            field = names.name(needed_for)
            problem = f"{field}: this model has no chat template; give the prompt as text"
            raise FailedPrecondition(problem, field, reason=ErrorReason.NO_CHAT_TEMPLATE)
        return self._template
