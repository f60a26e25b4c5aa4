"""The binary forms in the pool's values, all little-endian: committed tokens, and the packets of a delivery entry.

The scripts write packets with the same formats (see `scripts.shared_numbers`). Attempts and times are doubles, because
Lua has no other numbers; doubles are exact below 2^53.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from .records import CommitRow, CommittedToken, Finish, Packet, Reason, Times

# A committed token: id, logprob, iteration. `tokens:ID` is a string of them.
TOKEN = struct.Struct("<IfQ")
TOKEN_ID = struct.Struct("<I")

KEY_SIZE = 8  # bytes of a block's key in the pool: enough to find an engine, where ranks compare all of it
MOST_KEYS = 512  # of one prompt: a turn of a conversation adds fewer blocks

# As `CommittedToken._make` does, and the others', in half the time.
committed_token: Callable[[tuple[int, float, int]], CommittedToken] = partial(cast(Any, tuple).__new__, CommittedToken)
packet: Callable[[tuple[str, int, int, str, list[CommittedToken], Finish | None, bytes]], Packet]
packet = partial(cast(Any, tuple).__new__, Packet)
commit_row: Callable[[tuple[str, int, int, bytes, Reason | None, bytes, bytes, int, bytes]], CommitRow]
commit_row = partial(cast(Any, tuple).__new__, CommitRow)

# Bytes that a request takes in Redis beside its record and its tokens: 25 fields, two keys, its places in indexes
# (1,850 on Valkey 9, measured with 2,000 requests kept).
RECORD_OVERHEAD = 1850

# Whom a packet is for: attempt, bytes of the request id. The id follows. All packets for a call begin with the same
# bytes, so `listeners:ENGINE` keeps them ready.
ADDRESS = struct.Struct("<dH")

# What comes then: index of the first token, number of tokens, bytes of the finish (0: the request goes on), bytes of
# the tops (orca_common.scores.TOP; 0: they were not asked for). The tokens, the finish and the tops follow.
CONTENT = struct.Struct("<IIBI")

# A ready row of a commit: index of the first token, then key and tokens, each behind its size (which `c0` takes).
READY = "iHc0Ic0"

# The end of a request: reason, output tokens, the moments submitted, claimed, first token, finished, and cached tokens,
# which releases before do not send.
FINISH = struct.Struct("<BIddddI")


def pack_tokens(tokens: Iterable[CommittedToken]) -> bytes:
    """The tokens as `tokens:ID` holds them."""
    return b"".join([TOKEN.pack(*token) for token in tokens])


def ready_row(base: int, key: bytes, tokens: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """The parts of a row as READY describes it. key: of the request's tokens, behind its size."""
    return base.to_bytes(4, "little"), key, len(tokens).to_bytes(4, "little"), tokens


def pack_keys(keys: Sequence[str]) -> bytes:
    """The keys of a prompt's last full blocks as `Pool.submit` takes them. keys: hexadecimal, of all its blocks."""
    return b"".join([bytes.fromhex(key)[:KEY_SIZE] for key in keys[-MOST_KEYS:]])


def unpack_tokens(data: bytes) -> list[CommittedToken]:
    """The tokens of (a part of) `tokens:ID`."""
    return list(map(committed_token, TOKEN.iter_unpack(data)))


def unpack_packets(data: bytes, engine: str) -> list[Packet]:
    """The packets of one delivery entry. `engine` made the tokens in them."""
    packets: list[Packet] = []
    address, content, token, token_size = ADDRESS.unpack_from, CONTENT.unpack_from, TOKEN.unpack_from, TOKEN.size
    size = len(data)
    at = 0
    while at < size:
        attempt, id_size = address(data, at)
        id_at = at + ADDRESS.size
        at = id_at + id_size
        request_id = data[id_at:at].decode()
        first, count, finish_size, tops_size = content(data, at)
        tokens_at = at + CONTENT.size
        finish_at = tokens_at + count * token_size
        finish = None
        if finish_size:
            sent = data[finish_at : finish_at + finish_size].ljust(FINISH.size, b"\0")
            reason, output, *times, cached = FINISH.unpack_from(sent)
            finish = Finish(Reason(reason), output, Times(*map(int, times)), cached)
        at = finish_at + finish_size + tops_size
        tops = data[at - tops_size : at] if tops_size else b""
        one = count == 1  # as most packets have
        tokens = [committed_token(token(data, tokens_at))] if one else unpack_tokens(data[tokens_at:finish_at])
        packets.append(packet((request_id, int(attempt), first, engine, tokens, finish, tops)))
    return packets
