"""The side of a helper's process: it answers questions from standard input, each within bounds of time and memory.

Questions and answers are frames: a length (8 bytes, little-endian), and the bytes. Answers hold an object of JSON.
The first frame is the opening, whose answer says that the process is ready.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

Answer = dict[str, Any]


def answer_all(opened: Callable[[bytes], Callable[[bytes], Answer]], seconds: float, memory: int) -> None:
    """Answers until standard input ends. SIGPROF ends the process at a question that takes more.

    opened: takes the opening, and returns the function that answers. seconds: of CPU time for a question. memory: its
    bytes.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    came, goes = sys.stdin.buffer, sys.stdout.buffer
    opening = frame_from(came)
    if opening is None:
        return
    answer = opened(opening)
    tell(goes, {})
    while (question := frame_from(came)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        said = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        tell(goes, said)


def framed(content: bytes) -> bytes:
    """A frame."""
    return len(content).to_bytes(8, "little") + content


def frame_from(stream: BinaryIO) -> bytes | None:
    """The content of the next frame; None at the end of the stream."""
    head = stream.read(8)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 8 else None


def tell(stream: BinaryIO, answer: Answer) -> None:
    """Writes an answer."""
    stream.write(framed(json.dumps(answer).encode()))
    stream.flush()
