"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, for clients of Anthropic's."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from orca_common.errors import InvalidArgument

from ..calls.endpoint import Endpoint
from ..http.access import caller_in
from ..http.bodies import body_in, parsed
from ..http.exchange import Answer
from ..openai.body import check_names
from ..openai.replies import Question, Replies
from ..openai.tokens import tokens_of
from ..requests.validation import Fields
from .answer import MessageReply
from .request import OUR_NAMES, parse, prompt_of


class Messages(Replies[Question]):
    """The method as an ASGI application."""

    prefix, form = "msg_", "output_config.format"

    def _parse(self, raw: bytes) -> Question:
        return parse(raw, self._endpoint.defaults)

    def _reply(self, name: str, question: Question) -> MessageReply:
        model = question.samples[0].request.model or self._endpoint.name
        return MessageReply(name, model, question.stream, self._endpoint.spell)

    async def _serve(self, request: Request, answer: Answer) -> None:
        check_query(request)
        await super()._serve(request, answer)


class CountTokens:
    """The method that counts a prompt's tokens, as an endpoint of Starlette."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def count(self, request: Request) -> Response:
        check_query(request)
        endpoint, caller = self._endpoint, caller_in(request.scope)
        model, chat, theirs = await parsed(body_in(request.scope), prompt_of, endpoint.large, caller)
        endpoint.check_model(model)
        try:
            prompt, mark = await endpoint.chats.text(chat, Fields(OUR_NAMES), caller)
        except InvalidArgument as error:
            raise InvalidArgument(theirs(error.field), error.problem) from None
        return JSONResponse({"input_tokens": len(await tokens_of(endpoint, prompt, caller, mark, special=False))})


def check_query(request: Request) -> None:
    """Raises InvalidArgument. `beta` is what Anthropic's clients say of their own methods."""
    check_names(request.query_params, {"beta"})
