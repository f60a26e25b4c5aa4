"""Pages of files that a process gives back."""

import ctypes
import json
import mmap
import subprocess
import sys
from pathlib import Path

from orca_worker.processes.process import unmap_files, unwritten

SIZE = 64 * mmap.PAGESIZE


def resident(file: Path) -> list[int]:
    """kB of each mapping of a file that lie in memory, by their addresses."""
    found, here = list[int](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            here = words[-1] == str(file)
        elif here and words[0] == "Rss:":
            found.append(int(words[1]))
    return found


def play(file: Path) -> None:
    """In a process of one thread: maps a file that is read, and one that was written to and is protected since."""
    read, written = file.with_suffix(".read"), file.with_suffix(".written")
    for each in (read, written):
        each.write_bytes(bytes(range(256)) * (SIZE // 256))
    private, both = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    maps: list[mmap.mmap] = []
    for path, protection in ((read, mmap.PROT_READ), (written, both)):
        with path.open("r+b") as opened:
            maps.append(mmap.mmap(opened.fileno(), SIZE, flags=private, prot=protection))
    maps[1][7:10] = b"own"
    whole = [one[:] for one in maps]
    begin = ctypes.addressof(ctypes.c_char.from_buffer(maps[1]))
    assert ctypes.CDLL(None).mprotect(ctypes.c_size_t(begin), ctypes.c_size_t(SIZE), mmap.PROT_READ) == 0
    before = resident(read), resident(written)
    unmap_files()
    after = resident(read), resident(written)
    print(json.dumps({"before": before, "after": after, "same": [one[:] for one in maps] == whole}))


def test_pages_of_files_are_unmapped_unless_they_are_its_own(tmp_path: Path) -> None:
    """As of the libraries of a fork server: code is in the kernel's cache, what was relocated is nowhere else."""
    command = [sys.executable, __file__, str(tmp_path / "file")]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    all_of_it = [SIZE >> 10]
    assert said == {"before": [all_of_it, all_of_it], "after": [[0], all_of_it], "same": True}


def test_where_the_kernel_does_not_say_whose_pages_they_are_they_stay() -> None:
    """Another kernel may not print a line. Relocated pages would be lost then, and every process forked later fail."""
    whole = Path("/proc/self/smaps").read_text().splitlines()
    assert list(unwritten(whole))
    for missing in ("Anonymous:", "Swap:"):
        assert list(unwritten([line for line in whole if not line.startswith(missing)])) == []


if __name__ == "__main__":
    play(Path(sys.argv[1]))
