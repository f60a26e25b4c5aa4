"""Runs clients that are not ours against an endpoint, each by its script: `make clients`.

The endpoint is real; a script plays its engine. It calls `weather` where a prompt has tools and no result of one,
answers by the schema where there is one, and otherwise says SAID.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

from endpoint.harness import World, world  # noqa: E402
from endpoint.test_tool_chats import make_tool_model  # noqa: E402
from servers import redis_server  # noqa: E402
from tool_templates import TEMPLATES  # noqa: E402

from orca.v1.pool_pb2 import PoolRequest  # noqa: E402

SAID, CITY = "It is 5 degrees in Bern.", '{"city": "Bern"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
TURN = "<|im_start|>assistant"


def answer_of(orca: World, record: PoolRequest) -> Sequence[int]:
    """The tokens of the answer to a request."""
    vocabulary, grammar = orca.serving.app.vocabulary, record.sampling.grammar
    assert vocabulary is not None
    *_, newest, _ = ["", *vocabulary.decode(list(record.prompt_ids)).split(TURN)]
    said = SAID
    if "weather" in grammar:
        said = SAID if "tool_response" in newest else CALL
    elif "city" in grammar:
        said = CITY
    return [*vocabulary.encode(said, False), 0]


async def main(python: str, node: str) -> int:
    """Runs all scripts: those in Python by `python`, those in JavaScript beside the packages in the folder `node`.
    Returns how many have failed."""
    failed = 0
    with redis_server() as server, tempfile.TemporaryDirectory() as folder:
        model = make_tool_model(Path(folder) / "tiny", TEMPLATES["hermes"], ["<tool_call>", "</tool_call>"])
        async with (
            world(server.url, model, slots=1024) as orca,
            orca.background(lambda record: answer_of(orca, record)),
        ):
            for script in sorted([*HERE.glob("*_client.py"), *HERE.glob("*_client.mjs")]):
                run = [python, str(script)]
                if script.suffix == ".mjs":
                    copy = Path(node) / script.name  # Node.js looks for packages beside the script
                    copy.write_text(script.read_text())
                    run = ["node", str(copy)]
                process = await asyncio.create_subprocess_exec(*run, env=os.environ | {"ORCA": orca.serving.http})
                code = await process.wait()
                failed += code != 0
                print(f"{script.name}: {'passed' if code == 0 else 'FAILED'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
