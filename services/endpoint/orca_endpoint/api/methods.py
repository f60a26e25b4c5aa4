"""The methods of the HTTP door by their paths, and those that describe it: its models, its health, how to call it."""

import time
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from orca_common.errors import Unavailable
from orca_common.release import VERSION

from ..anthropic.method import CountTokens, Messages
from ..calls.endpoint import Endpoint
from ..http.routing import MethodRoute, application
from ..ollama.method import OllamaChats, OllamaGenerations, OllamaModels
from ..openai.adapters import LoraAdapters
from ..openai.answer import UsageIn
from ..openai.chat.answer import ChatChunks
from ..openai.chat.answer import Logprobs as ChatLogprobs
from ..openai.chat.method import Chats
from ..openai.completions.answer import CompletionChunks, Logprobs
from ..openai.completions.method import Completions
from ..openai.responses.method import KeptResponses, Library, Responses
from ..openai.resumed import Resumed
from ..openai.tokens import Tokens
from .openapi import described, page

ELSEWHERE = {  # what clients of other servers call, and what there is instead
    "/metrics": "an endpoint's metrics are at /metrics of its status port (the setting status_port)",
    **dict.fromkeys(("/v1/embeddings", "/api/embed"), "no model here makes embeddings: Orca generates text"),
    "/v1/responses/compact": "no conversation is compacted here: give back a shorter one",
    "/api/": "of Ollama's API there are chat, generate, tags, show, ps and version: models are the operator's",
}
NOTHING_ELSE = "default-src 'none'; style-src 'unsafe-inline'"  # the page loads nothing


def methods(endpoint: Endpoint) -> Starlette:
    """Makes the application that serves all methods."""
    tokens, library = Tokens(endpoint), Library(endpoint)

    def of_completions(name: str, usage_in: UsageIn) -> CompletionChunks:
        return CompletionChunks(name, endpoint.name, usage_in, True, Logprobs(endpoint.spell))

    def of_chats(name: str, usage_in: UsageIn) -> ChatChunks:
        return ChatChunks(name, endpoint.name, usage_in, True, ChatLogprobs(endpoint.spell, endpoint.token_bytes))

    routes = [
        MethodRoute("/v1/completions", Completions(endpoint), "POST"),
        MethodRoute("/v1/completions/{id}", Resumed(endpoint, of_completions), "GET", query=True),
        MethodRoute("/v1/chat/completions", Chats(endpoint), "POST"),
        MethodRoute("/v1/chat/completions/{id}", Resumed(endpoint, of_chats), "GET", query=True),
        MethodRoute("/v1/responses", Responses(endpoint, library), "POST"),
        MethodRoute("/v1/responses/compact", absent, "GET", "POST"),  # it is no response's id
        MethodRoute("/v1/responses/{id}", KeptResponses(endpoint, library), "GET", query=True),
        MethodRoute("/v1/messages", Messages(endpoint), "POST", query=True),
        MethodRoute("/v1/messages/count_tokens", CountTokens(endpoint).count, "POST", query=True),
        MethodRoute("/api/chat", OllamaChats(endpoint), "POST"),
        MethodRoute("/api/generate", OllamaGenerations(endpoint), "POST"),
        *OllamaModels(endpoint).routes(),
        MethodRoute("/v1/load_lora_adapter", LoraAdapters(endpoint).load, "POST"),
        MethodRoute("/v1/unload_lora_adapter", LoraAdapters(endpoint).unload, "POST"),
        MethodRoute("/tokenize", tokens.tokenize, "POST"),
        MethodRoute("/tokenizer_info", tokens.info, "GET", "HEAD"),
        MethodRoute("/detokenize", tokens.detokenize, "POST"),
        *Pages(endpoint).routes(),
    ]
    return application(routes, instead)


def instead(path: str, base: str) -> str:
    """Says which path to call instead of an unknown one. base: the door's address."""
    for beginning, sentence in ELSEWHERE.items():
        if path.startswith(beginning):
            return f"{sentence}; {base}/docs lists all paths"
    there_is = f"chats, at {base}/v1/chat/completions, and completions, at {base}/v1/completions"
    return f"there is no such path; Orca serves {there_is}; {base}/docs lists all paths"


async def absent(request: Request) -> Response:
    """A method of ELSEWHERE whose path looks like one of ours."""
    raise HTTPException(HTTPStatus.NOT_FOUND)


class Pages:
    """Methods that describe the door, as endpoints of Starlette."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            MethodRoute("/v1/models", self._models, "GET", "HEAD"),
            MethodRoute("/v1/models/{id:path}", self._model, "GET", "HEAD"),
            MethodRoute("/health", self._health, "GET", "HEAD", query=True),  # probes may say what they like
            MethodRoute("/version", self._version, "GET", "HEAD"),
            MethodRoute("/openapi.json", self._openapi, "GET", "HEAD"),
            MethodRoute("/docs", self._docs, "GET", "HEAD"),
            MethodRoute("/", self._root, "GET", "HEAD"),
        ]

    async def _models(self, request: Request) -> Response:
        adapters = [self._own_card(name) for name in self._endpoint.adapters.ids]
        others = [self._card(name) for name in self._endpoint.settings.others]
        return JSONResponse({"object": "list", "data": [self._own_card(), *adapters, *others]})

    async def _model(self, request: Request) -> Response:
        self._endpoint.check_model(name := request.path_params["id"])
        return JSONResponse(self._own_card(name if name in self._endpoint.adapters.ids else ""))

    def _own_card(self, adapter: str = "") -> dict[str, Any]:
        """The card of the model, or of an adapter that is served beside it."""
        endpoint = self._endpoint
        model = endpoint.checkpoint
        more = {"max_model_len": model.max_positions, "vocab_size": model.vocab_size}
        more["chat_template"] = endpoint.has_chat_template
        if adapter:
            return self._card(adapter) | more | {"parent": endpoint.name}
        return self._card(endpoint.name) | more

    def _card(self, name: str) -> dict[str, Any]:
        """OpenAI's model object."""
        return {"id": name, "object": "model", "created": self._created, "owned_by": "orca"}

    async def _health(self, request: Request) -> Response:
        problem = self._endpoint.not_ready()
        if problem is not None:
            raise Unavailable(problem)
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(described(self._endpoint.name))

    async def _root(self, request: Request) -> Response:
        return RedirectResponse("/docs")

    async def _docs(self, request: Request) -> Response:
        base = str(request.base_url).rstrip("/")
        return HTMLResponse(page(self._endpoint.name, base), headers={"Content-Security-Policy": NOTHING_ELSE})
