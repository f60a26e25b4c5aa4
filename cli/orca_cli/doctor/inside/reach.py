"""Runs in a pod: tries names and ports, reads its clock, and the format of a worker's weights. Needs our packages.

It prints {} when it has started, and reads a line of JSON: {"targets": [[host, port], ..], "status_port": ..,
"model": ..}; the model is empty but in workers. Without a port the name is only resolved; an empty host stands for the
address in the pod's own setting redis_url, or for the first Sentinel there that is reached. Then it prints {"now": ..}
at once, and at the end {"answers": [[answer, seconds], ..], "unready": "..", "weights": ".."}.
"""

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PATIENCE = 3.0  # seconds for each try


def attempt(host: str, port: int | None) -> tuple[str, float]:
    """Returns the result of one try, and the seconds that it took."""
    if not host:
        tries = [attempt(*address) for address in pool_addresses()]
        return next((found for found in tries if found[0] == "open"), tries[0])
    begin = time.monotonic()
    try:
        if port is None:
            socket.getaddrinfo(host, None)
            answer = "resolved"
        else:
            socket.create_connection((host, port), PATIENCE).close()
            answer = "open"
    except TimeoutError:
        answer = "silent"
    except ConnectionRefusedError:
        answer = "refused"
    except OSError as error:
        answer = error.strerror or str(error)
    return answer, time.monotonic() - begin


def pool_addresses() -> list[tuple[str, int]]:
    from orca_common.settings import PoolSettings
    from orca_pool import redis_url

    return redis_url.parse(PoolSettings.load().redis_url).servers


def unready(status_port: int) -> str:
    """Returns why this pod's service says that it is not ready; "" when it is, or does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{status_port}/readyz", timeout=PATIENCE):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return str(json.loads(error.read()).get("reason", ""))
    except (OSError, ValueError):
        return ""


def weights(model: str) -> str:
    """Names the format of the weights in a model's files; "" without a folder, and where they cannot be read."""
    if not model or not Path(model).exists():  # a name on the hub would be downloaded
        return ""
    from orca_common.checkpoint import read_checkpoint, resolve_model
    from orca_common.errors import FailedPrecondition
    from orca_worker.models.families import layout_sentence

    try:
        return layout_sentence(read_checkpoint(resolve_model(model))) or "floating-point numbers"
    except (FailedPrecondition, OSError):
        return ""


def main() -> None:
    print("{}", flush=True)
    asked = json.loads(sys.stdin.readline())
    print(json.dumps({"now": time.time()}), flush=True)
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda target: attempt(*target), asked["targets"]))
    print(
        json.dumps({"answers": answers, "unready": unready(asked["status_port"]), "weights": weights(asked["model"])})
    )


if __name__ == "__main__":
    main()
