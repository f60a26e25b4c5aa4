"""Tries schemas that are not ours against an endpoint: `make schemas`.

    python tests/clients/other_schemas.py NODE PAGE [NAME..]

They are those of all tools of the most used MCP servers of the npm registry that start without a network, and of types
of zod and pydantic. NODE is the folder into which npm installs. Each schema is sent as a tool's and as a
`response_format`, with `strict` and without. Without it each is accepted, and the header and the metric name the
keywords that are left out. With it the same ones are refused, by their places, and all others accepted. When all is
so, PAGE has a table of them. NAMES choose sources; then no page is written. No schema is kept here.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx2 as httpx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from endpoint.harness import make_tool_model, world  # noqa: E402
from fields import SCHEMAS, before_schemas  # noqa: E402
from servers import redis_server  # noqa: E402
from tool_templates import TEMPLATES  # noqa: E402

POSITIONS = 1 << 20  # the tools of one server are up to 300,000 tokens of the model's small vocabulary
TOOLS = 128  # of one request, at most
START = 30.0  # seconds for a server to say its tools
COUNTER = "orca_schema_relaxations_total{"


@dataclass(frozen=True)
class Server:
    """An MCP server of the npm registry: its version, and arguments without which it does not start. No key is real."""

    version: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


# By their downloads of a month, the most used one first.
SERVERS = {
    "@playwright/mcp": Server("0.0.83"),
    "chrome-devtools-mcp": Server("1.11.0"),
    "@upstash/context7-mcp": Server("4.1.1"),
    "@modelcontextprotocol/server-filesystem": Server("2026.8.31", (".",)),
    "@modelcontextprotocol/server-sequential-thinking": Server("2026.8.31"),
    "@modelcontextprotocol/server-github": Server("2025.4.8"),
    "@modelcontextprotocol/server-memory": Server("2026.8.31"),
    "@modelcontextprotocol/server-postgres": Server("0.6.2", ("postgresql://127.0.0.1:1/none",)),
    "@modelcontextprotocol/server-everything": Server("2026.8.31"),
    "@notionhq/notion-mcp-server": Server("2.5.2", (), {"NOTION_TOKEN": "none"}),
    "@modelcontextprotocol/server-google-maps": Server("0.6.2", (), {"GOOGLE_MAPS_API_KEY": "none"}),
    "nx-mcp": Server("0.25.0"),
    "@circleci/mcp-server-circleci": Server("0.20.0", (), {"CIRCLECI_TOKEN": "none"}),
    "n8n-mcp": Server("2.87.0", (), {"MCP_MODE": "stdio"}),
    "next-devtools-mcp": Server("0.4.0"),
    "mongodb-mcp-server": Server("3.0.4"),
    "tavily-mcp": Server("0.2.22", (), {"TAVILY_API_KEY": "none"}),
    "@modelcontextprotocol/server-slack": Server("2025.4.25", (), {"SLACK_BOT_TOKEN": "none", "SLACK_TEAM_ID": "T0"}),
    "@zereight/mcp-gitlab": Server("2.1.64", (), {"GITLAB_PERSONAL_ACCESS_TOKEN": "none"}),
    "firecrawl-mcp": Server("3.26.0", (), {"FIRECRAWL_API_KEY": "none"}),
    "@wonderwhy-er/desktop-commander": Server("0.2.52"),
    "@modelcontextprotocol/server-brave-search": Server("0.6.2", (), {"BRAVE_API_KEY": "none"}),
    "@modelcontextprotocol/server-puppeteer": Server("2025.5.12"),
    "@sentry/mcp-server": Server("0.39.0", ("--access-token", "none")),
    "figma-developer-mcp": Server("0.13.2", ("--stdio", "--figma-api-key", "none")),
}


async def tools_of(name: str, server: Server, node: Path) -> dict[str, Any]:
    """The schemas of a server's tools, by their names. Raises RuntimeError where it does not start."""
    package = node / "node_modules" / name
    programs = json.loads((package / "package.json").read_text())["bin"]
    program = programs if isinstance(programs, str) else next(iter(programs.values()))
    process = await asyncio.create_subprocess_exec(
        *("node", str(package / program), *server.arguments),
        env=os.environ | server.environment,
        cwd=node,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 24,  # bytes of a line
    )
    assert process.stdin is not None
    assert process.stdout is not None
    reading, writing = process.stdout, process.stdin

    async def ask(number: int, method: str, **params: Any) -> Any:
        asked = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        writing.write(json.dumps(asked).encode() + b"\n")
        async for line in reading:
            said = json.loads(line) if line.startswith(b"{") else {}
            if said.get("id") == number and "method" not in said:
                return said["result"]
        raise RuntimeError("it has ended")

    try:
        async with asyncio.timeout(START):
            about = {"name": "orca", "version": "0"}
            await ask(1, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=about)
            writing.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
            found, more, number = dict[str, Any](), dict[str, str](), 2
            while True:
                page = await ask(number, "tools/list", **more)
                found |= {tool["name"]: tool["inputSchema"] for tool in page["tools"]}
                if not page.get("nextCursor"):
                    return found
                more, number = {"cursor": page["nextCursor"]}, number + 1
    except (TimeoutError, RuntimeError, OSError) as error:
        process.kill()
        _, errors = await process.communicate()
        raise RuntimeError(f"{name} does not start: {error!r}\n{errors[-500:].decode(errors='replace')}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def types_of(script: Path, node: Path) -> dict[str, Any]:
    """The schemas that a script of `types` prints."""
    if script.suffix == ".mjs":
        copy = node / script.name
        copy.write_text(script.read_text())
        command = ["node", str(copy)]
    else:
        command = [sys.executable, "-m", "uv", "run", "--quiet", "--no-project", "--script", str(script)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


@dataclass
class Outcome:
    """The result of a source: how its schemas were taken."""

    schemas: int
    size: int  # bytes
    left_out: Counter[str] = field(default_factory=Counter[str])  # keywords of tools
    refused: int = 0  # tools, with `strict`
    wrong: list[str] = field(default_factory=list[str])


class Door:
    """An endpoint, as one who sends schemas meets it."""

    def __init__(self, http: httpx.AsyncClient, status: httpx.AsyncClient) -> None:
        self._http, self._status = http, status

    async def _ask(self, **body: Any) -> httpx.Response:
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | body
        return await self._http.post("/v1/chat/completions", json=asked)

    async def _counted(self) -> float:
        lines = (await self._status.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(COUNTER))

    async def tried(self, schemas: Mapping[str, Any]) -> Outcome:
        """Sends the schemas of one source, all together and each alone in each way."""
        outcome = Outcome(len(schemas), sum(len(json.dumps(one)) for one in schemas.values()))
        every = [tool(f"f{n}", one) for n, one in enumerate(schemas.values())]
        for first in range(0, len(every), TOOLS):
            together = await self._ask(tools=every[first : first + TOOLS])
            if together.status_code != 200:
                outcome.wrong.append(f"all tools: {together.text}")
        for name, schema in schemas.items():
            free, bound = ({"tools": [tool("f", schema, strict)]} for strict in (False, True))
            places, wrong = await self._held("f", "tools[0].function.parameters", free, bound)
            free, bound = ({"response_format": response_format(schema, strict)} for strict in (False, True))
            _, more = await self._held("response_format", "response_format.json_schema.schema", free, bound)
            outcome.left_out.update(map(keyword_of, places))
            outcome.refused += bool(places)
            outcome.wrong += [f"{name}: {one}" for one in (wrong, more) if one]
        return outcome

    async def _held(
        self, label: str, param: str, free: Mapping[str, Any], bound: Mapping[str, Any]
    ) -> tuple[list[str], str]:
        """The places that are left out of a schema, and what is wrong with that; "" for nothing.

        label, param: the schema's name in the header and in an error. free, bound: bodies without `strict` and with it.
        """
        before = await self._counted()
        loose, strict = await self._ask(**free), await self._ask(**bound)
        counted = await self._counted() - before
        shown = unquote(loose.headers.get("x-orca-relaxed", ""))
        places = [one.removeprefix(f"{label}:") for one in shown.split("; ") if one]
        refused = strict.json()["error"]["param"] if strict.status_code == 400 else ""
        if loose.status_code != 200:
            return places, loose.text
        if counted != len(places):
            return places, f"{places} are left out, and {counted:g} counted"
        if not places and strict.status_code == 200:
            return places, ""
        named = refused in {param + place.removesuffix(".") for place in places}
        return places, "" if named else f"{places} are left out, and with strict: {strict.text}"


def tool(name: str, schema: Any, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema} | ({"strict": True} if strict else {})}


def response_format(schema: Any, strict: bool) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "f", "schema": schema} | ({"strict": True} if strict else {}),
    }


