"""Runs in a pod: tries names and ports, and tells its clock. Needs Python, and orca_common for the pool's address.

Reads a line of stdin: a JSON list of [host, port]. Without a port the name is only resolved; an empty host stands
for the address in the pod's own setting redis_url. It prints {"now": ..} at once, and at the end
{"answers": [[answer, seconds], ..], "cuda": ".."}.
"""

import importlib.util
import json
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

PATIENCE = 3.0  # seconds for each try
REDIS_PORT = 6379


def attempt(host: str, port: int | None) -> tuple[str, float]:
    """What came of one try, and the seconds that it took."""
    begin = time.monotonic()
    try:
        if not host:
            host, port = pool_address()
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


def pool_address() -> tuple[str, int]:
    from orca_common.settings import PoolSettings

    parts = urlsplit(PoolSettings.load().redis_url)
    return parts.hostname or "127.0.0.1", parts.port or REDIS_PORT


def cuda() -> str:
    """The CUDA that this pod's torch is built for; "" without torch or for a CPU alone. Torch is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    text = (Path(found.origin).parent / "version.py").read_text()
    version = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return version[1] if version else ""


def main() -> None:
    print(json.dumps({"now": time.time()}), flush=True)
    tries = json.loads(sys.stdin.readline())
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda target: attempt(*target), tries))
    print(json.dumps({"answers": answers, "cuda": cuda()}))


if __name__ == "__main__":
    main()
