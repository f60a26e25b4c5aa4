"""A stream goes on although every endpoint is killed under it.

    orca serve --endpoints 2 --run-dir RUN
    python examples/killed_endpoint.py RUN

The client library resumes at another endpoint by itself, from the first token that it has not seen. `orca serve` starts
a killed endpoint again, as a cluster would.
"""

import json
import os
import signal
import sys
from pathlib import Path

from orca_client import OrcaClient, Token


def endpoints(run_dir: Path) -> dict[int, str]:
    """The endpoints that run now: pid -> address."""
    processes = json.loads((run_dir / "processes.json").read_text())
    return {process["pid"]: process["address"] for process in processes if process["role"] == "endpoint"}


def main(run_dir: Path) -> None:
    victims = endpoints(run_dir)
    kill_at = {5 + 20 * n: pid for n, pid in enumerate(victims)}  # index of a token -> the endpoint to kill then
    with OrcaClient(list(victims.values())) as client:
        stream = client.generate("def main(", max_new_tokens=60, temperature=0.7, seed=1, ignore_eos=True)
        for event in stream:
            if not isinstance(event, Token):
                continue
            print(event.text, end="", flush=True)
            if event.index in kill_at:
                os.kill(kill_at[event.index], signal.SIGKILL)
                print("\n-- killed the endpoint at", victims[kill_at[event.index]])
        indexes = [token.index for token in stream.tokens]
    print(f"\n{len(indexes)} tokens, each exactly once: {indexes == list(range(60))}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the run folder, which `orca serve` prints")
    main(Path(sys.argv[1]))
