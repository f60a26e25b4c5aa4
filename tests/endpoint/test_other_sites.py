"""Pages of other sites reach no door through a browser: JSON's content type is asked for, and `Host` is checked."""

from pathlib import Path

import httpx2 as httpx
import pytest
from endpoint.harness import World, world

from orca_common.api_keys import line_of, new_key

BODY = b'{"model": "tiny", "prompt": [5], "max_tokens": 1}'
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None])
@pytest.mark.parametrize("path", POSTS)
async def test_a_body_of_another_type_is_refused(orca: World, path: str, kind: str | None) -> None:
    """A page of another site may send these without asking first. curl -d sends the second."""
    headers = {} if kind is None else {"content-type": kind}
    async with httpx.AsyncClient(base_url=orca.serving.http) as http:
        answer = await http.post(path, content=BODY, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (415, "Content-Type", "invalid_request_error")
    assert error["message"].endswith("; send the header Content-Type: application/json with a body of JSON")
    assert answer.headers["accept"] == "application/json"
    assert orca.serving.app.delivery.count == 0


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/json ; a=b"])
async def test_json_is_taken(orca: World, kind: str) -> None:
    async with httpx.AsyncClient(base_url=orca.serving.http) as http:
        answer = await http.post("/tokenize", content=b'{"prompt": "a"}', headers={"content-type": kind})
        assert answer.status_code == 200
        assert (await http.post("/v1/nothing")).status_code == 404, "without a body there is no type to ask for"


async def test_another_host_is_refused(orca: World) -> None:
    """A page whose name looks up to 127.0.0.1 would read the answer."""
    async with httpx.AsyncClient(base_url=orca.serving.http) as http:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/"), ("GET", "/nothing")):
            answer = await http.request(method, path, headers={"host": "evil.example:80"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (421, "Host")
            assert "'evil.example' is no name of this port" in answer.json()["error"]["message"]
        probe = await http.get("/health", headers={"host": "any-http"})  # Envoy's, by its cluster's name
        assert probe.status_code == 200
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
            assert (await http.get("/v1/models", headers={"host": host})).status_code == 200


async def test_hosts_that_are_given_and_keys(redis_url: str, model: Path) -> None:
    other = {"host": "api.example.com"}
    async with (
        world(redis_url, model, host_names="api.example.com") as orca,
        httpx.AsyncClient(base_url=orca.serving.http) as http,
    ):
        assert (await http.get("/v1/models", headers=other)).status_code == 200
        assert (await http.get("/v1/models", headers={"host": "evil.example"})).status_code == 421
    key = new_key()
    async with (
        world(redis_url, model, api_keys=line_of("research", key)) as orca,
        httpx.AsyncClient(base_url=orca.serving.http) as http,
    ):
        answer = await http.get("/v1/models", headers={**other, "authorization": f"Bearer {key}"})
        assert answer.status_code == 200, "a browser does not send a key by itself"
