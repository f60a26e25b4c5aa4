"""The machine that a number was measured on, as each line of the bench names it."""

from contextlib import suppress
from pathlib import Path

from orca_kernels.cpu.build import CannotBuild, of_processor
from orca_kernels.cpu.library import best


def isa(kernels: str = "auto") -> str:
    """The instruction set that our kernels run with; with plain torch the machine's best."""
    if kernels not in ("auto", "torch"):
        return kernels
    if kernels == "auto":
        with suppress(CannotBuild):
            return best()
    return of_processor(Path("/proc/cpuinfo").read_text())[0]


def processor() -> str:
    """The processor's name."""
    return field(Path("/proc/cpuinfo").read_text(), "model name") or "unknown processor"


def field(text: str, name: str) -> str:
    """The first field of this name in the text of a file of /proc; empty if it is not there."""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    status = Path("/proc/self/status").read_text()
    return int(field(status, "VmRSS").removesuffix("kB")) * 1024
