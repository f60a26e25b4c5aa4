"""Makes an installed CUDA build of torch small, for machines without GPUs: `python without_cuda.py SITE-PACKAGES`.

torch links CUDA's libraries, so it does not start without them, but on a CPU it never calls them. Each big one (cuBLAS,
cuFFT, NCCL, ..) is replaced by a stand-in: an empty library of the same name, with the functions that torch names and
nothing in them. Nothing of torch itself is changed, so it computes what the same release computes elsewhere. Files that
torch does not link are removed. Needs gcc and binutils.
"""

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SMALL = 8 << 20  # bytes; libraries below it stay as they are: the CUDA runtime, CUPTI, cuFile, the door of cuDNN
LAZY = ("libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")  # torch loads these when a GPU is used

# Hides GPUs, should the node have some: torch then says that there are none, and never comes to a stand-in.
HIDE = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"


def main(site: Path) -> None:
    for name in LAZY:
        (site / "torch/lib" / name).unlink()
    users = [*(site / "torch/lib").glob("*.so*")]
    linked = {name for user in users for name in re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-dW", user))}
    called = {name for user in users for name in symbols(user, "--undefined-only")}
    for path in [path for path in (site / "nvidia").rglob("*") if path.is_file()]:
        if path.name not in linked:
            path.unlink()
        elif path.stat().st_size > SMALL:
            stand_in(path, sorted(called & symbols(path, "--defined-only")), versions(users, path.name))
    (site / "without_cuda.pth").write_text(HIDE)


def stand_in(path: Path, functions: list[str], versions: list[str]) -> None:
    """Overwrites a library with one that has the same name, version names and functions. A call ends the process."""
    first, *others = versions or [path.name]
    script = f"{first} {{ *; }};\n" + "".join(f"{version} {{}};\n" for version in others)
    code = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in functions)
    with TemporaryDirectory() as folder:
        source, names = Path(folder, "stand_in.c"), Path(folder, "versions")
        source.write_text(code)
        names.write_text(script)
        options = ["-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{path.name}"]
        path.unlink(missing_ok=True)
        output("gcc", *options, f"-Wl,--version-script={names}", "-o", path, source)


def symbols(library: Path, which: str) -> set[str]:
    return {line.split()[-1].partition("@")[0] for line in output("nm", "-D", which, library).splitlines()}


def versions(users: list[Path], library: str) -> list[str]:
    """The version names that torch demands of a library."""
    found: set[str] = set()
    for user in users:
        block = re.search(rf"File: {re.escape(library)} .*\n((?:.*Name: .*\n)*)", output("readelf", "-VW", user))
        found |= set(re.findall(r"Name: (\S+)", block[1])) if block else set()
    return sorted(found)


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
