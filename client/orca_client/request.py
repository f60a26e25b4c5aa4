"""Makes a GenerateRequest of the arguments of `generate`.

Only values that the message cannot hold are refused here; the server checks limits.
"""

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeGuard, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2 import Chat, ChatMessage, GenerateRequest, Sampling

from .errors import InvalidArgument
from .many import Message, Prompt

COUNT = f"a whole number from 0 to {2**32 - 1}"
HOLDS = {  # by protobuf's type of a field: its values in words
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_UINT32: COUNT,
    FieldDescriptor.CPPTYPE_UINT64: f"a whole number from 0 to {2**64 - 1}",
}
MEMBERS = tuple(ChatMessage.DESCRIPTOR.fields_by_name)
ToolChoice = Literal["auto", "none", "required"]
CHOICES: Mapping[str, pb.ToolChoice] = {
    "auto": pb.TOOL_CHOICE_UNSPECIFIED,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
}
PriorityName = Literal["urgent", "high", "normal", "low"]
PRIORITIES: Mapping[str, pb.Priority] = {
    "urgent": pb.PRIORITY_URGENT,
    "high": pb.PRIORITY_HIGH,
    "normal": pb.PRIORITY_UNSPECIFIED,
    "low": pb.PRIORITY_LOW,
}
SHOWN = 100  # characters of a wrong value in a sentence


class Tools(NamedTuple):
    """The tools of a chat, as `generate` has them."""

    given: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = "auto"
    names: Sequence[str] = ()
    one_call: bool = False

    def put(self, chat: Chat) -> None:
        """Adds them to a chat. Raises InvalidArgument."""
        if self.choice not in CHOICES:
            raise InvalidArgument(f"tool_choice: must be one of {', '.join(CHOICES)}", "tool_choice")
        with _field("tools", "values of JSON", self.given):
            chat.tools = json.dumps(self.given) if self.given else ""
        with _field("tool_names", "names of functions", self.names):
            chat.tool_names.extend(self.names)
        chat.tool_choice, chat.one_tool_call = CHOICES[self.choice], self.one_call


def generate_request(
    request_id: str,
    prompt: Prompt,
    *,
    template_kwargs: Mapping[str, object] | None,
    tools: "Tools",
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    stop: Sequence[str],
    stop_token_ids: Sequence[int],
    ignore_eos: bool,
    logprobs: bool,
    top_logprobs: int,
    prompt_logprobs: bool,
    detach_grace: float,
    model: str,
    stream_interval: int,
    form: Mapping[str, str | Mapping[str, Any] | None],
    priority: PriorityName,
) -> GenerateRequest:
    """Raises InvalidArgument with the field's name for a value that the field cannot hold, such as a negative count.

    sampling: fields of `Sampling` by their names; None: absent. form: the same of the answer's form, one at most;
    a schema may be the object that JSON spells.
    """
    request = GenerateRequest(ignore_eos=ignore_eos, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    with _field("request_id", "text", request_id):
        request.request_id = request_id
    _check_prompt(prompt)
    if isinstance(prompt, str):
        with _field("text"):
            request.text = prompt
    elif _is_chat(prompt):
        request.chat.CopyFrom(_chat(prompt, template_kwargs))
        tools.put(request.chat)
    else:
        with _field("token_ids.ids", "token ids", prompt):
            request.token_ids.SetInParent()  # so that no ids at all are still a prompt of token ids
            request.token_ids.ids.extend(cast(Sequence[int], prompt))
    if template_kwargs is not None and not request.HasField("chat"):
        raise InvalidArgument("template_kwargs: are for a chat; the prompt is no list of messages", "template_kwargs")
    if tools != Tools() and not request.HasField("chat"):
        raise InvalidArgument("tools: are for a chat; the prompt is no list of messages", "tools")
    with _field("max_new_tokens", COUNT, max_new_tokens):
        request.max_new_tokens = max_new_tokens
    with _field("top_logprobs", COUNT, top_logprobs):
        request.top_logprobs = top_logprobs
    for name, value in sampling.items():
        _put(request.sampling, name, value)
    given = {name: value for name, value in form.items() if value is not None}
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)}: an answer has one form; give one of them", list(given)[1])
    for name, value in given.items():
        with _field(name, "a text"):
            setattr(request, name, json.dumps(value) if isinstance(value, Mapping) else value)
    with _field("stop", "a string or several of them", stop):
        request.stop.extend([stop] if isinstance(stop, str) else stop)
    with _field("stop_token_ids", "token ids", stop_token_ids):
        request.stop_token_ids.extend(stop_token_ids)
    with _field("model", "a name", model):
        request.model = model
    with _field("detach_grace", "a number of seconds", detach_grace):
        request.detach_grace.CopyFrom(_duration(detach_grace))
    if priority not in PRIORITIES:
        raise InvalidArgument(f"priority: must be one of {', '.join(PRIORITIES)}", "priority")
    request.priority = PRIORITIES[priority]
    with _field("stream_interval", COUNT, stream_interval):
        request.stream_interval = stream_interval
    return request


def _is_chat(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _chat(messages: Sequence[Message], variables: Mapping[str, object] | None) -> Chat:
    """The messages, and the variables for the model's template."""
    chat = Chat()
    for n, given in enumerate(messages):
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # whoever calls us
            raise InvalidArgument(f"messages[{n}]: must be a mapping with role and content", f"messages[{n}]")
        message = chat.messages.add()
        for name, value in given.items():
            field = f"messages[{n}].{name}"
            if name not in ChatMessage.DESCRIPTOR.fields_by_name:
                raise InvalidArgument(f"{field}: is not known; a message has {', '.join(MEMBERS)}", field)
            with _field(field, "text", value):
                is_list = name == "tool_calls" and not isinstance(value, str)
                setattr(message, name, json.dumps(value) if is_list else value)
    if variables is not None:
        with _field("template_kwargs", "values of JSON", variables):
            chat.template_kwargs = json.dumps(variables)
    return chat


def _put(sampling: Sampling, name: str, value: Any) -> None:
    """Sets a field of `sampling`, unless the value is None."""
    if value is None:
        return
    kind = Sampling.DESCRIPTOR.fields_by_name[name].cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:  # a map by token id
        for token_id, bias in value.items():
            with _field(f"sampling.{name}[{token_id}]", "a token id with a number", bias):
                getattr(sampling, name)[token_id] = bias
    else:
        with _field(f"sampling.{name}", HOLDS[kind], value):
            setattr(sampling, name, value)


def _check_prompt(prompt: Any) -> None:
    """Raises InvalidArgument for a value that is neither text nor a sequence. Bytes would pass for token ids."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise InvalidArgument("prompt: is bytes; give text (bytes.decode makes it) or token ids", "prompt")
    if not isinstance(prompt, Iterable):
        kind = "None" if prompt is None else f"of type {type(prompt).__name__}"
        raise InvalidArgument(f"prompt: is {kind}; give text, a sequence of token ids, or messages", "prompt")


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


@contextmanager
def _field(name: str, needed: str = "", value: object = None) -> Generator[None, None, None]:
    """Raises InvalidArgument with the field's name when protobuf refuses a value inside the block.

    needed: what the field can hold, in words; without it the words are Python's."""
    try:
        yield
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name}: not valid Unicode: it holds a lone surrogate", name) from None
    except (TypeError, ValueError, OverflowError) as error:
        why = f"must be {needed}; it is {_short(value)}" if needed else str(error)
        raise InvalidArgument(f"{name}: {why}", name) from None


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}.."
