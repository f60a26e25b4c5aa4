"""Why an endpoint could not be reached, in a sentence. gRPC tells it only in the words of its parts."""

NOBODY = "nobody listens there"
NO_NAME = "the name does not resolve"
WANTS_TLS = "it closes the connection, as a server does that speaks TLS: give --tls-dir, or credentials= in Python"
NO_TLS = "it does not speak TLS: leave --tls-dir out, or credentials= in Python"
NO_GRPC = "it does not speak gRPC; is it the port of the OpenAI API?"
UNKNOWN_AUTHORITY = "its certificate is not signed by the authority of ca.crt, or has another name"
WANTS_CERTIFICATE = "it closes the connection: it may want a client's certificate, tls.crt and tls.key beside ca.crt"

NOT_CONNECTED = ("failed to connect to all addresses", "connections to all backends failing")


def cause_of(details: str, tls: bool) -> str | None:
    """The likely cause, by what gRPC says of a connection that could not be made; None: it may be anything.

    tls: whether this client speaks TLS.
    """
    if "Connection refused" in details:
        return NOBODY
    if "errors resolving" in details or "Domain name not found" in details:
        return NO_NAME
    if not any(words in details for words in NOT_CONNECTED):  # a connection that stood and broke
        return None
    if "Failed parsing HTTP/2" in details:
        return NO_GRPC
    if "WRONG_VERSION_NUMBER" in details:
        return NO_TLS
    if "Tls handshake failed" in details or "Hostname Verification" in details:
        return UNKNOWN_AUTHORITY
    if "Socket closed" in details or "Connection reset" in details:
        return WANTS_CERTIFICATE if tls else WANTS_TLS
    return None
