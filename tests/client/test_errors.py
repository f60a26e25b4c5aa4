"""From a call's status to an error: statuses that Orca sends, those of a broken transport, and malformed ones."""

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from orca_client.errors import DETAILS, Internal, InvalidArgument, OrcaError, ResourceExhausted, Unavailable, error_of

Code = grpc.StatusCode


def details(*messages: Message) -> bytes:
    packed = []
    for message in messages:
        packed.append(Packed())
        packed[-1].Pack(message)
    return status_pb2.Status(code=3, message="m", details=packed).SerializeToString()


@pytest.mark.parametrize("code", [Code.CANCELLED, Code.INTERNAL, Code.UNKNOWN, Code.UNAVAILABLE])
def test_the_transport(code: grpc.StatusCode) -> None:
    """A call that breaks without a status from Orca is Unavailable, so it is tried again."""
    error = error_of(code, "Stream removed", ())
    assert type(error) is Unavailable
    assert "Stream removed" in str(error)


def test_a_bug_is_no_broken_stream() -> None:
    info = error_details_pb2.ErrorInfo(reason="BUG", domain="orca.serving", metadata={"trace_id": "0af7"})
    error = error_of(Code.INTERNAL, "a bug (trace id 0af7)", [(DETAILS, details(info))])
    assert isinstance(error, Internal)
    assert error.trace_id == "0af7"
    assert error.reason == "BUG"


def test_details() -> None:
    """The fields are found among other details."""
    violation = error_details_pb2.BadRequest.FieldViolation(field="stop[3]", description="d" * 1000)
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    other = error_details_pb2.Help(links=[error_details_pb2.Help.Link(url="u")])
    error = error_of(Code.INVALID_ARGUMENT, "m", [("a", "b"), (DETAILS, details(other, bad))])
    assert isinstance(error, InvalidArgument)
    assert error.field == "stop[3]"
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=90, nanos=250_000_000))
    error = error_of(Code.RESOURCE_EXHAUSTED, "m", [(DETAILS, details(other, retry))])
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after == 90.25


@pytest.mark.parametrize("raw", [b"", b"\xff", b"\x1a\x05abc", b"\x1a\x02\x0a\xff", b"\x18\x01", details()])
def test_broken_details(raw: bytes) -> None:
    """Bytes that are no google.rpc.Status cost the error its fields, and nothing else."""
    error = error_of(Code.INVALID_ARGUMENT, "m", [(DETAILS, raw)])
    assert isinstance(error, InvalidArgument)
    assert error.field == ""
    error = error_of(Code.RESOURCE_EXHAUSTED, "m", [(DETAILS, raw)])
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after is None


@pytest.mark.parametrize("raw", [b"\x0a\x01\xff", b"\xff", b"\x08\x01"])
def test_broken_detail(raw: bytes) -> None:
    """The same for a detail inside a good status."""
    for name in ("BadRequest", "ErrorInfo", "RetryInfo"):
        packed = Packed(type_url=f"type.googleapis.com/google.rpc.{name}", value=raw)
        status = status_pb2.Status(details=[packed]).SerializeToString()
        for code in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED):
            assert error_of(code, "m", [(DETAILS, status)]).code is code


def test_without_a_sentence() -> None:
    error = error_of(Code.UNIMPLEMENTED, None, None)
    assert type(error) is OrcaError
    assert (error.code, str(error)) == (Code.UNIMPLEMENTED, "UNIMPLEMENTED (UNIMPLEMENTED)")


def kinds(tree: type[OrcaError] = OrcaError) -> list[type[OrcaError]]:
    return [tree, *(one for kind in tree.__subclasses__() for one in kinds(kind))]


@pytest.mark.parametrize("kind", kinds())
def test_every_error_has_a_reason(kind: type[OrcaError]) -> None:
    """One that is made here too. `answered` is true for an endpoint's alone."""
    made = kind("m")
    assert (bool(made.reason), made.answered) == (True, False)
    said = error_of(kind.code, "m", [(DETAILS, details(error_details_pb2.ErrorInfo(reason="WORD")))])
    assert (said.reason, said.answered) == ("WORD", True)
    wordless = details(error_details_pb2.ErrorInfo())
    for metadata in ([], [(DETAILS, wordless)]):
        broken = error_of(kind.code, "m", metadata)
        assert (broken.reason, broken.answered) == ("TRANSPORT", False)
