"""The bodies of Ollama's `POST /api/chat` and `POST /api/generate`: from JSON to a request."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from orca.v1.orca_pb2 import Chat, ChatMessage, GenerateRequest
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument
from orca_common.sampling import SAMPLING

from ..openai.answer import UsageIn
from ..openai.body import check_names, get, text
from ..openai.chat.request import OUR_NAMES as OF_CHATS
from ..openai.chat.request import template_kwargs
from ..openai.chat.tools import Chosen, put_functions
from ..openai.content import without
from ..openai.forms import Wanted, loose_in
from ..openai.replies import Question
from ..openai.request import Sample, check_fixed, read, request_of, scores_of
from ..openai.response_format import ANY_OBJECT
from ..requests.defaults import MODEL_SAYS_NOTHING, Defaults
from .fields import CHAT, FIXED, FIXED_IN_OPTIONS, GENERATE, IGNORED, OPTIONS, RENAMED
from .messages import messages_of

TAG = ":latest"  # which Ollama's clients put behind a name
CHAT_NAMES, GENERATE_NAMES = (frozenset(field.name for field in fields) for fields in (CHAT, GENERATE))
OPTION_NAMES = frozenset(field.name for field in OPTIONS)
OF_OTHERS = {"prompt": "is a field of /api/generate; a chat has messages"}
OF_CHAT = {
    "messages": "is a field of /api/chat; here is a prompt",
    "tools": "is a field of /api/chat",
}
ALL_THAT_FIT = (-1, -2)  # as `num_predict`
DURATION = re.compile(r"[+-]?(?:0|(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+)")  # as Go writes it
# The caller's names of our fields.
OUR_NAMES: Mapping[str, str] = {
    **OF_CHATS,
    **{f"sampling.{name}": f"options.{RENAMED.get(name, name)}" for name in SAMPLING},
    "text": "prompt",
    "max_new_tokens": "options.num_predict",
    "stop": "options.stop",
    "json_schema": "format",
}
OF_PROMPTS = {**OUR_NAMES, "chat.messages": "prompt"}


@dataclass(frozen=True)
class Asked(Question):
    """A parsed body. Without a sample it asks for no answer: whether the model is there."""

    model: str
    logprobs: bool
    unload: bool  # it would end the model's stay


def parse_chat(raw: bytes, served: Collection[str] = (), defaults: Defaults = MODEL_SAYS_NOTHING) -> Asked:
    """Raises InvalidArgument that names the field. served: the models' names. defaults: the model's."""
    body = read(raw, CHAT_NAMES, OF_OTHERS, FIXED)
    messages = get(body, "messages", list, "a list", [])
    chat = Chat(messages=messages_of(messages), template_kwargs=template_kwargs(body, quiet="think" in body))
    put_functions(get(body, "tools", list, "a list", []), Chosen(), chat)
    return asked(body, served, defaults, chat if messages else None, OUR_NAMES)


def parse_generate(
    raw: bytes, served: Collection[str] = (), defaults: Defaults = MODEL_SAYS_NOTHING, templated: bool = True
) -> Asked:
    """As `parse_chat`. templated: the model has a chat template."""
    body = read(raw, GENERATE_NAMES, OF_CHAT, FIXED)
    prompt, system = (text(get(body, name, str, "a string", ""), name) for name in ("prompt", "system"))
    plain = get(body, "raw", bool, "true or false", False)
    for field in [name for name in ("system", "chat_template_kwargs") if name in body and body[name] != ""]:
        if plain:
            raise InvalidArgument(field, "is not allowed with raw: a prompt is then as it stands")
        if not templated:
            problem = f"{field}: this model has no chat template"
            raise FailedPrecondition(problem, field, reason=ErrorReason.NO_CHAT_TEMPLATE)
    if plain or not templated or not prompt:
        return asked(body, served, defaults, prompt or None, OF_PROMPTS)
    said = [("system", system)] if system else []
    messages = [ChatMessage(role=role, content=content) for role, content in (*said, ("user", prompt))]
    chat = Chat(messages=messages, template_kwargs=template_kwargs(body, quiet="think" in body))
    places = [*(role for role, _ in said), "prompt"]

    def theirs(field: str) -> str:
        return next((place for n, place in enumerate(places) if field.startswith(f"prompt[{n}]")), field)

    return asked(body, served, defaults, chat, OF_PROMPTS, theirs)


def asked(
    body: Mapping[str, Any],
    served: Collection[str],
    defaults: Defaults,
    prompt: Chat | str | None,
    names: Mapping[str, str],
    theirs: Callable[[str], str] = str,
) -> Asked:
    """All that both bodies have alike. prompt: None: there is no prompt. names: the caller's, of our fields. theirs: of
    a place in the chat."""
    model, form = untagged(body.get("model", ""), served), form_of(body.get("format"))
    options, tokens = options_of(body)
    try:
        common = request_of(
            {**options, "model": model, "priority": body.get("priority")}, tokens, defaults.sampling, form
        )
    except InvalidArgument as error:
        raise InvalidArgument(in_options(error.field), error.problem) from None
    common.logprobs, common.top_logprobs = scores_of(body)
    return Asked(
        samples=[] if prompt is None else [Sample(with_prompt(common, prompt), names, open_end=True)],
        each=1,
        stream=get(body, "stream", bool, "true or false", True),
        detaches=False,
        usage_in=UsageIn(),
        labels={},
        loose=loose_in(form),
        theirs=theirs,
        model=model,
        logprobs=common.logprobs,
        unload=unloads(body.get("keep_alive")),
    )


def with_prompt(common: GenerateRequest, prompt: Chat | str) -> GenerateRequest:
    if isinstance(prompt, str):
        common.text = prompt
    else:
        common.chat.CopyFrom(prompt)
    return common


def untagged(model: str, served: Collection[str]) -> str:
    """The name without the tag that Ollama's clients put behind each."""
    return model if model in served else model.removesuffix(TAG)


