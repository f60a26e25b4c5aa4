"""`POST /tokenize` and `POST /detokenize`, in the shape that vLLM has given them: what a prompt is to the model."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orca.v1.orca_pb2 import Chat
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument

from ..calls.endpoint import Endpoint
from ..http.access import caller_in
from ..http.bodies import body_in, parsed
from ..requests.threads import TEXT_IN_LOOP
from ..requests.validation import Fields
from ..text.tokenizer_folder import TokenizerFolder
from ..text.vocabulary import Vocabulary
from .body import check_names, get, load, text
from .chat.request import OUR_NAMES, chat_of
from .request import token_ids

T = TypeVar("T")

OF_BOTH = {"model", "add_special_tokens", "return_token_strs"}
OF_A_TEXT = OF_BOTH | {"prompt"}
OF_A_CHAT = OF_BOTH | {"messages", "add_generation_prompt", "chat_template_kwargs", "tools"}


class Tokens:
    """The methods, as endpoints of Starlette."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._config = TokenizerFolder(endpoint.checkpoint.folder).config

    async def tokenize(self, request: Request) -> Response:
        caller, vocabulary = caller_in(request.scope), vocabulary_of(self._endpoint)
        asked = await self._question(request, text_in)
        prompt, mark = asked.prompt, ""
        if isinstance(prompt, Chat):
            prompt, mark = await self._endpoint.chats.text(prompt, Fields(OUR_NAMES), caller)
        ids = await tokens_of(self._endpoint, text(prompt, "prompt"), caller, mark, asked.special)
        names = await self._at_length(ids, lambda: [*map(vocabulary.spell, ids)], caller) if asked.spelled else None
        limit = self._endpoint.checkpoint.max_positions
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names})

    async def detokenize(self, request: Request) -> Response:
        vocabulary = vocabulary_of(self._endpoint)
        ids = await self._question(request, partial(ids_in, vocab_size=self._endpoint.checkpoint.vocab_size))
        texts = await self._at_length(ids, lambda: vocabulary.texts(ids), caller_in(request.scope))
        return JSONResponse({"prompt": "".join(texts)})

    async def info(self, request: Request) -> Response:
        """The checkpoint's tokenizer_config.json."""
        return JSONResponse(self._config)

    async def _question(self, request: Request, read: Callable[[Mapping[str, Any]], T]) -> T:
        """The question of a body, as `read` finds it, which takes as long as the body is."""

        def parse(raw: bytes) -> T:
            body = load(raw)
            self._endpoint.check_model(get(body, "model", str, "a string", ""))
            return read(body)

        return await parsed(body_in(request.scope), parse, self._endpoint.large, caller_in(request.scope))

    async def _at_length(self, ids: Sequence[int], work: Callable[[], list[str]], caller: str) -> list[str]:
        """Runs work on these tokens; in a thread where they are many."""
        return work() if len(ids) <= TEXT_IN_LOOP else await self._endpoint.large.run(work, caller)


@dataclass(frozen=True)
class Asked:
    """A question of `/tokenize`. special: with the tokens that the tokenizer puts around a text. spelled: with
    the texts of the tokens."""

    prompt: str | Chat
    special: bool
    spelled: bool


def text_in(body: Mapping[str, Any]) -> Asked:
    """Raises InvalidArgument."""
    check_names(body, OF_A_TEXT | OF_A_CHAT)
    is_chat = body.get("messages") is not None
    if not is_chat and body.get("prompt") is None:
        raise InvalidArgument("prompt", "is missing; or give messages")
    check_names(body, OF_A_CHAT if is_chat else OF_A_TEXT)
    special = get(body, "add_special_tokens", bool, "true or false", not is_chat)
    spelled = get(body, "return_token_strs", bool, "true or false", False)
    if not is_chat:
        return Asked(get(body, "prompt", str, "a string", ""), special, spelled)
    for name, value in (("add_generation_prompt", True), ("add_special_tokens", False)):
        if get(body, name, bool, "true or false", value) != value:
            raise InvalidArgument(name, f"must be {json.dumps(value)} with messages, as in chats")
    return Asked(chat_of(body), special, spelled)


def ids_in(body: Mapping[str, Any], vocab_size: int) -> list[int]:
    """The tokens of a body of `/detokenize`. Raises InvalidArgument."""
    check_names(body, {"model", "tokens"})
    if "tokens" not in body:
        raise InvalidArgument("tokens", "is missing")
    ids = token_ids(body["tokens"], "tokens")
    for n, i in enumerate(ids):
        if i >= vocab_size:
            raise InvalidArgument(f"tokens[{n}]", f"is {i}, but the vocabulary has {vocab_size} tokens")
    return ids


async def tokens_of(endpoint: Endpoint, prompt: str, caller: str, mark: str = "", special: bool = True) -> list[int]:
    """The tokens of a prompt. caller: whose turn it is. mark: in special tokens' names that are text. special: with
    those that the tokenizer puts around a text. Raises InvalidArgument, and FailedPrecondition without a tokenizer."""
    vocabulary, size, limit = vocabulary_of(endpoint), len(prompt.encode()), endpoint.settings.max_prompt_bytes
    if size > limit:
        raise InvalidArgument("prompt", f"has {size} bytes; at most {limit} are allowed")

    def encode() -> list[int]:
        return vocabulary.encode_marked(prompt, mark) if mark else vocabulary.encode(prompt, special)

    return encode() if size <= TEXT_IN_LOOP else await endpoint.tokenizing.run(encode, caller)


def vocabulary_of(endpoint: Endpoint) -> Vocabulary:
    """The model's vocabulary. Raises FailedPrecondition where it has none."""
    if endpoint.vocabulary is None:
        raise FailedPrecondition("this model has no tokenizer.json", reason=ErrorReason.NO_TOKENIZER)
    return endpoint.vocabulary
