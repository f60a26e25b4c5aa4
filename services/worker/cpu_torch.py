"""Splits a lock of the worker in two, for torch's own CPU wheel: `python cpu_torch.py LOCK SHA256 TORCH OTHERS`.

TORCH gets torch of the same version from the index of CPU wheels, whose only hash is SHA256. OTHERS gets all other
packages but those that only torch with CUDA needs, with the hashes that they have. Each is a file for `pip install -r`.
"""

import re
import sys
from pathlib import Path

CUDA = ("cuda-", "nvidia-", "triton")


def split(lock: str, sha256: str) -> tuple[str, str]:
    """The requirement of torch, and those of all others. Raises SystemExit for a hash of another form."""
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        sys.exit(f"TORCH_SHA256 is the hash of torch's CPU wheel, 64 hexadecimal digits, not {sha256!r}")
    blocks = re.split(r"\n(?=[^\s#])", lock)
    (torch,) = (block for block in blocks if block.startswith("torch=="))
    version = torch.split()[0]
    others = [block for block in blocks if block is not torch and not block.startswith(CUDA)]
    return f"{version}+cpu --hash=sha256:{sha256}\n", "\n".join(others) + "\n"


if __name__ == "__main__":
    lock, sha256, *files = sys.argv[1:]
    for file, text in zip(files, split(Path(lock).read_text(), sha256), strict=True):
        Path(file).write_text(text)
