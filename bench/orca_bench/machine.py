"""The machine that a number was measured on: what each line of the bench says about it."""

from contextlib import suppress
from pathlib import Path

from orca_kernels.cpu.build import CannotBuild
from orca_kernels.cpu.library import instruction_sets

# The best first: an instruction set, and the flags of /proc/cpuinfo that it needs.
SETS = (
    ("amx", {"amx_bf16", "amx_tile", "avx512f"}),
    ("avx512_bf16", {"avx512_bf16", "avx512f"}),
    ("avx512", {"avx512f", "avx512bw", "avx512vl"}),
    ("avx2", {"avx2", "fma"}),
)


def isa(kernels: str = "auto") -> str:
    """The instruction set that our kernels run with; with plain torch the machine's best."""
    if kernels not in ("auto", "torch"):
        return kernels
    if kernels == "auto":
        with suppress(CannotBuild):
            return instruction_sets()[0]
    return best_isa(Path("/proc/cpuinfo").read_text())


def best_isa(cpuinfo: str) -> str:
    """The best instruction set that a processor has, by the text of /proc/cpuinfo."""
    flags = set(field(cpuinfo, "flags").split())
    return next((name for name, needed in SETS if needed <= flags), "portable")


def processor() -> str:
    """The processor's name."""
    return field(Path("/proc/cpuinfo").read_text(), "model name") or "unknown processor"


def field(text: str, name: str) -> str:
    """The first field of this name in the text of a file of /proc; empty if it is not there."""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def resident_bytes(pid: int | None = None) -> int:
    """Memory of a process that is in use; of this one if none is named."""
    status = Path("/proc", str(pid or "self"), "status").read_text()
    return int(field(status, "VmRSS").removesuffix("kB")) * 1024
