"""The table of the kill matrix: what is counted, and which pauses say something."""

import json
from pathlib import Path

from e2e.kill_table import Kill, Moment, read, table


def kill(role: str, name: str, pause: float, late: float = 0.0) -> Kill:
    return Kill(1, 1, 1, 2, role, name, Moment.QUEUED, pause, late, 5.0)


KILLS = [kill("redis", "redis", 0.5), kill("redis", "redis", 1.5), kill("redis", "redis", 21.0, late=20.0)]


def test_a_pause_in_which_the_program_itself_stood_still_is_counted_and_not_told() -> None:
    lines = table([*KILLS, kill("rank", "rank-1.0", 2.0)]).splitlines()
    assert lines[2] == "| rank-1.0 of tp 1 x pp 2 | 1 x, 2.0 s (2.0) | 0 x | 0 x | 0 x | 0 x |"
    assert lines[3] == "| redis | 3 x, 1.0 s (1.5) | 0 x | 0 x | 0 x | 0 x |"
    assert "4 kills, no stream harmed. In 1 of them" in lines[5]


def test_a_record_is_read_again(tmp_path: Path) -> None:
    record = tmp_path / "kills.jsonl"
    record.write_text("".join(json.dumps(one._asdict()) + "\n" for one in KILLS))
    assert read([record]) == KILLS
