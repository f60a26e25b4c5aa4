"""The cost of a commit to the request pool, and its floor: what Redis spends on the same bytes without a protocol.

    python -m orca_bench.commit [ROWSxENDPOINTS ..]

Each row has one token, and the rows belong to so many endpoints. Prints microseconds of Redis's CPU, without fsync: the
best and the median of many short windows, because whatever else the machine does only adds to them.

    commit          the script `commit` as a master sends it
    floor           the same APPENDs and XADDs as a pipeline of plain commands
    floor in Lua    the same from the shortest script: a transaction costs this much
    journal in Lua  the same with one APPEND for all rows, to a key of the engine (docs/decisions/engine-journal.md)
    round trip      a PING: what every exchange costs beside its work

and what Python spends on building the command and on parsing one delivery entry.
"""

import argparse
import asyncio
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import hiredis

from orca_local import embedded_pool
from orca_pool.link import Argument, pack_command
from orca_pool.pool import Pool
from orca_pool.records import Attached, CommitRow, CommittedToken, EngineInfo
from orca_pool.wire import pack_tokens, unpack_packets

WINDOWS, EACH = 20, 60  # windows, and exchanges in each
DEFAULT = ("1x1", "32x1", "32x8", "32x32")
FLOOR = """
local rows, endpoints = tonumber(ARGV[1]), tonumber(ARGV[2])
for i = 1, rows do
  redis.call('APPEND', KEYS[i], ARGV[2 + i])
end
for i = 1, endpoints do
  redis.call('XADD', KEYS[rows + i], 'MAXLEN', '65536', '0-*', 'e', 'g', 'p', ARGV[2 + rows + i])
end
"""
JOURNAL = FLOOR.replace(
    "for i = 1, rows do\n  redis.call('APPEND', KEYS[i], ARGV[2 + i])\nend",
    "redis.call('APPEND', KEYS[1], table.concat(ARGV, '', 3, 2 + rows))",
)


class Wire:
    """One connection that sends ready bytes and waits for the answers. Costs the machine little beside Redis."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()

    def fileno(self) -> int:
        return self._socket.fileno()

    def start(self, data: bytes) -> None:
        self._socket.sendall(data)

    def finish(self) -> Any:
        """The next answer. Raises hiredis's ReplyError."""
        while (answer := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(1 << 16))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send(self, data: bytes, answers: int = 1) -> Any:
        """Returns the last of the answers."""
        self.start(data)
        return [self.finish() for _ in range(answers)][-1]

    def ask(self, *words: Argument) -> Any:
        return self.send(pack_command(words))

    def cpu(self) -> float:
        """Microseconds of CPU that Redis has spent."""
        lines = (line.partition(":") for line in self.ask("INFO", "cpu").decode().splitlines())
        values = {name: value for name, colon, value in lines if colon}
        return 1e6 * sum(float(values[f"used_cpu_{kind}_main_thread"]) for kind in ("user", "sys"))

    def close(self) -> None:
        self._socket.close()


