"""The machine's ceilings: how fast it reads memory, and how fast it multiplies matrices.

Every floor of the bench is computed from these two. A machine that is shared with others is not equally fast in every
second, so `orca bench kernels` runs these probes again in turn with what it times.

Memory is read from huge pages, where an engine's weights lie, by `reading.cpp`: two threads of an EPYC of Zen 3 took
7.7 ms for what torch's fastest sum took 10. Matrices are multiplied by plain torch, whose best is not always the
machine's: a kernel that is faster than its floor shows a ceiling that was measured too low.
"""

import ctypes
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from orca_kernels.cpu.build import CannotBuild, compiler
from orca_lab.roofline import Accelerator, accelerator
from orca_worker.iteration.kv import untouched

READ_BYTES = 400 << 20  # far more than any cache holds
WAYS = tuple(itertools.product((1, 2, 4, 8), (0, 32)))  # streams of a thread, and cache lines asked for ahead
SQUARES = (256, 512, 1024, 2048, 4096)  # the largest whose product takes less than LONG is measured
LONG = 0.25  # seconds
SOURCE = Path(__file__).with_name("reading.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread")


@dataclass(frozen=True)
class Probe:
    """A call that reads or computes as fast as the machine can. amount: bytes, or FLOP."""

    amount: int
    run: Callable[[], object]

    def seconds(self) -> float:
        started = time.perf_counter()
        self.run()
        return time.perf_counter() - started

    def fastest(self, runs: int) -> float:
        """Seconds of the fastest of several runs: other work on the machine only ever adds to a time."""
        self.run()
        return min(self.seconds() for _ in range(runs))


@dataclass(frozen=True)
class Ceilings:
    """The fastest ways to read memory, and to multiply matrices of a type, that this machine has."""

    reading: Probe
    products: Mapping[str, Probe]  # by type. Weights in bfloat16 can be widened: theirs is the faster one of both types

    @property
    def probes(self) -> list[Probe]:
        return [self.reading, *self.products.values()]

    def roofline(self, seconds: Callable[[Probe], float]) -> Accelerator:
        """Returns the ceilings as an entry of roofline.py's table."""
        peak = {name: probe.amount / seconds(probe) for name, probe in self.products.items()}
        return Accelerator("cpu", self.reading.amount / seconds(self.reading), peak)


@cache
def reader() -> Callable[..., int]:
    """`orca_read` of reading.cpp, compiled for this processor. Raises CannotBuild."""
    with tempfile.TemporaryDirectory(prefix="orca-reading-") as folder:
        made = f"{folder}/reading.so"
        done = subprocess.run(
            (compiler(), *FLAGS, str(SOURCE), "-o", made), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CannotBuild(done.stderr.strip()[:2000])
        read = ctypes.CDLL(made).orca_read
    size, number = ctypes.c_size_t, ctypes.c_int
    read.restype, read.argtypes = ctypes.c_uint64, (ctypes.c_void_p, size, number, number, size)
    return read


def reading(threads: int, size: int, runs: int = 4) -> Probe:
    """The fastest way for so many threads to read `size` bytes. Raises CannotBuild."""
    read, data = reader(), untouched((size // 4,), torch.float32).fill_(1.0)
    ways = [
        Probe(data.nbytes, lambda way=way: read(data.data_ptr(), data.nbytes, threads, *way))  # it keeps the data
        for way in WAYS
    ]
    return min(ways, key=lambda way: way.fastest(runs))


def product(dtype: torch.dtype, long: float, runs: int = 3) -> Probe:
    """A product of two square matrices by torch's threads: the fastest of those that `long` seconds allow."""
    found: dict[float, Probe] = {}
    for side in SQUARES:
        a, b = torch.randn(2, side, side).to(dtype).unbind()
        probe = Probe(2 * side**3, lambda a=a, b=b: a @ b)
        seconds = probe.fastest(runs)
        found[probe.amount / seconds] = probe
        if 8 * seconds > long:  # the next one has eight times the work
            break
    return found[max(found)]


def measure(threads: int, types: Sequence[str]) -> Ceilings | None:
    """The ceilings of this machine's processor with so many threads; None where there is no compiler. Takes seconds."""
    torch.set_num_threads(threads)
    with torch.inference_mode(), suppress(CannotBuild):
        wide = product(torch.float32, LONG)
        of = {"float32": (wide,), "bfloat16": (wide, product(torch.bfloat16, LONG)) if "bfloat16" in types else ()}
        faster = {name: min(of[name], key=lambda probe: probe.fastest(3) / probe.amount) for name in types}
        return Ceilings(reading(threads, READ_BYTES), faster)
    return None


def of_device(
    device: torch.device, threads: int, types: Sequence[str] = ("bfloat16", "float32")
) -> Ceilings | Accelerator | None:
    """A CPU's ceilings, which can be measured again, or a GPU's datasheet; None where neither is known."""
    if device.type == "cuda":
        return accelerator(torch.cuda.get_device_name(device))
    return measure(threads, types)


def at_best(on: Ceilings | Accelerator | None) -> Accelerator | None:
    """Ceilings as they are measured now, at their best; a datasheet as it is."""
    if not isinstance(on, Ceilings):
        return on
    with torch.inference_mode():
        return on.roofline(lambda probe: probe.fastest(4))
