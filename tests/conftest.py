"""Marks the slow tests, which `make check` leaves out: those of whole stacks and of processes that die and restart, and
files that compute for long.

Each process of a run takes a whole file at a time. Slow files wait for processes half of their time, and the others
compute: they take turns from the beginning to the end, so that the cores always have work. Of the slow ones the longest
come first, and so all processes end at about the same moment."""

import gc
import os
import shutil
import sys
import tempfile
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from orca_common.environment import VERBOSITY


def import_quiet_grpc() -> None:
    """C-core reads its level when it is imported, and would write its lines between the dots. The processes that tests
    start must be quiet by themselves: they do not inherit the level."""
    added = VERBOSITY.keys() - os.environ.keys()
    os.environ.update({name: VERBOSITY[name] for name in added})
    import grpc  # noqa: F401

    for name in added:
        del os.environ[name]


def files_in_memory() -> None:
    """Folders of tests lie in memory, where there is room: commits of their stacks wait for files of Redis, and a disk
    that others use stops at times. (A container may have 64 MiB there.)"""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def patient_examples() -> None:
    """Hypothesis fails an example that takes 0.2 s, and ten that take 1 s to draw. A busy machine stands still for as
    long at times."""
    with suppress(ModuleNotFoundError):  # a bare GPU machine has none, nor tests that use it
        from hypothesis import HealthCheck, settings

        more: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
        settings.register_profile("patient", settings.default, **more)
        settings.load_profile("patient")


import_quiet_grpc()
files_in_memory()
patient_examples()
gc.disable()  # until all tests are imported: there is no garbage in torch and transformers, only much to look through

ROOT = Path(__file__).parent
SLOW = [  # the longest first
    "kernels/test_triton_interpreted.py",
    "e2e/test_cli.py",
    "lab/test_live.py",
    "e2e/test_distributed.py",
    "pool/test_any_redis.py",
    "worker/test_supervisor.py",
    "e2e/test_adapters.py",
    "scheduler/test_takeover.py",
    "worker/test_families.py",
    "worker/test_garbage.py",
    "worker/test_coded.py",
    "worker/test_forms.py",
    "scheduler/test_discovered.py",
    "worker/test_encoder_decoder.py",
    "e2e/test_starting.py",
    "scheduler/test_losses.py",
    "scheduler/discovery/test_statefulset.py",
    "e2e/test_drafts.py",
    "e2e/test_metrics.py",
    "endpoint/test_forms.py",
    "docs/test_blocks.py",
    "endpoint/test_chat_renderer.py",
    "e2e/test_fork_servers.py",
    "kernels/test_triton_compiled.py",
    "bench/test_serve.py",
    "worker/test_batch_invariance.py",
    "e2e/test_jaeger.py",
    "scheduler/test_core_properties.py",
    "bench/test_commands.py",
    "e2e/test_full_disk.py",
    "worker/test_reformation.py",
    "e2e/test_probes.py",
    "e2e/test_prefix.py",
    "e2e/test_tokens.py",
    "e2e/test_structured.py",
    "e2e/test_traces.py",
    "e2e/test_kill.py",
    "worker/test_fake_cuda.py",
    "endpoint/test_chat.py",
    "e2e/test_rolling_restart.py",
    "e2e/test_bad_input.py",
    "bench/test_kernels.py",
    "e2e/test_other_weights.py",
    "pool/test_against_model.py",
    "e2e/test_trust.py",
    "e2e/test_iteration_level.py",
    "e2e/test_loglikelihood.py",
]


def pytest_configure() -> None:
    missing = [name for name in SLOW if not (ROOT / name).exists()]
    if missing:
        raise pytest.UsageError(f"tests/conftest.py lists slow files that are not there: {', '.join(missing)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {ROOT / name: place / len(SLOW) for place, name in enumerate(SLOW)}
    for item in items:
        if item.path in slow:
            item.add_marker(pytest.mark.slow)
    others = [path for path in dict.fromkeys(item.path for item in items) if path not in slow]
    turns = slow | {path: place / len(others) for place, path in enumerate(others)}
    items.sort(key=lambda item: turns[item.path])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


children: WeakSet[BaseSubprocessTransport] = WeakSet()  # those that asyncio has begun in this process
begin_child = BaseSubprocessTransport.__init__


def begin_and_keep(self: BaseSubprocessTransport, *args: Any, **kwargs: Any) -> None:
    children.add(self)
    begin_child(self, *args, **kwargs)


BaseSubprocessTransport.__init__ = begin_and_keep  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fails a test whose event loop has not seen the end of a child. Its warning would come in a later test, the one in
    which garbage is collected."""
    yield
    left = [child for child in children if not child.is_closing() and (loop := child._loop) and loop.is_closed()]
    children.difference_update(left)
    assert not left, "children of a loop that is closed"


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis for all tests of a process; each test takes a pool of its own."""
    from servers import redis_server

    with redis_server() as server:
        yield server.url


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder for gigabytes: those of `tmp_path` lie in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch computes with one thread: the tests are the parallel ones, and a second thread spins while it waits."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