async def commits(url: str, rows: int, endpoints: int) -> tuple[list[bytes], list[str], float]:
    """A pool in which an engine holds `rows` requests. Returns the commands of its next commits, the request ids, and
    the microseconds that Python took for a command."""
    sent: list[bytes] = []
    keeping = False

    class Kept(Pool):
        """Keeps the commands of commits instead of sending them, once `keeping`."""

        async def _run(self, script: str, *args: Argument, renewal: bool = False) -> Any:
            if script == "commit" and keeping:
                sent.append(pack_command(("EVALSHA", self._scripts[script].sha, 1, self._keys.pool, *args)))
                return [0, args[3], args[3], [], b""]
            return await super()._run(script, *args, renewal=renewal)

    async with Kept(url, "bench") as pool:
        await pool._link.command("CONFIG", "SET", "appendfsync", "no")
        for endpoint in range(endpoints):
            await pool.renew_endpoint(f"ep-{endpoint:016}", register=True)
        term = await pool.acquire("g", "s", None)
        assert term is not None
        await pool.renew("g", "s", term, form=EngineInfo("g", 1, 1, rows * 10, 0))
        for i in range(rows):
            call = {"deadline_in": None, "detach_grace": 0.0, "attempt": 1_700_000_000_000_000, "max_waiting": rows}
            endpoint = f"ep-{i % endpoints:016}"
            answer = await pool.submit(f"request-{i:024}", b"x" * 600, "d" * 40, 10, 10, endpoint=endpoint, **call)
            assert isinstance(answer, Attached)
        held = await pool.claim("g", "s", term, 0, count=rows, slots=rows * 10, total=rows * 10)
        assert held is not None
        # The first token of each goes out, so Redis knows the script, and the pool whom the packets are for.
        first = pack_tokens([CommittedToken(0, -0.5, 0)])
        await pool.commit("g", "s", term, [CommitRow(h.request_id, h.claim, 0, first, None) for h in held.requests])
        keeping = True
        began = time.perf_counter()
        for index in range(1, 1 + WINDOWS * EACH):
            tokens = pack_tokens([CommittedToken(index, -0.5, index)])
            await pool.commit(
                "g", "s", term, [CommitRow(h.request_id, h.claim, index, tokens, None) for h in held.requests]
            )
        building = (time.perf_counter() - began) / len(sent) * 1e6
    return sent, [h.request_id for h in held.requests], building


def measure(url: str, rows: int, endpoints: int) -> dict[str, tuple[float, float]]:
    """Best and median microseconds of each."""
    wire = Wire(urlsplit(url).port or 0)
    sent, ids, building = asyncio.run(commits(url, rows, endpoints))
    prefix, token, upcoming = "orca:{bench}:", b"t" * 16, iter(sent)
    wire.send(sent[0])
    next(upcoming)
    packet = wire.ask("XREVRANGE", f"{prefix}delivery:ep-{0:016}", "+", "-", "COUNT", 1)[0][1][3]
    keys = [f"{prefix}floor:{i}" for i in ids]
    streams = [f"{prefix}floor:ep-{endpoint:016}" for endpoint in range(endpoints)]
    entry = ("MAXLEN", "65536", "0-*", "e", "g", "p", packet)
    plain = [("APPEND", key, token) for key in keys] + [("XADD", stream, *entry) for stream in streams]
    pipeline, ping = b"".join(map(pack_command, plain)), pack_command(("PING",))
    sha = wire.ask("SCRIPT", "LOAD", FLOOR)
    script = ("EVALSHA", sha, len(plain), *keys, *streams, rows, endpoints, *[token] * rows, *[packet] * endpoints)
    in_lua = pack_command(script)
    in_journal = pack_command((script[0], wire.ask("SCRIPT", "LOAD", JOURNAL), *script[2:]))
    subjects: dict[str, Callable[[], Any]] = {
        "commit": lambda: wire.send(next(upcoming, sent[-1])),
        "floor": lambda: wire.send(pipeline, len(plain)),
        "floor in Lua": lambda: wire.send(in_lua),
        "journal in Lua": lambda: wire.send(in_journal),
        "round trip": lambda: wire.send(ping),
    }
    spent: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(WINDOWS - 1):
        for name, subject in subjects.items():
            before = wire.cpu()
            for _ in range(EACH):
                subject()
            spent[name].append((wire.cpu() - before) / EACH)
    wire.close()
    began = time.perf_counter()
    for _ in range(1000):
        unpack_packets(packet, "g")
    parsing = (time.perf_counter() - began) * 1e3
    python = {"Python builds it": (building, building), "Python parses an entry": (parsing, parsing)}
    return {name: (min(us), median(us)) for name, us in spent.items()} | python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=DEFAULT, metavar="ROWSxENDPOINTS")
    for case in parser.parse_args().cases:
        rows, endpoints = map(int, case.split("x"))
        with tempfile.TemporaryDirectory(prefix="orca-commit-") as folder:
            child, url = embedded_pool.start(Path(folder), None)
            try:
                costs = measure(url, rows, endpoints)
            finally:
                child.terminate()
                child.wait()
        told = ", ".join(f"{name} {best:.0f} ({middle:.0f})" for name, (best, middle) in costs.items())
        print(f"{rows} rows to {endpoints} endpoints: {told}", flush=True)


if __name__ == "__main__":
    main()
