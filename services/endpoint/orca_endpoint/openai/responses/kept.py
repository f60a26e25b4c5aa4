"""The part of a response that is kept beside its request: its object without the answer, and what it answers."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from orca.v1.orca_pb2 import Chat, ChatMessage


class Kept(NamedTuple):
    """A response without its answer."""

    created_at: int  # seconds since 1970
    fields: dict[str, Any]  # that its object tells again
    logprobs: bool  # its texts have them
    messages: Sequence[ChatMessage]  # without its instructions, which hold for it alone

    def packed(self) -> bytes:
        """The bytes for the pool: a line of JSON, and the messages as a Chat, which is read in a tenth of the time."""
        head = json.dumps([self.created_at, self.fields, self.logprobs])
        return head.encode() + b"\n" + Chat(messages=self.messages).SerializeToString()

    @classmethod
    def of(cls, packed: bytes) -> Self:
        head, _, chat = packed.partition(b"\n")
        created_at, fields, logprobs = json.loads(head)
        return cls(created_at, fields, logprobs, Chat.FromString(chat).messages)
