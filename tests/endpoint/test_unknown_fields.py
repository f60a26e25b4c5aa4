"""Fields of a newer client: which are refused, and by which name. `tests/e2e/test_bad_input.py` sends them."""

import pytest

from orca.v1.orca_pb2 import Chat, ChatMessage, GenerateRequest, Sampling
from orca_common.errors import InvalidArgument
from orca_endpoint.requests.unknown_fields import LOOKED, parse_known

NEW = b"\xc0\x3e\x01"  # field 1000, as a newer client may send it


def chat(n_before: int) -> bytes:
    """A request whose chat has an unknown field behind these messages."""
    messages = [ChatMessage(role="user")] * n_before
    return GenerateRequest(chat=Chat(messages=[*messages, ChatMessage.FromString(NEW)])).SerializeToString()


def test_a_request_of_this_release() -> None:
    request = GenerateRequest(text="a", sampling=Sampling(logit_bias={7: 1.0}))
    assert parse_known(GenerateRequest, request.SerializeToString()) == request


def test_another_encoding_of_what_is_known() -> None:
    """A field that comes twice, whose last value holds, and a number that is longer than it has to be."""
    assert parse_known(GenerateRequest, b"\x20\x01\x20\x82\x00") == GenerateRequest(max_new_tokens=2)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (NEW, "1000"),
        (b"\x20\x01\x20\x01" + NEW, "1000"),
        (GenerateRequest(sampling=Sampling.FromString(NEW)).SerializeToString(), "sampling.1000"),
        (chat(3), "chat.messages[3].1000"),
        (chat(LOOKED), "message"),
    ],
)
def test_a_newer_clients_field_is_refused_wherever_it_is(raw: bytes, field: str) -> None:
    """Behind many messages it has no name: to find it would cost more than a request may."""
    with pytest.raises(InvalidArgument, match="the client may be newer") as refused:
        parse_known(GenerateRequest, raw)
    assert refused.value.field == field
