"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter` in the shape of vLLM's, for operators."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from orca_common.errors import InvalidArgument

from ..calls.endpoint import Endpoint
from ..http.access import caller_in, tenant_in
from ..http.bodies import body_in, parsed
from .body import check_names, get, load


class LoraAdapters:
    """The methods, as endpoints of Starlette."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def load(self, request: Request) -> Response:
        body = await self._body(request, {"lora_name", "lora_path", "load_inplace"})
        name, folder = _text(body, "lora_name"), _text(body, "lora_path")
        replace = get(body, "load_inplace", bool, "true or false", False)
        await self._endpoint.adapters.load(name, folder, replace=replace)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        body = await self._body(request, {"lora_name", "lora_int_id"})
        name = _text(body, "lora_name")
        await self._endpoint.adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _body(self, request: Request, known: set[str]) -> Mapping[str, Any]:
        self._endpoint.adapters.check_operator(tenant_in(request.scope))
        body = await parsed(body_in(request.scope), load, self._endpoint.large, caller_in(request.scope))
        check_names(body, known)
        return body


def _text(body: Mapping[str, Any], name: str) -> str:
    found = get(body, name, str, "a string", "")
    if not found:
        raise InvalidArgument(name, "is missing")
    return found
