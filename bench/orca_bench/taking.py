"""A neighbour that takes a core for a moment, again and again, until it is killed.

python -m orca_bench.taking BURST EVERY    # ms of CPU, and ms from one burst to the next on average
"""

import random
import sys
import time


def take(burst: float, every: float) -> None:
    """Both in seconds."""
    jitter, due = random.Random(0), time.monotonic()
    while True:
        due = max(time.monotonic(), due + every * jitter.uniform(0.5, 1.5))
        time.sleep(max(0.0, due - time.monotonic()))
        until = time.thread_time() + burst
        while time.thread_time() < until:
            pass


if __name__ == "__main__":
    print("begins", flush=True)
    take(*(float(given) / 1e3 for given in sys.argv[1:]))
