"""Each process of a stack gets its share of the machine, and no secret that it has no use for."""

import os
from pathlib import Path

import pytest

from orca_common.api_keys import line_of, new_key
from orca_local.settings import ServeSettings
from orca_local.stack import Stack
from orca_worker import machine


def stack_of(folder: Path, **settings: object) -> Stack:
    return Stack(ServeSettings.load(port=0, http_port=0, **settings), folder, print)


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        ({}, 16),
        ({"engines": 2}, 8),
        ({"tp": 2, "pp": 2}, 4),
        ({"tp": 2, "pp": 2, "engines": 2}, 2),
        ({"engines": 40}, 1),
        ({"engines": 2, "threads": 0}, 0),
    ],
    ids=str,
)
def test_ranks_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], threads: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert stack_of(tmp_path, **settings)._threads() == threads


@pytest.mark.parametrize(
    ("settings", "run_ahead"),
    [
        ({"device": "cpu"}, 0),
        ({"device": "cuda"}, 1),
        ({"device": "cuda", "run_ahead": 0}, 0),
        ({"device": "cpu", "kernels": "device-loop"}, 1),
        ({"device": "cpu", "run_ahead": 1}, 1),
    ],
    ids=str,
)
def test_the_host_runs_ahead_of_a_gpu(tmp_path: Path, settings: dict[str, object], run_ahead: int) -> None:
    assert stack_of(tmp_path, **settings)._run_ahead() == run_ahead


@pytest.mark.parametrize(
    ("flags", "settings", "batch"),
    [
        ("fpu avx2 avx512f avx512_bf16 amx_tile", {}, 32),
        ("fpu avx512f amx_bf16", {}, 32),
        ("fpu avx2 avx512f avx512_vnni", {}, 8),
        ("fpu avx2", {"device": "cuda"}, 32),
        ("fpu avx2", {"max_batch_size": 5}, 5),
    ],
    ids=str,
)
def test_a_batch_suits_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, settings: dict[str, object], batch: int
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n")
    monkeypatch.setattr(machine, "CPUINFO", cpuinfo)
    assert stack_of(tmp_path / "run", **({"device": "cpu"} | settings))._max_batch_size() == batch


async def test_secrets_go_to_those_that_need_them(tmp_path: Path) -> None:
    """Environments can be read by every user who may look at a process."""
    key = line_of("research", new_key())
    stack = stack_of(tmp_path, redis_url="redis://:pass-word@127.0.0.1:1/0", api_keys=key)
    known = {role: await stack._environment(role, f"{role}-0") for role in ("endpoint", "scheduler", "supervisor")}
    for variable, roles in (("ORCA_REDIS_URL", {"endpoint", "scheduler"}), ("ORCA_API_KEYS", {"endpoint"})):
        assert {role for role, environment in known.items() if variable in environment} == roles
    assert "pass-word" not in str(known["supervisor"])
