"""Counts the threads that are worth having."""

import os
from pathlib import Path


def cores() -> int:
    """Cores that this process may use: its affinity, and its container's quota (cgroup v2)."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
