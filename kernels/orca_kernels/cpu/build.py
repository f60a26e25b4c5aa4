"""Compiles the kernels: ahead of time into a wheel or an image, or on first use from a checkout.

    python -m orca_kernels.cpu.build        # all into the package, as wheels and images have them

Each instruction set is a library of its own. So a first start compiles that of its machine alone. The other ones are
compiled where a setting or a test asks for them.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE / "src"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=fast", "-pthread")
LINKING = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc", "-Wl,-z,defs")
COMMON = ("pool", "program")  # files that are compiled for any processor, once for all libraries
AVX512 = ("-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
AVX512_NEEDS = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


class InstructionSet(NamedTuple):
    flags: tuple[str, ...]  # the compiler's
    needs: tuple[str, ...]  # flags of /proc/cpuinfo
    newest: str  # an instruction that old assemblers do not know


X86 = {
    "amx": InstructionSet(
        (*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        (*AVX512_NEEDS, "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"),
        "tdpbssd %tmm2, %tmm1, %tmm0",
    ),
    "avx512_bf16": InstructionSet(
        (*AVX512, "-mavx512bf16", "-mavx512vnni"),
        (*AVX512_NEEDS, "avx512_bf16", "avx512_vnni"),
        "vdpbf16ps %zmm2, %zmm1, %zmm0",
    ),
    "avx512": InstructionSet(AVX512, AVX512_NEEDS, "vpaddd %zmm2, %zmm1, %zmm0"),
    "avx2": InstructionSet(("-mavx2", "-mfma"), ("avx2", "fma"), "vfmadd231ps %ymm2, %ymm1, %ymm0"),
}
PORTABLE = InstructionSet((), (), "")


class CannotBuild(Exception):
    """There is no compiler, or it failed. The sentence says which."""


def sets() -> dict[str, InstructionSet]:
    """The instruction sets of this architecture, the best first; the last one is for any processor of it."""
    special = X86 if platform.machine() in ("x86_64", "AMD64") else {}
    return {**special, "portable": PORTABLE}


def flags_of(cpuinfo: str) -> set[str]:
    """The flags of a processor, by the text of /proc/cpuinfo."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((set(value.split()) for key, _, value in lines if key.strip() == "flags"), set[str]())


def of_processor(cpuinfo: str) -> list[str]:
    """The instruction sets of a processor, by the text of /proc/cpuinfo, the best first."""
    has = flags_of(cpuinfo)
    return [isa for isa, one in sets().items() if has.issuperset(one.needs)]


def compiler() -> str:
    """GCC's C++ compiler, whose vector extensions the kernels use. Raises CannotBuild."""
    if found := shutil.which("g++"):
        return found
    raise CannotBuild("no C++ compiler (g++)")


