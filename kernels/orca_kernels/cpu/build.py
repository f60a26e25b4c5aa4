"""Compiles the kernels: ahead of time into a wheel or an image, or once on first use from a checkout.

    python -m orca_kernels.cpu.build        # into the package, as wheels and images have it

Each instruction set's file is compiled with its own flags, and the best that the machine has is chosen when a model is
loaded. So one library serves all machines of an architecture.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("src")
PACKAGED = Path(__file__).with_name("kernels.so")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=fast", "-pthread")
AVX512 = ("-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
X86 = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": AVX512,
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "amx": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
# In this order. Where two files have the same inline function, the linker takes the first: the one for any processor.
COMMON = ("pool", "program", "isa_portable")


class CannotBuild(Exception):
    """There is no compiler, or it failed. The sentence says which."""


def compiler() -> str:
    """The C++ compiler. Raises CannotBuild."""
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return found
    raise CannotBuild("no C++ compiler (g++, clang++ or c++)")


def files() -> dict[str, tuple[str, ...]]:
    """The source files of this architecture, without suffix, and the flags of each."""
    special = X86 if platform.machine() in ("x86_64", "AMD64") else {}
    return {**dict.fromkeys(COMMON, ()), **{f"isa_{name}": flags for name, flags in special.items()}}


def build(into: Path) -> None:
    """Compiles the library. Raises CannotBuild."""
    cxx = compiler()
    with tempfile.TemporaryDirectory(prefix="orca-kernels-") as folder:

        def run(*command: str) -> None:
            done = subprocess.run((cxx, *command), capture_output=True, text=True, check=False)
            if done.returncode:
                raise CannotBuild(f"{Path(cxx).name} failed: {done.stderr.strip()[:2000]}")

        def compile_file(name: str, flags: tuple[str, ...]) -> str:
            made = f"{folder}/{name}.o"
            run(*FLAGS, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", made)
            return made

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_file, files(), files().values()))
        run("-shared", "-pthread", "-static-libstdc++", "-static-libgcc", "-o", f"{folder}/kernels.so", *objects)
        try:
            into.parent.mkdir(parents=True, exist_ok=True)
            arriving = into.with_name(f"{into.name}.{os.getpid()}")
            shutil.copy(f"{folder}/kernels.so", arriving)
            arriving.replace(into)  # ranks that start together may all build it
        except OSError as error:
            raise CannotBuild(f"{into} cannot be written: {error.strerror}") from None


def library_path() -> Path:
    """The built library: the package's own, or the cache's, which is built if it is not there. Raises CannotBuild."""
    if PACKAGED.exists():
        return PACKAGED
    digest = hashlib.sha256(repr((FLAGS, files())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    path = Path.home() / ".cache" / "orca" / f"kernels-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        build(path)
    return path


if __name__ == "__main__":
    build(PACKAGED)
