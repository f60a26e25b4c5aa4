"""How the processes of a stack are scheduled beside the kernels."""

import os
from pathlib import Path

import pytest

from orca_common.errors import FailedPrecondition
from orca_local.child import LONGEST_SOCKET_PATH, Child, RedisChild, place_of_socket

LISTENS = """echo '{"status": "127.0.0.1:1"}'; exec sleep 60"""


@pytest.mark.parametrize(("batch", "policy"), [(True, os.SCHED_BATCH), (False, os.SCHED_OTHER)])
async def test_a_batch_process_takes_no_core_from_others(tmp_path: Path, batch: bool, policy: int) -> None:
    child = Child("endpoint", "endpoint-0", ["sh", "-c", LISTENS], {}, tmp_path / "log", batch=batch)
    await child.start()
    try:
        assert child.pid is not None
        assert os.sched_getscheduler(child.pid) == policy
        assert os.getsid(child.pid) != os.getsid(0), "Ctrl-C at the terminal reaches its parent alone"
    finally:
        await child.end(5)


async def test_an_earlier_process_is_not_quoted(tmp_path: Path) -> None:
    """All processes of a child have one log. The streams that an endpoint once cut off are not told at each end."""
    once = tmp_path / "once"
    line = """{"event": "cut", "calls": 2}"""
    command = f"[ -e {once} ] || echo '{line}' >&2; touch {once}; {LISTENS}"
    child = Child("endpoint", "endpoint-0", ["sh", "-c", command], {}, tmp_path / "log")
    await child.start()
    assert child.logged("cut") == {"event": "cut", "calls": 2}
    await child.end(5)
    await child.start()
    try:
        assert child.logged("cut") is None
        assert line in (tmp_path / "log").read_text()
    finally:
        await child.end(5)


def test_a_folder_with_too_long_a_path_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is in a folder of this user alone, and in the same one again; one that others may enter is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", ".")  # as short as can be: pytest's own folder may be nearly too long
    folder = tmp_path / ("x" * LONGEST_SOCKET_PATH)
    found = place_of_socket(folder)
    assert len(str(found)) <= LONGEST_SOCKET_PATH
    assert found.parent.stat().st_mode & 0o777 == 0o700
    assert place_of_socket(folder) == found != place_of_socket(folder / "y")
    found.parent.chmod(0o755)
    with pytest.raises(
        FailedPrecondition, match=r"run_dir: .* is too long for a Unix socket, and .* is another user's"
    ):
        RedisChild(folder, tmp_path / "log", 0, batch=False)
    room = LONGEST_SOCKET_PATH - len("/tmp//socket")
    for size, within in ((room, True), (room + 1, False)):
        assert (place_of_socket(Path("/tmp", "x" * size)).parent == Path("/tmp", "x" * size)) == within
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(FailedPrecondition, match=r"is too long for a Unix socket, and so is .*, by TMPDIR"):
        place_of_socket(folder)