def run(*command: str) -> None:
    """Runs the compiler. Raises CannotBuild."""
    cxx = compiler()
    done = subprocess.run((cxx, *command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{Path(cxx).name} failed: {done.stderr.strip()[:2000]}")


def knows(isa: str) -> bool:
    """Whether there is a compiler that knows an instruction set, and an assembler: RHEL 9's compiler knows AMX, and its
    assembler does not."""
    of = sets()[isa]
    with tempfile.TemporaryDirectory() as made:
        Path(made, "tried.cpp").write_text(f'void tried() {{ asm volatile("{of.newest}"); }}\n')
        try:
            run(*of.flags, "-c", f"{made}/tried.cpp", "-o", f"{made}/tried.o")
        except CannotBuild:
            return False
    return True


def name(isa: str) -> str:
    """The library's file name, which changes with the sources, the flags and the architecture."""
    digest = hashlib.sha256(repr((platform.machine(), FLAGS, LINKING, sets()[isa])).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return f"kernels-{isa}-{digest.hexdigest()[:16]}.so"


def build(folder: Path, isas: Collection[str] | None = None) -> list[Path]:
    """Compiles the libraries of instruction sets into a folder: those named, or all that the compiler knows.

    Raises CannotBuild.
    """
    if isas is None and not (isas := [isa for isa in sets() if knows(isa)]):
        raise CannotBuild(f"{compiler()} compiles nothing")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as made:

        def compiled(isa: str, source: str) -> str:
            made_of = f"{made}/{isa}-{source}.o"
            run(*FLAGS, *sets()[isa].flags, "-c", str(SOURCES / f"{source}.cpp"), "-o", made_of)
            return made_of

        units = [*((isa, source) for isa in isas for source in of_set(isa)), *(("portable", one) for one in COMMON)]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = dict(zip(units, threads.map(lambda unit: compiled(*unit), units), strict=True))
        found = list[Path]()
        for isa in isas:
            library = Path(made, f"{isa}.so")
            # In this order. Where two files have the same inline function, the linker takes the first: the one for any
            # processor. (Link-time optimization would break this.)
            own = [objects["portable", one] for one in COMMON] + [objects[isa, one] for one in of_set(isa)]
            run(*LINKING, "-o", str(library), *own)
            with library.open("rb") as whole:
                os.fsync(whole.fileno())  # or a machine that stops now may keep the name, and nothing in the file
            found.append(library.replace(folder / name(isa)))  # ranks that start together may all build it
        return found


def of_set(isa: str) -> Sequence[str]:
    """The files that are compiled for an instruction set, those that take longest first."""
    return "codes", "attention", f"isa_{isa}", "finish"


def cache() -> Path:
    """The folder in which a checkout keeps built libraries: one for each version of the C library.

    Machines may share a home. One with an older C library cannot load a library that was linked with a newer one.
    """
    return Path.home() / ".cache" / "orca" / "".join(platform.libc_ver())


def found(isa: str) -> Path | None:
    """The built library: the package's own, or the cache's."""
    return next((path for folder in (PACKAGE, cache()) if (path := folder / name(isa)).exists()), None)


def runnable() -> Iterator[str]:
    """The instruction sets that this machine runs and whose libraries are there, or can be built; the best first.

    A wheel or an image has all that its compiler knew. Raises CannotBuild where no set has a library.
    """
    of_this = of_processor(Path("/proc/cpuinfo").read_text())
    packaged = [isa for isa in of_this if (PACKAGE / name(isa)).exists()]
    there = False
    for isa in packaged or of_this:
        if found(isa) or knows(isa):
            there = True
            yield isa
    if not there:
        raise CannotBuild(f"{compiler()} compiles nothing")


def library_path(isa: str, tell: Callable[[str], None] = log.info) -> Path:
    """The library of an instruction set, which is built if it is not there. Raises CannotBuild.

    tell: is given a line when a build begins, and one with its time when it has ended.
    """
    if isa in sets() and (path := found(isa)) is not None:
        return path
    compiler()
    if isa not in (have := list(runnable())):
        raise CannotBuild(f"this machine runs {', '.join(have)}")
    tell(f"compiling kernels for this machine ({isa}), once, about half a minute of CPU time")
    began = time.monotonic()
    (path,) = build(cache(), [isa])
    tell(f"compiled kernels in {time.monotonic() - began:.0f} s")
    return path


def built(tell: Callable[[str], None], kernels: str = "auto") -> None:
    """Builds the library of an instruction set, or of the machine's best one, where it is missing. A failure is raised
    later, to the process that loads the library."""
    with suppress(CannotBuild, OSError, RuntimeError):
        library_path(next(runnable()) if kernels == "auto" else kernels, tell)


def all_built(tell: Callable[[str], None]) -> None:
    """The same for all instruction sets that this machine runs, which tests need."""
    with suppress(CannotBuild, OSError, RuntimeError):
        if missing := [isa for isa in runnable() if not found(isa)]:
            tell(f"compiling kernels for {', '.join(missing)}, once")
            began = time.monotonic()
            build(cache(), missing)
            tell(f"compiled kernels in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    build(PACKAGE)
