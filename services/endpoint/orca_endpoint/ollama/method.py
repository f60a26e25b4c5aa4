"""`POST /api/chat` and `POST /api/generate`, and the methods by which Ollama's clients look at models."""

from abc import abstractmethod
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orca_common.errors import InvalidArgument
from orca_common.release import VERSION

from ..calls.endpoint import Endpoint
from ..http.access import caller_in
from ..http.bodies import body_in, parsed
from ..http.routing import MethodRoute
from ..openai.body import check_names, get, load
from ..openai.chat.answer import Logprobs
from ..openai.content import without
from ..openai.replies import Replies
from ..openai.request import Values, check_fixed
from .answer import ChatLines, GeneratedLines, Lines, now
from .request import Asked, parse_chat, parse_generate, untagged

STAYS = "2999-12-31T23:59:59Z"  # until when a model stays: a moment so far off is shown as "forever"
SHOW_NAMES = ("model", "name", "verbose", "system", "template", "options")
FIXED_IN_SHOW: Values = {
    **dict.fromkeys(("system", "template"), (("",), "a model is shown as it is")),
    "options": (({},), "a model is shown as it is"),
}


class OllamaReplies(Replies[Asked]):
    """A method as an ASGI application."""

    prefix, form = "ollama-", "format"

    @abstractmethod
    def _lines(self, model: str, streams: bool, scores: Logprobs | None) -> Lines:
        """The answer's shape."""

    def _reply(self, name: str, question: Asked) -> Lines:
        endpoint = self._endpoint
        scores = Logprobs(endpoint.spell, endpoint.token_bytes) if question.logprobs else None
        return self._lines(question.model or endpoint.name, question.stream, scores)

    def _at_once(self, question: Asked) -> dict[str, Any] | None:
        if question.samples:
            return None
        self._endpoint.check_model(question.model)
        return self._reply("", question).at_once("unload" if question.unload else "load")


class OllamaChats(OllamaReplies):
    """`POST /api/chat`."""

    def _parse(self, raw: bytes) -> Asked:
        return parse_chat(raw, served(self._endpoint), self._endpoint.defaults)

    def _lines(self, model: str, streams: bool, scores: Logprobs | None) -> Lines:
        return ChatLines(model, streams, scores)


class OllamaGenerations(OllamaReplies):
    """`POST /api/generate`."""

    def _parse(self, raw: bytes) -> Asked:
        endpoint = self._endpoint
        return parse_generate(raw, served(endpoint), endpoint.defaults, endpoint.has_chat_template)

    def _lines(self, model: str, streams: bool, scores: Logprobs | None) -> Lines:
        return GeneratedLines(model, streams, scores)


class OllamaModels:
    """The models that are served, as endpoints of Starlette."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._since = endpoint, now()

    def routes(self) -> list[MethodRoute]:
        return [
            MethodRoute("/api/tags", self._tags, "GET", "HEAD"),
            MethodRoute("/api/ps", self._running, "GET", "HEAD"),
            MethodRoute("/api/show", self._show, "POST"),
            MethodRoute("/api/version", self._version, "GET", "HEAD"),
        ]

    async def _tags(self, request: Request) -> Response:
        cards = [self._card(name) for name in served(self._endpoint)]
        others = [self._named(name) | {"details": {}} for name in self._endpoint.settings.others]
        return JSONResponse({"models": [*cards, *others]})

    async def _running(self, request: Request) -> Response:
        more = {"context_length": self._endpoint.checkpoint.max_positions, "expires_at": STAYS}
        return JSONResponse({"models": [self._card(name) | more for name in served(self._endpoint)]})

    async def _show(self, request: Request) -> Response:
        endpoint, kind = self._endpoint, self._endpoint.checkpoint.model_type
        body = without(await parsed(body_in(request.scope), load, endpoint.large, caller_in(request.scope)))
        check_names(body, SHOW_NAMES)
        check_fixed(body, FIXED_IN_SHOW)
        get(body, "verbose", bool, "true or false", False)
        older, name = (get(body, field, str, "a string", "") for field in ("name", "model"))
        if older and name and older != name:
            raise InvalidArgument("name", "is another than model; it is the older name of that field")
        name = name or older
        if not name:
            raise InvalidArgument("model", "is missing")
        endpoint.check_model(name := untagged(name, served(endpoint)))
        about = {
            "general.architecture": kind,
            f"{kind}.context_length": endpoint.checkpoint.max_positions,
            f"{kind}.vocab_size": endpoint.checkpoint.vocab_size,
        }
        can = ["completion", *(["tools"] if endpoint.chats.syntax else [])]
        card = self._card(name)
        known = {member: card[member] for member in ("modified_at", "details")}
        return JSONResponse(known | {"model_info": about, "capabilities": can})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    def _card(self, name: str) -> dict[str, Any]:
        """A model or an adapter. digest: of the tokenizer and the sizes, as the endpoint does not see the weights."""
        checkpoint = self._endpoint.checkpoint
        details = {"family": checkpoint.model_type, "families": [checkpoint.model_type]}
        return self._named(name) | {"digest": checkpoint.digest, "details": details}

    def _named(self, name: str) -> dict[str, Any]:
        return {"name": name, "model": name, "modified_at": self._since}


def served(endpoint: Endpoint) -> list[str]:
    """The names of the model and its adapters."""
    return [endpoint.name, *endpoint.adapters.ids]
