"""What `orca` decides of its own environment, before it imports what reads it."""

import os


def quiet_grpc() -> None:
    """Keeps gRPC's C core, which reads its level when it is imported, from writing of each failed handshake.

    Errors are still written; GRPC_VERBOSITY in the environment decides. This imports nothing of the services, which
    may not be installed.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
