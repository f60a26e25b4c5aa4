"""Logs of a long run: a writer goes on in the same file, and nothing grows without an end."""

import os
import threading
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest

from orca_cli.runs import new_lines
from orca_local.log_rotation import rotate
from orca_local.run_folder import open_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "endpoint-0.log"


@pytest.fixture
def writer(log: Path) -> Iterator[int]:
    """A descriptor that a process keeps for its standard error."""
    descriptor = open_log(log)
    yield descriptor
    os.close(descriptor)


def test_a_writer_goes_on_and_one_older_file_is_kept(log: Path, writer: int) -> None:
    older = log.with_name("endpoint-0.log.1")
    os.write(writer, b"one\n")
    rotate(log, limit=4)
    assert not older.exists(), "it is not larger than its limit"
    os.write(writer, b"two\n")
    rotate(log, limit=4)
    assert (older.read_text(), log.read_bytes()) == ("one\ntwo\n", b"")
    assert older.stat().st_mode & 0o777 == 0o600
    os.write(writer, b"three\n")
    assert log.read_bytes() == b"three\n", "from the beginning, without a hole"
    rotate(log, limit=4)
    assert older.read_text() == "three\n"
    assert sorted(path.name for path in log.parent.iterdir()) == ["endpoint-0.log", "endpoint-0.log.1"]


def test_a_follower_goes_on_with_the_new_lines(log: Path, writer: int) -> None:
    os.write(writer, b"x" * 4096 + b"\n")
    done = threading.Event()

    def write() -> None:
        for n in count():
            if done.wait(0.01):
                return
            os.write(writer, b"%d\n" % n)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        lines = new_lines([log])
        before = int(next(lines)[1])
        rotate(log, limit=1)
        assert all(int(line) > before for _, line in islice(lines, 20))
        assert log.stat().st_size < 4096
    finally:
        done.set()
        thread.join()
