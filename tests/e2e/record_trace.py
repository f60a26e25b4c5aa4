"""Records what the real Jaeger answers about one request, for the picture in the docs:

PATH=FOLDER_OF_JAEGER:$PATH python tests/e2e/record_trace.py docs/pictures/trace.json

The demo model runs on two stages of two tensor ranks. The request shares its iterations with another one. The answers
are saved as they came: the request's trace, then the traces that its stay on the engine links to.
"""

import asyncio
import json
import secrets
import sys
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from jaeger import follow, jaeger  # noqa: E402 the path comes first
from stacks import generation, running  # noqa: E402

from orca_local.stack import DEMO_MODEL  # noqa: E402

RANKS = {(stage, tensor_rank) for stage in range(2) for tensor_rank in range(2)}
TOKENS = 4


def ask(query: str, trace_id: str) -> dict[str, Any]:
    """Jaeger's answer about a trace, as it came."""
    with urllib.request.urlopen(f"{query}/api/traces/{trace_id}") as answer:
        return json.load(answer)["data"][0]


async def record(path: Path) -> None:
    trace = secrets.token_hex(16)
    with TemporaryDirectory() as folder, jaeger() as (otlp, query):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": otlp, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        async with running(Path(folder), DEMO_MODEL, tp=2, pp=2, environment=environment) as stack:
            await stack.tokens([1, 2, 3], TOKENS)  # the first iterations of all are slow
            metadata = (("traceparent", f"00-{trace}-{secrets.token_hex(8)}-01"),)
            other = asyncio.create_task(stack.tokens([5] * 20, 40))
            call = stack.stub.Generate(generation([9] * 12, TOKENS, ignore_eos=True), metadata=metadata)
            assert sum([len(response.tokens) async for response in call]) == TOKENS
            await other
            followed = await asyncio.to_thread(follow, query, trace, RANKS, iterations=TOKENS)
        traces = [trace, *(span.trace_id for span in followed.iterations)]
        answers = [await asyncio.to_thread(ask, query, one) for one in traces]
    path.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(record(Path(sys.argv[1])))
