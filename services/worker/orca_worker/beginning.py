"""The beginning of a rank's process, before its supervisor knows anything of it.

It imports next to nothing, so that a supervisor can begin a rank first and import what itself needs meanwhile: the rank
imports for longer than anything else of a start takes.
"""

import os
import subprocess
import sys

from orca_common.environment import child_environment

# For torch.distributed, which reads these from a rank's environment when the process starts.
TORCH_DISTRIBUTED = {
    # A TCPStore looks up the name of each address that connects, for its log. When the name server's answer is lost, a
    # formation waits for the resolver's timeout: 5 s by default, 1 s with this.
    "RES_OPTIONS": "timeout:1 attempts:3",
    # NCCL's watchdog would end the process when a peer is lost, but a survivor must keep its weights. (Not run: no GPU
    # was at hand.)
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


def begin() -> subprocess.Popen[bytes]:
    """A process that will be a rank of this process's pod: it waits for its settings, then for its place.

    It ends with this process, and before that when its standard input is closed.
    """
    command = [sys.executable, "-P", "-m", "orca_worker.rank", str(os.getpid())]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=child_environment(TORCH_DISTRIBUTED), stdin=pipe, stdout=pipe, bufsize=0)
