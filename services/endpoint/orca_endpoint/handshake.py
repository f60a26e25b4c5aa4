"""The server's side of a TLS handshake that tells a client why it failed.

asyncio closes a connection as soon as its handshake has failed, and drops the alert that OpenSSL
has written for the client.
"""

import ssl
from contextvars import ContextVar

# Where the handshakes of a connection leave their error. Set by the task that accepts it, whose context they run in.
failure: ContextVar[list[ssl.SSLError]] = ContextVar("failure")


class ToldHandshake(ssl.SSLObject):
    """A handshake that sends its alert before it fails.

    When it goes wrong it says at first that it needs more from the client. So asyncio sends what is written, which is
    the alert, and goes on waiting. asyncio hears of the failure when the client says something more, or leaves.
    """

    def do_handshake(self) -> None:
        found = failure.get()
        if found:
            raise found[0]
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLSyscallError):
            raise
        except ssl.SSLError as error:
            found.append(error)
            raise ssl.SSLWantReadError from error
