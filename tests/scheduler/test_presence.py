"""Whether a scheduler has ended: by the kernel's word, which it gives of no frozen process and of none elsewhere."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orca_scheduler import presence
from orca_scheduler.presence import Presence

PROCESS = """
import time
from orca_scheduler.presence import Presence

mine = Presence()
print(mine.name, flush=True)
time.sleep(60)
"""


def test_a_killed_process_has_ended_and_a_frozen_one_has_not() -> None:
    with (
        Presence() as mine,
        subprocess.Popen([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            name = process.stdout.readline().strip()
            assert name != mine.name
            assert not mine.ended(name)
            process.send_signal(signal.SIGSTOP)
            assert not any(mine.ended(name) for _ in range(1000)), "asking fills no queue"
        finally:
            process.kill()
        process.wait()
        assert mine.ended(name)
        assert not mine.ended(mine.name)


def test_nothing_is_said_of_a_process_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine, another pod, a name of an older release, a system that does not tell where a process is."""
    with Presence() as mine:
        boot = tmp_path / "boot_id"
        boot.write_text("that of another kernel")
        monkeypatch.setattr(presence, "BOOT", boot)
        with Presence() as elsewhere:
            name = elsewhere.name
        monkeypatch.setattr(presence, "BOOT", tmp_path / "none")
        with Presence() as nowhere:
            assert not nowhere.ended(mine.name)
            assert not nowhere.ended(name)
        assert not any(mine.ended(other) for other in (name, nowhere.name, "host-0123abcd", "me", ""))
