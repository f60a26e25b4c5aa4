"""Binary forms in the pool's values, little-endian: committed tokens and delivery packets (made in lua/prelude.lua)."""

import struct
from collections.abc import Iterable

from .records import CommittedToken, Finish, Packet, Reason, Times

TOKEN = struct.Struct("<IfQ")  # id, logprob, iteration
PACKET = struct.Struct(
    "<HdIIB"
)  # bytes of the id, attempt, first index, tokens, bytes of the finish; then id, tokens, finish
FINISH = struct.Struct(
    "<BIdddd"
)  # reason, output tokens; submitted, claimed, first token, finished (doubles hold 2^53)


def pack_tokens(tokens: Iterable[CommittedToken]) -> bytes:
    return b"".join([TOKEN.pack(*token) for token in tokens])


def unpack_tokens(data: bytes) -> list[CommittedToken]:
    return list(map(CommittedToken._make, TOKEN.iter_unpack(data)))


def unpack_packets(data: bytes, engine: str) -> list[Packet]:
    """The packets of one delivery entry. `engine` made the tokens in them."""
    packets, at = [], 0
    while at < len(data):
        id_size, attempt, first, count, finish_size = PACKET.unpack_from(data, at)
        tokens_at = at + PACKET.size + id_size
        finish_at = tokens_at + count * TOKEN.size
        request_id = data[at + PACKET.size : tokens_at].decode()
        finish = None
        if finish_size:
            reason, output, *times = FINISH.unpack_from(data, finish_at)
            finish = Finish(Reason(reason), output, Times(*map(int, times)))
        packets.append(
            Packet(request_id, int(attempt), first, engine, unpack_tokens(data[tokens_at:finish_at]), finish)
        )
        at = finish_at + finish_size
    return packets
