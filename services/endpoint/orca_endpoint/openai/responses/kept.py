"""The part of a response that is kept beside its request: its object without the answer, and what it answers."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from google.protobuf.json_format import MessageToDict, ParseDict

from orca.v1.orca_pb2 import ChatMessage


class Kept(NamedTuple):
    """A response without its answer."""

    created_at: int  # seconds since 1970
    fields: dict[str, Any]  # that its object tells again
    logprobs: bool  # its texts have them
    messages: Sequence[ChatMessage]  # without its instructions, which hold for it alone

    def packed(self) -> bytes:
        """The bytes for the pool."""
        messages = [MessageToDict(one, preserving_proto_field_name=True) for one in self.messages]
        return json.dumps([self.created_at, self.fields, self.logprobs, messages]).encode()

    @classmethod
    def of(cls, packed: bytes) -> Self:
        created_at, fields, logprobs, messages = json.loads(packed)
        return cls(created_at, fields, logprobs, [ParseDict(one, ChatMessage()) for one in messages])
