"""What the kernel did because the pod reached its memory limit: it counts the processes that it has killed."""

from pathlib import Path

# cgroup v2, then v1. Both files have a line "oom_kill NUMBER".
COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


def kills() -> int:
    """How many processes of this pod the kernel has killed for want of memory; 0 where it does not say."""
    for path in COUNTERS:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
