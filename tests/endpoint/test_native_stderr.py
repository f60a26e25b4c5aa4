"""What a library in Rust prints when it panics never reaches the log: it may quote a prompt."""

import os
import subprocess
import sys
import threading

import pytest
from tokenizers import decoders

from orca_common.errors import Internal
from orca_endpoint.text.native_stderr import Descriptor
from orca_endpoint.text.tokenizer_file import panics

# Python's own lines still come while the library works, as logs of other threads do.
PROCESS = """
import sys
from tokenizers import decoders
from orca_common.errors import Internal
from orca_endpoint.text.native_stderr import keep_python_writing
from orca_endpoint.text.tokenizer_file import panics

keep_python_writing()
try:
    with panics("decode tokens"):
        print("a log line", file=sys.stderr)
        decoders.Strip("t", 0, 5).decode(["t"])
except Internal as error:
    print(error, file=sys.stderr)
"""


def test_a_panic_says_nothing_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    """What others write afterwards comes out."""
    with pytest.raises(Internal), panics("decode tokens"):
        decoders.Strip("t", 0, 5).decode(["t"])
    os.write(2, b"what another library says\n")
    assert capfd.readouterr().err == "what another library says\n"


def test_python_itself_goes_on_writing() -> None:
    ended = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.splitlines() == [
        "a log line",
        "the tokenizer library failed to decode tokens (PanicException)",
    ]


def test_the_last_thread_opens_it_again() -> None:
    reading, writing = os.pipe()
    descriptor, inside, may_end = Descriptor(writing), threading.Event(), threading.Event()

    def work() -> None:
        with descriptor.closed():
            inside.set()
            may_end.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    with descriptor.closed():
        os.write(writing, b"lost")
    os.write(writing, b"lost, too: the other thread is inside")
    may_end.set()
    thread.join()
    os.write(writing, b"kept")
    assert os.read(reading, 100) == b"kept"
    os.close(reading)
    os.close(writing)


def test_it_needs_no_descriptor() -> None:
    """A process at its limit still tokenizes."""
    descriptor = Descriptor(2)
    before = os.listdir("/proc/self/fd")
    with descriptor.closed():
        assert os.listdir("/proc/self/fd") == before
