"""Explains in a sentence why an endpoint could not be reached. gRPC names only the part of it that failed."""

from typing import NamedTuple

NOBODY = "nobody listens there"
NO_NAME = "the name does not resolve"
CLOSES = "it closes the connection: it may be full, or speak TLS (then give --tls-dir, or credentials= in Python)"
CLOSES_TLS = "it closes the connection: it may be full, or want a client's certificate (tls.crt, tls.key beside ca.crt)"
NO_TLS = "it does not speak TLS: leave --tls-dir out, or credentials= in Python"
NO_GRPC = "it does not speak gRPC; is it the port of the OpenAI API?"
UNKNOWN_AUTHORITY = "its certificate is not signed by the authority of ca.crt, or has another name"

NOT_CONNECTED = ("failed to connect to all addresses", "connections to all backends failing")


class Cause(NamedTuple):
    """The cause of a failure. `sure`: it is known. Otherwise it is a guess, and the next try may be answered."""

    sentence: str
    sure: bool = True


def cause_of(details: str, tls: bool) -> Cause | None:
    """The likely cause, by what gRPC says of a connection that could not be made; None: it may be anything.

    tls: whether this client speaks TLS.
    """
    if "Connection refused" in details:
        return Cause(NOBODY)
    if "errors resolving" in details or "Domain name not found" in details:
        return Cause(NO_NAME)
    if not any(words in details for words in NOT_CONNECTED):  # a connection that stood and broke
        return None
    if "Failed parsing HTTP/2" in details:
        return Cause(NO_GRPC)
    if "WRONG_VERSION_NUMBER" in details:
        return Cause(NO_TLS)
    if "Tls handshake failed" in details or "Hostname Verification" in details:
        return Cause(UNKNOWN_AUTHORITY)
    if "Socket closed" in details or "Connection reset" in details:  # also what an endpoint at max_connections does
        return Cause(CLOSES_TLS if tls else CLOSES, sure=False)
    return None
