"""Runs a command within a bound, and says as JSON what became of it and on which machine.

    python tests/gpu/step.py NAME SECONDS COMMAND..

The output goes to $OUT/NAME.log as well. The line of JSON goes to $OUT/steps.jsonl when the command has ended, so what
is there counts when a later step fails. A machine's own torch and Triton may be others than ours: each line names them.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """torch, triton, NCCL, the driver and the GPUs."""
    import torch
    from torch.cuda import nccl

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    cuda = torch.cuda.is_available()
    driver = None
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")[0] or None
    return {
        "torch": torch.__version__,
        "triton": triton_version,
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
        "driver": driver,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    }


def run(name: str, seconds: float, command: list[str], out: Path) -> int:
    """Returns the command's exit status, 124 when it took too long."""
    started, late = time.monotonic(), threading.Event()
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, end)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            print(line, end="", flush=True)
        status = process.wait()
        timer.cancel()
    took = round(time.monotonic() - started, 1)
    status = 124 if late.is_set() else status
    row = {"step": name, "status": status, "seconds": took, "bound": seconds, "command": command, **machine()}
    with (out / "steps.jsonl").open("a") as steps:
        steps.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], float(sys.argv[2]), sys.argv[3:], Path(os.environ["OUT"])))
