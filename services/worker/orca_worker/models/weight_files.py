"""The files of a checkpoint's weights, without torch: safetensors, one or several with an index, or one GGUF file.

The fingerprint of a checkpoint's weights: engines with the same one make the same model's tokens.

A model of hundreds of gigabytes is told from its fine-tune in a second, so not all of it can be read. The fingerprint
covers config.json, the headers of all safetensors files, and of each tensor some bytes: all of a small one, chunks at
even distances of a large one. Training, merging an adapter and quantising change many numbers of each tensor that they
touch. A change of a few numbers in a large tensor is seen only in the hub's cache, which names a file by a hash of all
its bytes.
"""

import hashlib
import os
import shlex
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from orca_common.bounded_file import json_object, open_regular, read_bounded, shown
from orca_common.checkpoint import CONFIG_BYTES, WEIGHT_NAMES
from orca_common.errors import FailedPrecondition
from orca_common.gguf.folder import SUFFIX, gguf_file
from orca_common.gguf.header import Gguf, gguf_header

from .header import Header, header_of

# Bounds of what a stranger's index may make a rank read. Those of published models are below 2 MB.
INDEX_BYTES, MAX_SHARDS = 16 << 20, 1024

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

READ_BYTES = 32 << 20  # of a checkpoint's tensors, where they are no more than 8,192
LEAST_BYTES, CHUNK_BYTES = 4 << 10, 64 << 10  # of a tensor; that lie together
READERS = 8  # files at a time: a volume on the network answers each read after a while


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a checkpoint should have; they may be missing.

    Raises FailedPrecondition when its index is wrong.
    """
    single, index = (folder / name for name in WEIGHT_NAMES)
    if index.exists() and not single.exists():
        return [folder / name for name in shard_names(index)]
    return [single]


def missing(folder: Path, name: str) -> FailedPrecondition:
    """Says that a file of the weights is not there and, for a checkpoint of pickles alone, how to convert it."""
    for pickled in PICKLED:
        if (folder / pickled).exists():
            load = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(folder)!r})"
            command = shlex.join(["python", "-c", f"{load}.save_pretrained({str(folder)!r})"])
            why = f"{folder} has its weights in {pickled}, a pickle, which may run any code"
            return FailedPrecondition(f"model: {why}; this writes them as safetensors: {command}")
    return FailedPrecondition(f"model: {folder} lacks weights in safetensors ({name})")


def shard_names(index: Path) -> list[str]:
    """The files that an index names. Raises FileNotFoundError, and FailedPrecondition when it is wrong."""
    names = json_object(read_bounded(index, INDEX_BYTES), index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise FailedPrecondition(f"model: {index} has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
            raise FailedPrecondition(f"model: {index} names {shown(name)}, which is no file of its folder")
    files = sorted(set(names.values()))
    if len(files) > MAX_SHARDS:
        raise FailedPrecondition(f"model: {index} names {len(files)} files; at most {MAX_SHARDS} are read")
    return files


def check_files(folder: Path) -> None:
    """Reads the headers of a checkpoint's files alone. Raises FailedPrecondition for one that is missing or wrong."""
    for file in _files(folder):
        try:
            _read_header(file)
        except FileNotFoundError:
            raise missing(folder, file.name) from None


def _files(folder: Path) -> list[Path]:
    found = gguf_file(folder)
    return [found] if found is not None else weight_files(folder)


def _read_header(file: Path) -> Header | Gguf:
    return gguf_header(file) if file.suffix == SUFFIX else header_of(file)


def read_runs(path: Path, name: str, runs: Iterable[tuple[int, int]], start: int, into: memoryview) -> None:
    """Reads runs of bytes of a tensor (first byte, count), which begins at byte `start`, one behind the other.

    Raises FailedPrecondition where the file ends within them.
    """
    file, filled = open_regular(path), 0
    try:
        for first, count in runs:
            at, end = start + first, filled + count
            while filled < end:  # one read returns at most 2 GiB on Linux
                got = os.preadv(file, [into[filled:end]], at)
                if not got:
                    raise FailedPrecondition(f"model: {path} ends within {name}")
                filled, at = filled + got, at + got
    finally:
        os.close(file)


def fingerprint(folder: Path, *formats: str | None) -> str:
    """16 hexadecimal digits, others for each of the formats that weights, or keys and values, get.

    What is wrong with a file is left to its reader (`weights.Weights`) to say.
    """
    whole = hashlib.sha256(read_bounded(folder / "config.json", CONFIG_BYTES))
    try:
        files = _files(folder)
    except FailedPrecondition:
        files = []
    with ThreadPoolExecutor(READERS) as readers:
        for found in readers.map(partial(_of_file, most=READ_BYTES // max(len(files), 1)), files):
            whole.update(found)
    for name in filter(None, formats):
        whole.update(name.encode())
    return whole.hexdigest()[:16]


def _of_file(file: Path, most: int) -> bytes:
    """A hash of its name, its header and about `most` bytes of its tensors."""
    found, real = hashlib.sha256(file.name.encode()), file.resolve()
    if real.parent.name == "blobs":  # of the hub's cache
        found.update(real.name.encode())
        return found.digest()
    try:
        header = _read_header(file)
        descriptor = open_regular(file)
    except (FailedPrecondition, OSError):
        return b""
    each = max(most // max(len(header.tensors), 1), LEAST_BYTES)
    try:
        found.update(os.pread(descriptor, header.start, 0))
        for _, _, begin, size in header.tensors.values():
            if size <= each:
                found.update(os.pread(descriptor, size, begin))
                continue
            chunk = min(CHUNK_BYTES, each // 4)
            last = each // chunk - 1
            for number in range(last + 1):
                found.update(os.pread(descriptor, chunk, begin + number * (size - chunk) // last))
    finally:
        os.close(descriptor)
    return found.digest()
