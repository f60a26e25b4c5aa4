"""Runs in a pod: tries names and ports, and tells its clock. Needs Python, and orca_pool for the pool's address.

It prints {} when it has started, and reads a line of JSON: {"targets": [[host, port], ..], "status_port": ..}. Without
a port the name is only resolved; an empty host stands for the address in the pod's own setting redis_url, or for the
first Sentinel there that is reached. Then it prints {"now": ..} at once, and at the end
{"answers": [[answer, seconds], ..], "unready": "..", "cuda": ".."}.
"""

import importlib.util
import json
import re
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


def cuda() -> str:
    """The CUDA that this pod's torch is built for; "" without torch or for a CPU alone. Torch is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    text = (Path(found.origin).parent / "version.py").read_text()
    version = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return version[1] if version else ""


def main() -> None:
    print("{}", flush=True)
    asked = json.loads(sys.stdin.readline())
    print(json.dumps({"now": time.time()}), flush=True)
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda target: attempt(*target), asked["targets"]))
    print(json.dumps({"answers": answers, "unready": unready(asked["status_port"]), "cuda": cuda()}))


if __name__ == "__main__":
    main()
