"""`POST /tokenize` and `POST /detokenize`, in the shape that vLLM has given them: what a prompt is to the model."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument

from ..calls.endpoint import Endpoint
from ..http.access import caller_in
from ..http.bodies import body_in, parsed
from ..requests.threads import TEXT_IN_LOOP
from ..text.vocabulary import Vocabulary
from .body import check_names, get, load, text
from .request import token_ids


class Tokens:
    """Both methods, as endpoints of Starlette."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, {"model", "prompt", "add_special_tokens", "return_token_strs"})
        prompt = get(body, "prompt", str, "a string", None)
        if prompt is None:
            raise InvalidArgument("prompt", "is missing")
        size, limit = len(text(prompt, "prompt").encode()), self._endpoint.settings.max_prompt_bytes
        if size > limit:
            raise InvalidArgument("prompt", f"has {size} bytes; at most {limit} are allowed")
        special = get(body, "add_special_tokens", bool, "true or false", True)
        spelled = get(body, "return_token_strs", bool, "true or false", False)
        vocabulary = self._vocabulary()

        def encoded() -> tuple[list[int], list[str] | None]:
            ids = vocabulary.encode(prompt, special)
            return ids, [vocabulary.spell(i) for i in ids] if spelled else None

        ids, names = (
            encoded()
            if size <= TEXT_IN_LOOP
            else await self._endpoint.tokenizing.run(encoded, caller_in(request.scope))
        )
        limit = self._endpoint.checkpoint.max_positions
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, {"model", "tokens"})
        if "tokens" not in body:
            raise InvalidArgument("tokens", "is missing")
        ids, vocab_size = token_ids(body["tokens"], "tokens"), self._endpoint.checkpoint.vocab_size
        for n, i in enumerate(ids):
            if i >= vocab_size:
                raise InvalidArgument(f"tokens[{n}]", f"is {i}, but the vocabulary has {vocab_size} tokens")
        vocabulary = self._vocabulary()
        few, caller = len(ids) <= TEXT_IN_LOOP, caller_in(request.scope)
        texts = vocabulary.texts(ids) if few else await self._endpoint.large.run(lambda: vocabulary.texts(ids), caller)
        return JSONResponse({"prompt": "".join(texts)})

    async def _body(self, request: Request, known: set[str]) -> Mapping[str, Any]:
        body = await parsed(body_in(request.scope), load, self._endpoint.large, caller_in(request.scope))
        check_names(body, known)
        self._endpoint.check_model(get(body, "model", str, "a string", ""))
        return body

    def _vocabulary(self) -> Vocabulary:
        vocabulary = self._endpoint.vocabulary
        if vocabulary is None:
            raise FailedPrecondition("this model has no tokenizer.json", reason=ErrorReason.NO_TOKENIZER)
        return vocabulary
