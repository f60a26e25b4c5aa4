#!/bin/sh
# torch 2.13.0: small all-reduces of two ranks over gloo take two thirds of the time, or a quarter, where gloo's threads
# run as those of a batch job.
#
# Guess before: the two processes wait for each other's packets, and the kernel's scheduling policy changes little. gloo's
# thread writes into a socket while it holds the lock of its pair. Linux lets the peer that is woken by this take the
# writer's core. The answer arrives, and the loop that should read it cannot have the lock: it does not wait for it, but
# asks epoll again at once, and epoll reports the same packet, until the writer runs on. Threads under SCHED_BATCH take no
# core from the thread that wakes them. With both ranks on one core the loops cannot even run beside the writer, and the
# system time still halves.
#
# Seen with: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux 6.18 on two quiet cores: 3,000 all-reduces of 64 numbers on one
# core take 1.4 to 1.5 s and 0.5 to 0.6 s of system time of each rank, and 0.9 to 1.0 and 0.3 s with SCHED_BATCH; on two
# cores 2.2 to 3.3 and 1.1 to 1.7 s, and 0.7 to 0.8 and 0.4 s. Prints the times, and fails when the policy no longer matters.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/ranks.py" <<'PYTHON'
import os
import resource
import socket
import statistics
import time
from multiprocessing import get_context

COUNT = 3000


def rank(number, port, policy, cores, told):
    import torch
    from torch import distributed

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    os.sched_setscheduler(0, policy, os.sched_param(0))  # of the threads that gloo begins now
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    numbers = torch.ones(64)
    distributed.all_reduce(numbers)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_stime
    for _ in range(COUNT):
        distributed.all_reduce(numbers)
    told.put((time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_stime - before))
    distributed.barrier()


def run(policy, cores):
    """The seconds of COUNT all-reduces, and the system time of a rank."""
    context = get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = context.Queue()
    ranks = [context.Process(target=rank, args=(n, port, policy, cores, told)) for n in (0, 1)]
    for one in ranks:
        one.start()
    found = [told.get(timeout=120) for _ in ranks]
    for one in ranks:
        one.join()
    return tuple(map(statistics.mean, zip(*found)))


if __name__ == "__main__":
    cores = sorted(os.sched_getaffinity(0))[:2]
    for some in (cores[:1], cores):
        times = {name: [] for name in ("SCHED_OTHER", "SCHED_BATCH")}
        for _ in range(3):  # in turn
            for name in times:
                times[name].append(run(getattr(os, name), some))
        medians = {name: tuple(map(statistics.median, zip(*each))) for name, each in times.items()}
        for name, (seconds, system) in medians.items():
            print(f"{len(some)} core(s), {name}: {seconds:.2f} s, {system:.2f} s of system time a rank", flush=True)
        assert medians["SCHED_OTHER"][1] > 1.3 * medians["SCHED_BATCH"][1], medians
PYTHON
"$folder/env/bin/python" "$folder/ranks.py"
