"""What iterations lose to a neighbour that takes a core for a moment, again and again, as services do.

    python -m orca_bench.neighbour [--model MODEL] [--burst 0.3] [--every 2]

Decoding iterations run alone and beside a process that takes `burst` ms of CPU every `every` ms on average, in turn.
The lost time is divided by the CPU time that the neighbour really took: two cores would lose half of it at best.
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch

from .cases import vocabulary_of
from .engine import Engine, EngineOptions
from .kernels import iteration
from .rank import cpu_seconds
from .schedule import BLOCK_SIZE, Shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name; the demo model if not given")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=32, help="tokens of each request before the iteration")
    parser.add_argument("--burst", type=float, default=0.3, help="ms")
    parser.add_argument("--every", type=float, default=2.0, help="ms")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement, two in a round")
    given = parser.parse_args()
    options = EngineOptions(model=given.model)
    checkpoint = options.checkpoint()
    slots = given.batch * -(-(given.context + 1) // BLOCK_SIZE) * BLOCK_SIZE
    engine = Engine(options, checkpoint, slots)
    vocabulary = vocabulary_of(checkpoint.vocab_size)
    subject = iteration(engine, "decode", Shape((), (given.context,) * given.batch), vocabulary)

    def milliseconds() -> tuple[float, int]:
        """Of an iteration, and how many there were."""
        began, runs = time.perf_counter(), 0
        while (ran := time.perf_counter() - began) < given.seconds:
            subject.run()
            runs += 1
        return ran / runs * 1e3, runs

    def beside() -> tuple[float, float]:
        """ms of an iteration beside the neighbour, and what it took of each."""
        words = [sys.executable, "-m", "orca_bench.taking", str(given.burst), str(given.every)]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as neighbour:
            try:
                assert neighbour.stdout is not None
                neighbour.stdout.readline()  # it begins
                before = cpu_seconds(neighbour.pid)
                each, runs = milliseconds()
                return each, (cpu_seconds(neighbour.pid) - before) / runs * 1e3
            finally:
                neighbour.kill()

    with torch.inference_mode():
        milliseconds()
        rounds = [(milliseconds()[0], *beside()) for _ in range(given.rounds)]
    alone, with_it, took = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(
        f"alone {alone:.2f} ms an iteration, beside the neighbour {with_it:.2f}; it took {took:.2f} ms of each: ",
        end="",
    )
    print(f"lost {with_it - alone:.2f} ms, {(with_it - alone) / took:.2f} x what was taken")


if __name__ == "__main__":
    main()
