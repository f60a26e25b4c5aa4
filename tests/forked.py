"""`--processes 5`: tests run in processes that are forked when all tests are collected.

Importing torch and transformers and collecting takes ten seconds of processor time, which each process of pytest-xdist
takes for itself. These share it, and its memory. Each takes a whole file when it is free, so that what a file's tests
share is started once: files in the order of conftest.py.
"""

import os
import random
import signal
import traceback
from collections.abc import Iterator
from itertools import groupby, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from types import FrameType
from typing import Any, NoReturn

import pytest

from orca_worker.processes.process import die_with_parent

PLACE = 4  # bytes of a file's place in the queue
LAST = 30  # seconds for what a process's tests share to end, after the last one or Ctrl-C
OF_PARENT = ("terminalreporter", "terminalprogress")  # plugins that show what they are given


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="Run files of tests in this many forked processes.")


class Sender:
    """Sends what becomes of tests to the parent."""

    def __init__(self, config: pytest.Config, reports: Connection) -> None:
        self._hook = config.hook
        self._config = config
        self._reports = reports

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._reports.send(("logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        written = self._hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.send(("logreport", written))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._reports.send(("logfinish", {"nodeid": nodeid, "location": location}))


def run_files(session: pytest.Session, files: list[list[pytest.Item]], queue: int, reports: Connection) -> None:
    """Runs files of tests until the queue of their places is empty."""
    random.seed()
    interrupted = list[int]()

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        interrupted.append(number)
        raise KeyboardInterrupt  # a test may take it for its own

    signal.signal(signal.SIGINT, interrupt)  # a shell's background job ignores it
    plugins = session.config.pluginmanager
    for name in filter(plugins.has_plugin, OF_PARENT):
        plugins.unregister(name=name)
    plugins.register(Sender(session.config, reports))
    capture: Any = plugins.getplugin("capturemanager")  # the file that it captures to would be one of all processes
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    try:
        for place in iter(lambda: os.read(queue, PLACE), b""):
            items = files[int.from_bytes(place)]
            for item, following in pairwise([*items, session]):  # which is not torn down: another file may follow
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if interrupted:
                    raise KeyboardInterrupt
    finally:
        session._setupstate.teardown_exact(None)


def begin(session: pytest.Session, files: list[list[pytest.Item]], queue: int) -> tuple[int, Connection]:
    """Returns a process that runs files of tests, and the reports that it sends."""
    ours, its = Pipe(duplex=False)
    parent, pid = os.getpid(), os.fork()
    if pid:
        its.close()
        return pid, ours
    status = 1
    try:
        die_with_parent(parent)
        ours.close()
        run_files(session, files, queue, its)
        status = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def messages(connections: list[Connection]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The messages of processes, until all have ended."""
    while connections:
        for ready in wait(connections):
            assert isinstance(ready, Connection)
            try:
                yield ready.recv()
            except EOFError:
                ready.close()
                connections.remove(ready)


def follow(session: pytest.Session, connections: list[Connection]) -> None:
    """Passes on what processes send. A test fails whose process ended before it."""
    hook = session.config.hook
    left = {item.nodeid: item for item in session.items}
    for event, said in messages(connections):
        if event == "logreport":
            report = hook.pytest_report_from_serializable(config=session.config, data=said)
            hook.pytest_runtest_logreport(report=report)
        else:
            getattr(hook, f"pytest_runtest_{event}")(**said)
        if event == "logfinish":
            del left[said["nodeid"]]
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    for item in left.values():
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", "its process has ended", "call")
        hook.pytest_runtest_logreport(report=report)


def end_of(pid: int) -> int:
    """Waits for the end of a process, which is killed where it does not end. Returns its status."""
    ending = os.pidfd_open(pid)
    if not wait([ending], LAST):
        os.kill(pid, signal.SIGKILL)
    os.close(ending)
    return os.waitpid(pid, 0)[1]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests, where several processes shall; otherwise pytest does."""
    option = session.config.option
    files = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
    if option.collectonly or session.testsfailed or min(option.processes, len(files)) < 2:
        return None
    queue, places = os.pipe()
    os.write(places, b"".join(place.to_bytes(PLACE) for place in range(len(files))))
    os.close(places)
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.showfspath = False  # files take turns
        reporter.flush()
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one of all, which pytest ends
    processes = dict(begin(session, files, queue) for _ in range(option.processes))
    try:
        follow(session, [*processes.values()])
    finally:
        for pid, reports in processes.items():
            if not reports.closed:
                os.kill(pid, signal.SIGINT)
        ends = [end_of(pid) for pid in processes]
    if any(ends) and not session.testsfailed:  # as where what a session shares cannot be torn down
        raise session.Interrupted("a process of the tests has failed: see above")
    return True