def unloads(keep_alive: Any) -> bool:
    """Whether a model would go at once. Raises InvalidArgument unless it is a number of seconds, or a duration."""
    if isinstance(keep_alive, str) and DURATION.fullmatch(keep_alive):
        return not re.search("[1-9]", keep_alive)
    if isinstance(keep_alive, bool) or not isinstance(keep_alive, int | float | None):
        raise InvalidArgument("keep_alive", "must be a number of seconds, or a duration as 5m or 1h30m")
    return keep_alive == 0


def options_of(body: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The options by the names that a body of OpenAI's has, and the tokens of the answer; 0: all that fit."""
    given = without(get(body, "options", dict, "an object", {}))
    check_names(given, OPTION_NAMES, "options.")
    check_fixed(given, FIXED_IN_OPTIONS, "options.")
    tokens = get(given, "num_predict", int, "an integer", -1, "options.num_predict")
    if tokens < 1 and tokens not in ALL_THAT_FIT:
        raise InvalidArgument("options.num_predict", f"must be at least 1, or -1 for all that fit; it is {tokens}")
    ours = {theirs: name for name, theirs in RENAMED.items()}
    taken = {
        ours.get(name, name): value
        for name, value in given.items()
        if name not in (*IGNORED, *FIXED_IN_OPTIONS, "num_predict")
    }
    if taken.get("top_k") == 0 and not isinstance(taken["top_k"], bool):
        del taken["top_k"]
    if taken.get("seed") == -1:
        del taken["seed"]
    return taken, max(tokens, 0)


def in_options(field: str) -> str:
    """The caller's name of a field that `request_of` has read."""
    name, bracket, rest = field.partition("[")
    known = name in SAMPLING or name == "stop"
    return f"options.{RENAMED.get(name, name)}{bracket}{rest}" if known else field


def form_of(given: Any) -> Wanted | None:
    """The form of an answer; None for text."""
    if given is None or given == "":
        return None
    if given != "json" and not isinstance(given, dict):
        raise InvalidArgument("format", "must be json, or a JSON schema")
    return Wanted("json_schema", ANY_OBJECT if given == "json" else json.dumps(given), "format", loose=True)
