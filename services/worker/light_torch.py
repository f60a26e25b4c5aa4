"""Installs torch from the package index without most of CUDA, on a machine that has no NVIDIA GPU: `make demo`.

    python light_torch.py lock LOCK > LIGHT        a lock without what only a GPU needs, for `pip install --no-deps`
    python light_torch.py link SITE-PACKAGES       after it: stand-ins for the libraries that torch links

CUDA's libraries are four fifths of what an installation fetches, and on a CPU torch never calls them. It does not start
without them, so each gets a stand-in, as in `without_cuda.py`. A stand-in lies where the library's own package puts it:
who installs that package later has the library. Needs gcc and binutils.
"""

import re
import sys
from pathlib import Path

from without_cuda import LAZY, output, stand_in, symbols, versions

CUDA = ("cuda-", "nvidia-", "triton")
STAY = ("nvidia-cuda-runtime", "nvidia-cuda-cupti", "nvidia-cufile")  # small, and torch calls them as it is imported
OF_NVIDIA = re.compile(r"lib(cu|nccl|nv)\w*\.so")
NAME = re.compile(r"(cu|nccl|nv)[a-zA-Z]")  # of a function without a version


def light(lock: str) -> str:
    """The lock without the packages that only a GPU needs."""
    blocks = re.split(r"\n(?=[^\s#])", lock)
    return "\n".join(block for block in blocks if not block.startswith(CUDA) or block.startswith(STAY))


def link(site: Path) -> None:
    """Makes a stand-in for each of CUDA's libraries that torch links and that is not there."""
    libraries = [*(site / "torch/lib").glob("*.so*")]
    users = [library for library in libraries if library.name not in LAZY]
    linked = {name for user in users for name in re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-dW", user))}
    there = {path.name: path for path in (site / "nvidia").rglob("*.so*")}
    missing = sorted(name for name in linked - there.keys() if OF_NVIDIA.match(name))
    if not missing:
        return
    found = output("readelf", "-dW", site / "torch/lib/libtorch_cuda.so")
    folders = re.findall(r"\$ORIGIN/\.\./\.\./(nvidia/\w+/lib)", found)
    defined = {name for path in (*libraries, *there.values()) for name in symbols(path, "--defined-only")}
    called = {line.split()[-1] for user in users for line in output("nm", "-D", "--undefined-only", user).splitlines()}
    plain = {name for name in called if "@" not in name and NAME.match(name)} - defined
    for name in missing:
        needed = versions(users, name)
        mine = {name.partition("@")[0] for name in called if name.rpartition("@")[2] in needed} if needed else plain
        # The packages have a folder each, but for those of the toolkit, which share one.
        own = [folder for folder in folders if folder.split("/")[1] in name.lower()]
        folder = site / (own or [one for one in folders if re.match(r"nvidia/cu\d", one)])[0]
        folder.mkdir(parents=True, exist_ok=True)
        stand_in(folder / name, sorted(mine), needed)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["lock", lock]:
            print(light(Path(lock).read_text()))
        case ["link", site]:
            link(Path(site))
        case _:
            sys.exit(__doc__)
