"""Compiles the kernels: ahead of time into a wheel or an image, or once on first use from a checkout.

    python -m orca_kernels.cpu.build        # into the package, as wheels and images have it

Each instruction set's file is compiled with its own flags, and the best that the machine has is chosen when a model is
loaded. So one library serves all machines of an architecture.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE / "src"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=fast", "-pthread")
AVX512 = ("-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
X86 = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": AVX512,
    "avx512_bf16": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
    "amx": (*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}


class CannotBuild(Exception):
    """There is no compiler, or it failed. The sentence says which."""


def compiler() -> str:
    """GCC's C++ compiler, whose vector extensions the kernels use. Raises CannotBuild."""
    if found := shutil.which("g++"):
        return found
    raise CannotBuild("no C++ compiler (g++)")


def special() -> dict[str, tuple[str, ...]]:
    """The instruction sets of this architecture beyond what any processor of it has, and their flags."""
    return X86 if platform.machine() in ("x86_64", "AMD64") else {}


def name() -> str:
    """The library's file name, which changes with the sources, the flags and the architecture."""
    digest = hashlib.sha256(repr((platform.machine(), FLAGS, special())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}.so"


def build(folder: Path) -> Path:
    """Compiles the library into a folder. Raises CannotBuild.

    Leaves out the instruction sets that an older compiler, or its assembler, does not know.
    """
    cxx = compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as made:

        def run(*command: str) -> None:
            done = subprocess.run((cxx, *command), capture_output=True, text=True, check=False)
            if done.returncode:
                raise CannotBuild(f"{Path(cxx).name} failed: {done.stderr.strip()[:2000]}")

        def known(*command: str) -> bool:
            try:
                run(*command)
            except CannotBuild:
                return False
            return True

        def compiled(source: str, *flags: str) -> str:
            run(*FLAGS, *flags, "-c", str(SOURCES / f"{source}.cpp"), "-o", f"{made}/{source}.o")
            return f"{made}/{source}.o"

        def compiled_if_known(isa: str) -> str | None:
            flags, stem = special()[isa], f"{made}/isa_{isa}"
            if not known(*flags, "-fsyntax-only", "-x", "c++", os.devnull):
                return None
            # An error in our source is raised. A file is left out only if the assembler lacks its instructions.
            run(*FLAGS, *flags, "-S", str(SOURCES / f"isa_{isa}.cpp"), "-o", f"{stem}.s")
            return f"{stem}.o" if known("-c", f"{stem}.s", "-o", f"{stem}.o") else None

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            of_sets = dict(zip(special(), threads.map(compiled_if_known, special()), strict=True))
            have = [f"-DHAVE_{isa.upper()}" for isa, found in of_sets.items() if found]
            # In this order. Where two files have the same inline function, the linker takes the first: the one for any
            # processor. (Link-time optimization would break this.)
            common = list(threads.map(lambda one: compiled(one, *have), ("pool", "program", "isa_portable")))
        objects = [*common, *(found for found in of_sets.values() if found)]
        linking = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc", "-Wl,-z,defs")
        library = Path(made, "kernels.so")
        run(*linking, "-o", str(library), *objects)
        with library.open("rb") as whole:
            os.fsync(whole.fileno())  # or a machine that stops now may keep the name, and nothing in the file
        return library.replace(folder / name())  # ranks that start together may all build it


def cache() -> Path:
    """The folder in which a checkout keeps built libraries: one for each version of the C library.

    Machines may share a home. One with an older C library cannot load a library that was linked with a newer one.
    """
    return Path.home() / ".cache" / "orca" / "".join(platform.libc_ver())


def library_path(tell: Callable[[str], None] = log.info) -> Path:
    """The built library: the package's own, or the cache's, which is built if it is not there. Raises CannotBuild.

    tell: is given a line when a build begins, and one with its time when it has ended.
    """
    if (packaged := PACKAGE / name()).exists():
        return packaged
    if (path := cache() / name()).exists():
        return path
    compiler()
    tell("compiling kernels for this machine, once, some minutes of CPU time")
    began = time.monotonic()
    path = build(cache())
    tell(f"compiled kernels in {time.monotonic() - began:.0f} s")
    return path


def built(tell: Callable[[str], None]) -> None:
    """Builds the library where it is missing. A failure is raised later, to the process that loads the library."""
    with suppress(CannotBuild, OSError, RuntimeError):
        library_path(tell)


if __name__ == "__main__":
    build(PACKAGE)
