"""The cost of a message on a control lane: CPU time of both sides, from `send` to the callback that hears it.

    python -m orca_bench.lane [--size 400] [--messages 20000]

A client and a server of the lanes in this process send each other one message after another.
"""

import argparse
import asyncio
import time

import uvloop

from orca_common.errors import Unavailable
from orca_common.lanes.client import connect
from orca_common.lanes.server import LaneCall, LaneServer
from orca_common.tls import Plaintext

WINDOWS = 10  # the best of them counts: whatever else the machine does only adds


async def bench(size: int, messages: int) -> float:
    """Microseconds of CPU a message."""
    loop = asyncio.get_running_loop()
    left, done = 0, loop.create_future()

    async def echo(call: LaneCall) -> None:
        over: asyncio.Future[None] = loop.create_future()
        call.listen(call.send, lambda error: over.set_result(None))
        await over

    def heard(message: bytes) -> None:
        nonlocal left
        left -= 1
        if left > 0:
            call.send(message)
        else:
            done.set_result(None)

    server = LaneServer({"/echo": echo}, Plaintext(), {}, Unavailable("the bench is over"))
    connection = await connect(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", None)
    call = connection.call("/echo", heard)
    found: list[float] = []
    for _ in range(WINDOWS):
        left, done, began = messages // WINDOWS // 2, loop.create_future(), time.process_time()
        rounds = left
        call.send(bytes(size))
        await done
        found.append((time.process_time() - began) / (2 * rounds) * 1e6)
    connection.close()
    await server.stop(0)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=400, help="bytes of a message; a batch of 32 has 400")
    parser.add_argument("--messages", type=int, default=20_000)
    given = parser.parse_args()
    print(f"{uvloop.run(bench(given.size, given.messages)):.1f} us of CPU a message, both sides")


if __name__ == "__main__":
    main()
