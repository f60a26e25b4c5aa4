"""What this machine can do at best: how fast it reads memory, and how fast it multiplies matrices.

Every floor of the bench is computed from these two. They are measured by plain torch, whose best is not always the
machine's: a kernel that is faster than its floor shows a ceiling that was measured too low.

Memory is read from huge pages, where an engine's weights lie. From the pages of torch's own memory a Xeon with AMX read
20 to 23 GB/s by two threads, and 33 from huge ones.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from orca_lab.roofline import Accelerator, accelerator
from orca_worker.kv import untouched

READ_BYTES = 400 << 20  # far more than any cache holds
STREAMS = 4, 8, 16  # read at once by each thread; one alone leaves part of the bandwidth unused on some machines
SQUARES = (256, 512, 1024, 2048, 4096)  # the largest whose product takes less than LONG is measured
LONG = 0.25  # seconds


@dataclass(frozen=True)
class Ceilings:
    """Bytes read per second, and FLOP per second of matrices of each type."""

    name: str
    bandwidth: float
    rates: dict[str, float]

    def roofline(self) -> Accelerator:
        """As an entry of roofline.py's table. Weights in bfloat16 can be widened, so their peak is the better of both
        types."""
        peak = self.rates | {"bfloat16": max(self.rates.values())}
        return Accelerator(self.name, self.bandwidth, peak)


def fastest(function: Callable[[], object], runs: int) -> float:
    """Seconds of the fastest of several runs: other work on the machine only ever adds to a time."""
    function()
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def read_bandwidth(size: int = READ_BYTES, runs: int = 4) -> float:
    """Bytes per second of the fastest way to read `size` bytes with torch's threads: one stream each, or several."""
    data = untouched((size // 4,), torch.float32).fill_(1.0)
    best = min(fastest(way, runs) for way in (data.sum, data.max, lambda: torch.dot(data, data)))
    for streams in STREAMS:
        rows = data.view(streams, -1)
        total = torch.empty(rows.shape[1])
        best = min(best, fastest(lambda rows=rows, total=total: torch.sum(rows, 0, out=total), runs))
    return data.nbytes / best


def matrix_rate(dtype: torch.dtype, long: float = LONG, runs: int = 3) -> float:
    """FLOP per second of a product of two square matrices, as large as `long` seconds allow."""
    best = 0.0
    for side in SQUARES:
        a, b = torch.randn(2, side, side).to(dtype).unbind()
        seconds = fastest(lambda a=a, b=b: a @ b, runs)
        best = max(best, 2 * side**3 / seconds)
        if 8 * seconds > long:  # the next one has eight times the work
            break
    return best


def measure(threads: int) -> Ceilings:
    """The ceilings of this machine's processor with so many threads. Takes a few seconds."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        rates = {name: matrix_rate(getattr(torch, name)) for name in ("bfloat16", "float32")}
        return Ceilings("cpu", read_bandwidth(), rates)


def of_device(device: torch.device, threads: int) -> Accelerator | None:
    """The ceilings of a device: measured on a CPU, of the datasheet for a GPU; None for a GPU that is not known."""
    if device.type == "cuda":
        return accelerator(torch.cuda.get_device_name(device))
    return measure(threads).roofline()
