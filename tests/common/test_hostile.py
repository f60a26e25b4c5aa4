"""A checkpoint that a stranger wrote gets a sentence, or is read: never a traceback, a hang or a full memory."""

import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from checkpoints import make_gpt2
from common.hostile import Case, cases, read_all

from orca_common.errors import FailedPrecondition, Internal

SECONDS = 5  # of CPU time, for a case
MEMORY = 2 << 30  # bytes of address space beyond what the process has
CASES = dict(cases())


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "good"
    return make_gpt2(folder, heads=2, layers=1, hidden=16, vocab=256, positions=32, seed=1, tokenizer=True)


@contextmanager
def bounded() -> Iterator[None]:
    """Ends what takes more CPU time or memory than a checkpoint may."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it took more than {SECONDS} s of CPU time")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGVTALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_there_are_many_cases() -> None:
    assert len(CASES) >= 124


def test_the_good_one_is_good(good: Path) -> None:
    with bounded():
        read_all(good)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_hostile_checkpoint(good: Path, tmp_path: Path, case: Case) -> None:
    """What only looks wrong is read. What is refused gets one line, which repeats little of what it was given."""
    folder = shutil.copytree(good, tmp_path / "model")
    case(folder)
    sentence = ""
    try:
        with bounded():
            read_all(folder)
    except (FailedPrecondition, Internal) as error:
        sentence = str(error)
    assert "\n" not in sentence
    assert len(sentence) < 800


@pytest.mark.parametrize("name", ["a" * 5000, "\0", "/dev/null", "loop/../loop"])
def test_a_name_that_is_no_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FailedPrecondition):
        read_all(Path(name))
