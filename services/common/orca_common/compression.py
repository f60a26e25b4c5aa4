"""Compressed messages of gRPC. What they become has a bound before it is made."""

import zlib

from .errors import ErrorReason, InvalidArgument, Unimplemented, echo

WBITS = {"gzip": 31, "deflate": 15}  # how zlib is told of them


def inflated(raw: bytes, encoding: str, most: int) -> bytes:
    """The message. Raises InvalidArgument, also when it has more than `most` bytes, and Unimplemented."""
    if encoding == "identity":
        raise unreadable("is compressed, and its header does not tell how (deflate or gzip)")
    if encoding not in WBITS:
        raise Unimplemented(f"grpc-encoding: {echo(encoding)} is not known here; deflate and gzip are")
    inflater = zlib.decompressobj(WBITS[encoding])
    try:
        message = inflater.decompress(raw, most + 1)
    except zlib.error:
        raise unreadable(f"is no {encoding}") from None
    if len(message) > most:
        raise too_large(None, most)
    if not inflater.eof:
        raise unreadable("ends in its middle")
    return message


def too_large(size: int | None, most: int) -> InvalidArgument:
    """size: None when it is not known."""
    return InvalidArgument("message", f"has {size or 'more'} bytes; at most {most}")


def unreadable(problem: str) -> InvalidArgument:
    return InvalidArgument("message", problem, reason=ErrorReason.UNREADABLE_MESSAGE)
