"""Runs clients that are not ours against an endpoint, each by its script: `make clients`.

    python tests/clients/served.py NODE PAGE [NAME..]

The endpoint is real; a script plays its engine. A proxy before the endpoint keeps what each client sends. A request
that is refused fails the run. When all scripts have passed, PAGE becomes the table of fields by client. NODE is the
folder with the packages of package.json. NAMES choose scripts, as `litellm`, or `ollama.py` of one language; then no
page is written.
"""

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2 as httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from endpoint.harness import World, make_tool_model, world  # noqa: E402
from fields import Exchange, before_schemas, page  # noqa: E402
from servers import redis_server  # noqa: E402
from tool_templates import TEMPLATES  # noqa: E402

from orca.v1.pool_pb2 import PoolRequest  # noqa: E402

LONGEST = 900  # seconds for a script, with the installation of its packages; then it is ended, and has failed
POSITIONS = 1 << 16  # aider's prompt has some 4,000 tokens of a real vocabulary
SAID, CITY = "It is 5 degrees in Bern.", "Bern"
TURN = "<|im_start|>assistant"
DIRECTIVE = re.compile("SAY:(.*?):SAY", re.DOTALL)
TOOLS = re.compile("<tools>\n(.*?)\n</tools>", re.DOTALL)
NAME = re.compile("""["']name["']: ["'](\\w+)["']""")
HOP = {"host", "connection", "transfer-encoding", "content-length", "content-encoding", "accept-encoding"}


def answer_of(orca: World, record: PoolRequest) -> Sequence[int]:
    """The tokens of the answer to a request.

    A prompt says the text itself: `SAY:text:SAY`. Where there are tools, each is called once, in their order; then,
    or without tools, a schema with a city is answered by one, and everything else by SAID."""
    vocabulary = orca.serving.app.vocabulary
    assert vocabulary is not None
    prompt = vocabulary.decode(list(record.prompt_ids))
    directives, tools = DIRECTIVE.findall(prompt), TOOLS.search(prompt)
    said = directives[-1] if directives else json.dumps({"city": CITY}) if "city" in record.sampling.grammar else SAID
    if tools and "tool_call" in record.sampling.grammar:
        called = set(NAME.findall(prompt[tools.end() :]))
        for tool in map(json.loads, tools[1].splitlines()):
            function = tool.get("function", tool)
            if function["name"] not in called:
                names = function.get("parameters", {}).get("properties", {})
                arguments = {name: CITY if name == "city" else SAID for name in names}
                said = f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': arguments})}\n</tool_call>"
                break
        else:
            said = SAID
    return [*vocabulary.encode(said, False), 0]


@asynccontextmanager
async def proxy(target: str, seen: list[Exchange]) -> AsyncIterator[str]:
    """Inside, a proxy keeps each exchange and passes it on. Yields the proxy's URL."""

    async def forward(request: Request) -> StreamingResponse:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        # h11 sends no value that ends in a space, as an empty key after Bearer
        headers = {name: value.rstrip() for name, value in request.headers.items() if name not in HOP}
        answer = await client.send(
            client.build_request(request.method, path, headers=headers, content=body), stream=True
        )
        refusal = (await answer.aread()).decode() if answer.status_code >= 400 else ""
        seen.append(Exchange(request.method, request.url.path, json.loads(body or "{}"), answer.status_code, refusal))

        async def content() -> AsyncIterator[bytes]:
            if refusal:
                yield refusal.encode()
                return
            async for piece in answer.aiter_bytes():
                yield piece
            await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in HOP}
        return StreamingResponse(content(), answer.status_code, kept)

    app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST", "DELETE", "HEAD"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    async with httpx.AsyncClient(base_url=target, timeout=60) as client:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def command(script: Path, node: Path) -> list[str]:
    """How a script runs: Python's with the packages that it names, JavaScript's beside its packages."""
    if script.suffix == ".mjs":
        copy = node / script.name
        copy.write_text(script.read_text())
        return ["node", str(copy)]
    return [sys.executable, "-m", "uv", "run", "--quiet", "--no-project", "--script", str(script)]


async def main(node: Path, out: Path, names: Sequence[str]) -> int:
    """Runs the scripts and writes the page. Returns how many have failed."""
    failed, sent = 0, dict[str, list[Exchange]]()
    scripts = sorted([*HERE.glob("*_client.py"), *HERE.glob("*_client.mjs")])
    with redis_server() as server, tempfile.TemporaryDirectory() as folder:
        model = make_tool_model(Path(folder) / "tiny", TEMPLATES["hermes"], ["<tool_call>", "</tool_call>"])
        config = model / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"n_positions": POSITIONS}))
        async with world(server.url, model, slots=4 * POSITIONS) as orca, orca.background(lambda r: answer_of(orca, r)):
            for script in scripts:
                name = script.stem.removesuffix("_client")
                if names and not {name, name + script.suffix} & set(names):
                    continue
                seen: list[Exchange] = []
                async with proxy(orca.serving.http, seen) as url:
                    process = await asyncio.create_subprocess_exec(
                        *("timeout", str(LONGEST), *command(script, node)),
                        env=os.environ | {"ORCA": url},
                        stdin=asyncio.subprocess.DEVNULL,  # `llm` reads it to its end, which need not come
                        stdout=asyncio.subprocess.PIPE,
                    )
                    said, _ = await process.communicate()
                lines = said.decode().splitlines()
                refused = [f"{one.path}: {one.refusal}" for one in seen if one.status >= 400]
                passed = process.returncode == 0 and not refused
                failed += not passed
                print(*lines, *refused, f"{script.name}: {'passed' if passed else 'FAILED'}", sep="\n", flush=True)
                if passed:
                    sent[lines[-1]] = seen
    if not failed and not names:
        kept = out.read_text()
        out.write_text(page(sent) + kept.removeprefix(before_schemas(kept)))
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])))
