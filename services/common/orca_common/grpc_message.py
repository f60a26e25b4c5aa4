"""A message of gRPC as it lies in a stream of HTTP/2."""

PREFIX = 5  # bytes before a message: whether it is compressed, and its length


def framed(message: bytes) -> bytes:
    """The message behind its prefix, not compressed."""
    return b"\0" + len(message).to_bytes(4) + message
