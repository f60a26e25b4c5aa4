"""What Lua shares with Python: every number stands in Python alone, and reaches each script under its Python name."""

import re
import struct
from enum import IntEnum

import pytest
from pool.lab import Lab
from servers import RedisServer

from orca.v1.orca_pb2 import FinishReason
from orca_pool.leases import GAP_SECONDS, LEASE_SECONDS, RENEW_SECONDS
from orca_pool.listeners import MOST_READY, Listener, Listeners
from orca_pool.records import CommitRow, Committed, Reason, Refusal
from orca_pool.scripts import Constants, build, shared_numbers, sources
from orca_pool.wire import TOKEN, TOKEN_ID
from orca_scheduler.core import request

TABLES: dict[str, type[IntEnum]] = {"REASON": Reason, "REFUSAL": Refusal, "COMMITTED": Committed}
SCRIPTS = [name for name in sources() if name != "prelude"]


@pytest.mark.parametrize(("table", "numbers"), TABLES.items())
def test_lua_names_only_numbers_that_exist(table: str, numbers: type[IntEnum]) -> None:
    """A name that Lua does not find would be nil, without an error."""
    used = {name for text in sources().values() for name in re.findall(rf"\b{table}\.(\w+)", text)}
    assert used
    assert used <= set(numbers.__members__)


async def test_lua_gets_the_numbers_of_python(server: RedisServer) -> None:
    constants = Constants(lease=1.25, sweep_gap=0.5, retention=2.0, delivery_length=3, control_length=4)
    reply = """
    local flat = {}
    for _, numbers in ipairs({ REASON, REFUSAL, COMMITTED }) do
      local pairs_of = {}
      for name, value in pairs(numbers) do
        pairs_of[#pairs_of + 1] = name
        pairs_of[#pairs_of + 1] = value
      end
      flat[#flat + 1] = pairs_of
    end
    return { LEASE, SWEEP_GAP, RETENTION, DELIVERY_LENGTH, CONTROL_LENGTH, TOKEN_SIZE, TOKEN_ID_SIZE, flat }
    """
    async with Lab(server.url) as lab:
        *single, tables = await lab.redis("EVAL", shared_numbers(constants) + reply, 0)
    assert single == [1_250_000, 500_000, 2_000_000, b"3", b"4", 16, 4]
    for numbers, flat in zip(TABLES.values(), tables, strict=True):
        assert {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)} == dict(numbers.__members__)


def test_the_id_comes_first_in_a_token() -> None:
    """`finish_at` cuts the ids out of the tokens."""
    assert TOKEN.pack(7, 0.0, 0)[: TOKEN_ID.size] == TOKEN_ID.pack(7)
    assert struct.calcsize(TOKEN.format) == TOKEN.size == 16  # stands on disk: a change needs a new pool


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_says_what_it_takes_and_returns(name: str) -> None:
    head = re.match(r"(--.*\n)+", sources()[name])
    assert head is not None
    for part in ("KEYS: ", "ARGV: ", "Returns "):
        assert f"\n-- {part}" in head[0], f"{name}.lua begins without {part}"


def test_reasons_are_the_same_numbers_everywhere() -> None:
    """The public contract counts as the pool does; the core, which imports neither, uses the same names."""
    public = {name.removeprefix("FINISH_REASON_"): number for name, number in FinishReason.items() if number}
    assert public.items() <= dict(Reason.__members__).items()
    assert {reason.name for reason in request.Reason} <= set(Reason.__members__)


def test_lease_times_fit_together() -> None:
    """Whoever renews in time keeps the lease when one answer is late; whoever expires was silent over two looks."""
    assert 3 * RENEW_SECONDS < LEASE_SECONDS
    assert RENEW_SECONDS < GAP_SECONDS <= LEASE_SECONDS / 2


def test_a_head_has_only_what_the_text_below_it_needs() -> None:
    prelude = "local one = 1\nlocal two = one + 1\nlocal three = 3\n"
    text = build({"prelude": prelude, "submit": "", "it": "first(one)\n-- head\nthen(two, one)\n"}, Constants())[
        "it"
    ].text
    assert re.findall(r"first|then|one = 1|two = |three = ", text) == ["one = 1", "first", "two = ", "then"]


def test_a_commit_has_no_more_ready_rows_than_lua_unpacks() -> None:
    listener = Listener(b"e", b"address", b"key")
    listeners = Listeners(b"", b"1", dict.fromkeys(range(MOST_READY + 1), listener))
    rows = [CommitRow(f"r{claim}", claim, 1, bytes(16), None) for claim in listeners.known]
    args, order = listeners.arguments(rows)
    assert args[1:3] == [MOST_READY + 1, MOST_READY]
    assert order == list(listeners.known)


def test_the_listener_of_a_request_that_has_ended_is_forgotten() -> None:
    """Claim numbers do not come again: a master would keep one for each request that it has served."""
    listener = Listener(b"e", b"address", b"key")
    listeners = Listeners(b"", b"1", dict.fromkeys((1, 2, 3), listener))
    rows = [
        CommitRow(f"r{claim}", claim, 1, bytes(4), finish) for claim, finish in ((1, None), (2, Reason.EOS), (3, None))
    ]
    _, order = listeners.arguments(rows)
    gone = order.index(2) + 1, int(Committed.GONE)  # the third row
    listeners.answered(rows, order, (0, b"1", b"2", [], b"", *gone))
    assert list(listeners.known) == [1]
