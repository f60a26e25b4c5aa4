"""Sets a part of the environment of `orca`, before it imports the modules that read it."""

import os


def quiet_grpc() -> None:
    """Keeps C-core, which reads its level when it is imported, from writing to standard error.

    The services that `orca` starts inherit the level, so it is that of `orca_common.environment`. This module imports
    nothing of them, because they may not be installed. GRPC_VERBOSITY in the environment decides otherwise.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
