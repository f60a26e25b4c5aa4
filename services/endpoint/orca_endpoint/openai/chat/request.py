"""The body of OpenAI's `POST /v1/chat/completions`: from JSON to requests."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orca.v1.orca_pb2 import Chat, GenerateRequest
from orca_common.errors import InvalidArgument

from ...requests.chat_renderer import RESERVED, reserved
from ...requests.defaults import MODEL_SAYS_NOTHING, Defaults
from ..body import get
from ..forms import form_of, loose_in
from ..request import (
    Asked,
    Sample,
    check_copies,
    generation,
    labels_of,
    read,
    request_of,
    scores_of,
    tier_name,
    usage_in,
)
from .fields import FIXED, NAMES
from .messages import message_of
from .tools import put_tools

MOST_CHOICES = 128  # of one conversation, as OpenAI has it
OF_OTHERS = {
    "prompt": "is a field of completions, at /v1/completions; a chat has messages",
    "chat_template": "is refused: the template is the model's own; chat_template_kwargs reach it",
}
# Our fields that have other names here. Those of `sampling` have the same without the prefix.
OUR_NAMES: Mapping[str, str] = {
    "chat.messages": "messages",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat.tools": "tools",
    "chat.tool_names": "tool_choice",
    "min_new_tokens": "min_tokens",
}


@dataclass
class Copies:
    """The generations of a chat. The request of each is made when it is asked for: to copy thousands of messages 128
    times at once would hold up the loop."""

    common: GenerateRequest
    n: int
    names: Mapping[str, str]  # of fields

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(self.n))

    def __getitem__(self, k: int, /) -> Sample:
        return Sample(generation(self.common, k) if self.n > 1 else self.common, self.names)

    def clear(self) -> None:
        """Releases the messages."""
        self.common, self.n = GenerateRequest(), 0


@dataclass(frozen=True)
class Conversation(Asked):
    """A parsed body. `each` is its n."""

    logprobs: bool


def parse(raw: bytes, max_samples: int, defaults: Defaults = MODEL_SAYS_NOTHING) -> Conversation:
    """Raises InvalidArgument that names the field. max_samples: generations of one body. defaults: the model's."""
    body = read(raw, NAMES, OF_OTHERS, FIXED)
    stream = get(body, "stream", bool, "true or false", False)
    n = get(body, "n", int, "an integer", 1)
    most = min(max_samples, MOST_CHOICES)
    if not 1 <= n <= most:
        whose = " (the server's max_prompts)" if most < MOST_CHOICES else ""
        raise InvalidArgument("n", f"must be between 1 and {most}{whose}; it is {n}")
    logprobs, top = scores_of(body)
    get(body, "prompt_cache_key", str, "a string", None)  # it changes nothing
    max_tokens, name = tokens_of(body)
    form = form_of(body)
    common = request_of(body, max_tokens, defaults.sampling, form)
    common.chat.CopyFrom(chat_of(body))
    check_copies(n * common.ByteSize(), "n")
    common.logprobs, common.top_logprobs = logprobs, top
    names = {
        **OUR_NAMES,
        **tier_name(body),
        "max_new_tokens": name,
        **({} if form is None else {form.kind: form.field}),
    }
    return Conversation(
        samples=Copies(common, n, names),
        each=n,
        stream=stream,
        detaches=common.detach_grace.ToNanoseconds() > 0,
        usage_in=usage_in(body, stream),
        labels=labels_of(body),
        loose=loose_in(form),
        logprobs=logprobs,
    )


def tokens_of(body: Mapping[str, Any]) -> tuple[int, str]:
    """The tokens of an answer that the body allows, 0 where it does not say, and the name of that field."""
    name = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
    given = {one: get(body, one, int, "an integer", None) for one in ("max_completion_tokens", "max_tokens")}
    found = {value for value in given.values() if value is not None}
    if len(found) > 1:
        other = given["max_completion_tokens"]
        raise InvalidArgument("max_tokens", f"is {given['max_tokens']}, but max_completion_tokens is {other}")
    asked = given[name]
    if asked is not None and asked < 1:
        raise InvalidArgument(name, f"must be at least 1; it is {asked}")
    return asked or 0, name


def chat_of(body: Mapping[str, Any]) -> Chat:
    """The messages, the variables for the template and the tools."""
    messages = body.get("messages")
    if messages is None:
        raise InvalidArgument("messages", "is missing")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("messages", "must be a list of at least one message")
    chat = Chat(
        messages=[message_of(one, f"messages[{n}]") for n, one in enumerate(messages)],
        template_kwargs=template_kwargs(body, quiet="reasoning_effort" in body),
    )
    put_tools(body, chat)
    return chat


def template_kwargs(body: Mapping[str, Any], quiet: bool) -> str:
    """The variables for the template, as JSON. quiet: the body asks for no thoughts, as most templates name it."""
    variables: dict[str, Any] = {"enable_thinking": False} if quiet else {}
    variables |= get(body, "chat_template_kwargs", dict, "an object", {})
    for name in RESERVED:
        if name in variables:
            raise InvalidArgument(f"chat_template_kwargs.{name}", f"is refused: {reserved(name)}")
    return json.dumps(variables) if variables else ""
