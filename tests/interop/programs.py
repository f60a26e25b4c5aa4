"""Builds and runs programs in other languages. A test skips where their packages cannot be fetched."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

AWAY = ("dial tcp", "no such host", "toolchain not available", "Could not transfer", "Unknown host", "ENOTFOUND")
COLOURS = re.compile(r"\x1b\[\d*m")


async def run(command: Sequence[str | Path], folder: Path, seconds: float) -> tuple[int, str]:
    """Runs a command in a folder. Returns its exit status and everything that it printed, without colours."""
    pipe, both = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    process = await asyncio.create_subprocess_exec(*map(str, command), cwd=folder, stdout=pipe, stderr=both)
    try:
        async with asyncio.timeout(seconds):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode is not None
    return process.returncode, COLOURS.sub("", printed.decode())


async def build(command: Sequence[str | Path], folder: Path, seconds: float = 280) -> None:
    """Runs a command that builds or installs. Skips the test where a registry is away."""
    status, printed = await run(command, folder, seconds)
    if status != 0 and any(words in printed for words in AWAY):
        pytest.skip(f"{command[0]} cannot fetch packages here: {printed[-300:]}")
    assert status == 0, printed
