"""A GGUF file as a checkpoint's folder: with the files that its fields become, and links to it and to those beside it.

The folder is in the cache, by the file's path, size and time of change. So a service reads a checkpoint there as it
reads any other, and several processes that start together make the same one.
"""

import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

from ..bounded_file import open_regular
from ..errors import FailedPrecondition
from .configuration import FREQUENCIES, check_finite, configuration
from .header import Gguf, broken, gguf_header
from .tokenizer import tokenizer

SUFFIX = ".gguf"
# What is taken from the file's own folder where it is there, instead of what the file says.
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
RULES = b"1"  # raised when the files are made in another way


def gguf_file(path: Path) -> Path | None:
    """The one GGUF file of a folder without safetensors, or the path itself. Raises FailedPrecondition for several."""
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    files = sorted(path.glob("*" + SUFFIX))
    if not files or any(path.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise FailedPrecondition(f"model: {path} holds {len(files)} files in GGUF ({names}); give the path of one")
    return files[0]


def cache() -> Path:
    """The folder of all such folders."""
    return Path.home() / ".cache" / "orca" / "gguf"


def unpacked(file: Path) -> Path:
    """The folder of a file. Raises FailedPrecondition."""
    of = gguf_header(file)
    real, stat = file.resolve(), file.stat()
    says = f"{real} {stat.st_size} {stat.st_mtime_ns}".encode() + RULES
    for name in BESIDE:
        if (beside := file.parent / name).exists():
            says += f" {name} {beside.stat().st_mtime_ns}".encode()
    where = cache() / hashlib.sha256(says).hexdigest()[:16] / file.stem
    if (where / "config.json").exists():
        return where
    files = made(file, of)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=where.parent) as made_at:
            for name, value in files.items():
                Path(made_at, name).write_text(json.dumps(value, allow_nan=False))
            for name in BESIDE:
                if (beside := file.parent / name).exists():  # read within the bounds of its readers
                    Path(made_at, name).symlink_to(beside.resolve())
            Path(made_at, file.name).symlink_to(real)
            os.chmod(made_at, 0o755)
            try:
                Path(made_at).rename(where)
            except OSError:
                if not (where / "config.json").exists():  # another process has made it
                    raise
            Path(made_at).mkdir(exist_ok=True)  # for the end of the temporary one
    except OSError as error:
        problem = f"its configuration cannot be written to {where} ({error.strerror})"
        raise FailedPrecondition(f"model: {file}: {problem}; a config.json and a tokenizer.json beside it do") from None
    return where


def made(file: Path, of: Gguf) -> dict[str, Any]:
    """The files by their names. Raises FailedPrecondition."""
    check_finite(file, of.fields)
    files: dict[str, Any] = {"config.json": configuration(file, of, _divisors(file, of))}
    if not (file.parent / "tokenizer.json").exists() and (words := tokenizer(file, of)) is not None:
        files["tokenizer.json"] = words
    tokens, names = of.fields.get("tokenizer.ggml.tokens"), {}
    for name in ("bos", "eos"):
        token = of.fields.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(tokens, list) and type(token) is int and 0 <= token < len(tokens):
            names[f"{name}_token"] = tokens[token]
    template = of.fields.get("tokenizer.chat_template")
    files["tokenizer_config.json"] = names | ({"chat_template": template} if isinstance(template, str) else {})
    return files


def _divisors(file: Path, of: Gguf) -> list[float] | None:
    tensor = of.tensors.get(FREQUENCIES)
    if tensor is None:
        return None
    if tensor.kind != "F32" or tensor.size > 1 << 16:
        raise broken(file, f"{FREQUENCIES} is of type {tensor.kind} and shape {list(tensor.shape)}")
    with open(open_regular(file), "rb") as opened:
        raw = os.pread(opened.fileno(), tensor.size, tensor.start)
    found = list(struct.unpack(f"<{len(raw) // 4}f", raw[: len(raw) // 4 * 4]))
    if not found or not all(1 <= number < float("inf") for number in found):
        raise broken(file, f"{FREQUENCIES} holds a number below 1")
    return found