def keyword_of(place: str) -> str:
    """The keyword at a place, as uniqueItems of ".properties.a.uniqueItems"; "all" of a whole schema."""
    return place.rpartition(".")[2].partition("[")[0] or "all"


def row(name: str, version: str, outcome: Outcome) -> str:
    said = ", ".join(f"`{keyword}` {count}" for keyword, count in sorted(outcome.left_out.items()))
    return f"| {name} | {version} | {outcome.schemas} | {outcome.size:,} | {said} | {outcome.refused} |"


def install(names: Collection[str], node: Path) -> None:
    packages = [f"{name}@{SERVERS[name].version}" for name in names]
    quiet = ["--silent", "--no-fund", "--no-audit", "--no-save", "--no-package-lock", "--ignore-scripts"]
    subprocess.run(["npm", "install", *quiet, *packages], cwd=node, check=True)


async def main(node: Path, out: Path, names: Sequence[str]) -> int:
    """Tries all sources and writes the table. Returns how many schemas went wrong."""
    types = {path.stem.partition("_")[0]: path for path in (HERE / "types").iterdir()}
    versions = {name: one.version for name, one in SERVERS.items()}
    versions["zod"] = json.loads((node / "package.json").read_text())["dependencies"]["zod"]
    versions["pydantic"] = types["pydantic"].read_text().partition("==")[2].partition('"')[0]
    rows, wrong = list[str](), 0
    with redis_server() as server, tempfile.TemporaryDirectory() as folder:
        model = make_tool_model(Path(folder) / "tiny", TEMPLATES["hermes"], ["<tool_call>", "</tool_call>"])
        config = model / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"n_positions": POSITIONS}))
        async with (
            world(server.url, model, slots=4 * POSITIONS) as orca,
            orca.background(lambda record: [0]),
            httpx.AsyncClient(base_url=orca.serving.http, timeout=60) as http,
            httpx.AsyncClient(base_url=f"http://{orca.serving.addresses['status']}", timeout=60) as status,
        ):
            for name, version in versions.items():
                if names and name not in names:
                    continue
                schemas = types_of(types[name], node) if name in types else await tools_of(name, SERVERS[name], node)
                outcome = await Door(http, status).tried(schemas)
                rows.append(row(name, version, outcome))
                wrong += len(outcome.wrong)
                print(rows[-1], *outcome.wrong, sep="\n", flush=True)
    if not wrong and not names:
        out.write_text(before_schemas(out.read_text()) + SCHEMAS + "\n".join([*rows, ""]))
    return wrong


if __name__ == "__main__":
    folder, page, *sources = sys.argv[1:]
    install([name for name in SERVERS if not sources or name in sources], Path(folder))
    sys.exit(bool(asyncio.run(main(Path(folder).absolute(), Path(page), sources))))
