"""Headers, queries and bodies that no client of ours sends: each has its own refusal, and none is a fault of Orca's."""

import asyncio
import json
import random
import time

import httpx2 as httpx
import pytest
from endpoint.harness import World

from orca_common.errors import InvalidArgument
from orca_endpoint.openai.body import load

NUMBERS = ("0" * 22 + "9" * 22, "9" * 5000, "0" * 5000, "4294967296", "-1", "1e3", "٣", "0x10", "", " 1", "1 ", "nan")


@pytest.mark.parametrize("path", ["/v1/completions/x", "/v1/chat/completions/x"])
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12])
async def test_from_which_token_on(orca: World, http: httpx.AsyncClient, path: str, number: str) -> None:
    """Of digits alone and below 2^32; zeros before it change nothing."""
    right = number.isascii() and number.isdecimal() and int(number[:4000]) < 1 << 32
    answers = [("from", await http.get(path, params={"from": number}))]
    if number.isascii() and number.strip() == number:  # as httpx sends it
        answers.append(("Last-Event-ID", await http.get(path, headers={"Last-Event-ID": number})))
    for field, answer in answers:
        if right:
            assert answer.status_code == 404
        else:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_name_that_comes_twice_is_found_in_one_pass() -> None:
    """It took 3.3 s behind 16,000 names, and minutes in a body of 1.8 MB."""
    names = [f'"{n}":0' for n in range(200_000)]
    raw = ("{" + ",".join([*names, '"199999":1']) + "}").encode()
    began = time.thread_time()
    with pytest.raises(InvalidArgument, match="199999: comes twice in one object"):
        load(raw)
    twice = time.thread_time() - began
    began = time.thread_time()
    load(raw.replace(b',"199999":1', b""))
    assert twice < 10 * (time.thread_time() - began), "as long as reading it, within ten times"


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "x"])
async def test_a_compressed_body_is_refused_by_what_is_understood(http: httpx.AsyncClient, encoding: str) -> None:
    """It was called "not valid UTF-8"."""
    answer = await http.post("/v1/completions", content=b"\x1f\x8b\x08", headers={"Content-Encoding": encoding})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (415, "Content-Encoding")
    assert error["message"].endswith("without it or as identity")
    assert answer.headers["accept-encoding"] == "identity"
    plain = {"Content-Encoding": "Identity"}
    assert (await http.post("/v1/completions", json={}, headers=plain)).json()["error"]["param"] == "prompt"


async def test_a_path_with_a_slash_is_the_path_without(http: httpx.AsyncClient) -> None:
    """A redirect names an address that the proxy in front has by another name, with http:// behind TLS."""
    for path in ("/v1/models/", "/v1/models//", "/health/"):
        assert (await http.get(path)).status_code == 200
    answer = await http.post("/v1/completions/", json={})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert (await http.get("/v1/nothing/")).status_code == 404


@pytest.mark.parametrize("name", ["Authorization", "Host"])
async def test_who_comes_and_to_whom_is_said_once(http: httpx.AsyncClient, name: str) -> None:
    """gRPC's door took the last one, this one the first; no client of HTTP sends two."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    hosts = "Host: localhost\r\n" if name != "Host" else ""
    head = f"GET /v1/models HTTP/1.1\r\n{hosts}{name}: Bearer a\r\n{name}: Bearer b\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(10):
        answer = (await reader.read()).decode()
    writer.close()
    assert answer.startswith("HTTP/1.1 400 ")
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["param"] == name.lower()


WORDS = [
    *("prompt", "messages", "model", "max_tokens", "temperature", "top_k", "seed", "n", "stop", "stream", "logprobs"),
    *("logit_bias", "metadata", "user", "echo", "stop_token_ids", "detach_grace", "tools", "tool_choice", "role"),
    *(
        "content",
        "response_format",
        "stream_options",
        "type",
        "json_schema",
        "schema",
        "function",
        "parameters",
        "name",
    ),
]
VALUES = [
    *(None, True, False, 0, -1, 1, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 10**400, -(10**30), 0.5, -0.0, 1e308, 1e-320),
    *("", "a", "\ud800", "\x00", "user", "0" * 5000, "9" * 30, "é" * 9, "json_object", "function", "auto", "../x"),
]


def body(chance: random.Random, depth: int = 0) -> object:
    """A value of JSON out of words of the methods."""
    kind = chance.random()
    if depth > 3 or kind < 0.6:
        return chance.choice(VALUES)
    if kind < 0.8:
        return {
            chance.choice([*WORDS, *map(str, VALUES)]): body(chance, depth + 1) for _ in range(chance.randint(0, 3))
        }
    return [body(chance, depth + 1) for _ in range(chance.randint(0, 3))]


@pytest.mark.parametrize("seed", range(4))
async def test_no_body_header_or_query_is_a_fault_of_orcas(orca: World, http: httpx.AsyncClient, seed: int) -> None:
    """Through the real door. Requests that are right by chance wait for an engine, for as long as their deadline."""
    chance = random.Random(seed)
    paths = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/completions/x"]

    async def one() -> tuple[int, str]:
        given = {chance.choice(WORDS): body(chance) for _ in range(chance.randint(0, 4))}
        if chance.random() < 0.7:
            given |= {"prompt": "a"} if chance.random() < 0.5 else {"messages": [{"role": "user", "content": "a"}]}
        raw = json.dumps(given).encode()
        path, headers = chance.choice(paths), {"X-Request-Timeout": chance.choice(["0.05", "1e303", "-1", "x"])}
        query = {chance.choice(["from", "model", "x"]): chance.choice(NUMBERS)} if chance.random() < 0.2 else {}
        method = "GET" if path in ("/v1/models", "/v1/completions/x") else "POST"
        answer = await http.request(method, path, content=raw, headers=headers, params=query)
        return answer.status_code, f"{method} {path} {query} {headers} {raw.decode()[:2000]} -> {answer.text[:300]}"

    for _ in range(25):
        for status, what in await asyncio.gather(*(one() for _ in range(16))):
            assert status != 500, what
            assert status < 600
