"""`orca serve` as a reader of the pages starts it, and blocks with its addresses in place of the pages' own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from docs.pages import ROOT

BIN = Path(sys.executable).parent
FREE = ("--port", "0", "--http-port", "0")  # free ports: the pages' own may be in use here


@dataclass(frozen=True)
class Served:
    """A stack that is ready."""

    grpc: str
    http: str
    run_dir: Path

    def fill(self, code: str) -> str:
        """A block's code, as it is run here."""
        processes = json.loads((self.run_dir / "processes.json").read_text())
        status = next(process["address"] for process in processes if process["role"] == "scheduler")
        places = {
            ".venv/bin/": f"{BIN}/",
            "orca generate ": f"orca generate --address {self.grpc} ",
            "127.0.0.1:50051": self.grpc,
            "127.0.0.1:8000": self.http,
            "RUN_FOLDER": str(self.run_dir),
            "STATUS_ADDRESS": status,
        }
        for word, value in places.items():
            code = code.replace(word, value)
        return code


@contextmanager
def serving(command: str, run_dir: Path) -> Iterator[Served]:
    """Runs an `orca serve` command on free ports until it is ready; interrupts it at the end, as Ctrl-C does."""
    words = [*command.replace(".venv/bin/", f"{BIN}/").split(), *FREE, "--run-dir", str(run_dir)]
    environment = os.environ | {"ORCA_DTYPE": "float32"}  # faster than bfloat16 on a CPU
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
    )
    assert process.stdout is not None
    said: list[str] = []
    addresses = None
    try:
        for line in process.stdout:
            said.append(line)
            addresses = addresses or re.search(r"gRPC (\S+) +OpenAI API http://(\S+)/v1", line)
            if "try: " in line:
                break
        assert addresses is not None, f"{command} did not become ready:\n{''.join(said)}"
        yield Served(addresses[1], addresses[2], run_dir)
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{''.join(said)}{rest}"
