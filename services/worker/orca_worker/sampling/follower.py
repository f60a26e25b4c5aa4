"""Follows forms in processes beside the rank that samples: `python -m orca_worker.sampling.follower FOLDER`.

A stranger's grammar may make the library run for minutes, hold Python's lock meanwhile, or take gigabytes. So no rank
calls it. This process reads the tokenizer, and forks one process for each form. Such a process follows
the answers of its form alone and has little time for each step. It may die: `forms.Form` then starts another one.

Standard input is a socket. A byte on it brings two descriptors for a new process: its socket, and the memory of its
masks. There it reads the form (`LENGTH` and the grammar), then questions, and answers each in turn. A question is
`ASK`, tokens and drafts, int32 each; an answer is `SAID` and a sentence, or a mask in a slot of the memory. To a
question with drafts there is a second answer: how many drafts the form allows, one after the other, and the masks
behind them, each in an area of its own of the memory.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import socket
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from orca_common.checkpoint import read_checkpoint
from orca_common.forms import FormError, Forms, check, panics

from ..processes.process import name_process

if TYPE_CHECKING:
    from llguidance import LLMatcher

LENGTH = Struct("<I")  # bytes of the grammar
# Number of the question, slot of the answer, tokens that the matcher has, tokens that follow, drafts behind those.
ASK = Struct("<QIIII")
SAID = Struct("<QBI")  # number of the question, one of the next, bytes of a sentence or number of drafts
QUICK, SLOW, NONE = range(3)  # a mask; the same, of a form that has taken long; no token can follow
BEHIND, NO_MORE = 3, 4  # masks behind drafts; the same, and drafts of this form are too much work from now on

COMPILE_SECONDS = 1.0  # of processor time, twice as long as the endpoint has given it
STEP_SECONDS = 0.5  # for one step: taking a token, and the mask behind it
REQUEST_SECONDS = 2.0  # for an answer, and
TOKEN_SECONDS = 0.005  # for each of its tokens
QUICK_SECONDS = 0.005  # a form that once took longer for a step has the processor only where nothing else wants it
DRAFTS_SECONDS = 0.005  # a form whose drafts once took longer has no masks for them any more
BYTES = 1 << 30  # of memory of one process
SLOTS = 1 << 16  # answers of one form at a time. Its memory takes room where masks are written
MOST_DRAFTS = 8  # of one question: behind more of them no token is made
LAST = 19  # of the values of nice


def mask_bytes(vocab_size: int) -> int:
    """The size of a slot."""
    return -(-vocab_size // 8)


def place_of(slot: int, drafts: int, size: int) -> int:
    """The place of an answer's mask behind this number of drafts. size: of a mask."""
    return (drafts * SLOTS + slot) * size


class Question(NamedTuple):
    """Asks for the mask behind `tokens`, which follow the first `read` ones, and for those behind drafts."""

    number: int
    slot: int
    read: int
    tokens: list[int]
    drafts: list[int]


@dataclass
class Followed:
    """An answer: its matcher, and the processor time that it may still take, in seconds."""

    matcher: LLMatcher
    left: float = REQUEST_SECONDS


class Follower:
    """Follows one form. Where a step takes too much processor time, SIGPROF ends the process."""

    def __init__(self, forms: Forms, grammar: str) -> None:
        self._forms, self._grammar = forms, grammar
        self._beginning: LLMatcher | None = None
        self._answers: dict[int, Followed] = {}  # by slot
        self.slow = False
        self.drafting = True  # drafts have never taken long

    def mask(self, slot: int, read: int, tokens: list[int]) -> bytes:
        """The mask that follows `tokens`. read: how many tokens of the answer came before; 0: it begins.

        Raises FormError when it cannot be followed.
        """
        with panics("follow the form"):
            if not read:
                self._answers[slot] = Followed(self._compiled().deep_copy())
            one, steps = self._answers[slot], len(tokens) + 1
            one.left += TOKEN_SECONDS * len(tokens)
            if one.left <= 0:
                raise FormError(
                    f"it takes more than {REQUEST_SECONDS:g} s and {TOKEN_SECONDS:g} s a token of processor time"
                )
            signal.setitimer(signal.ITIMER_PROF, min(STEP_SECONDS * steps, one.left))
            began = time.process_time()
            if not one.matcher.is_stopped():  # otherwise the answer has ended, and an iteration was sent ahead
                one.matcher.consume_tokens(tokens)
            bits = one.matcher.compute_bitmask()
            took = time.process_time() - began
            check(one.matcher)
            one.left -= took
            if took > QUICK_SECONDS * steps and not self.slow:
                self.slow = True
                os.nice(LAST)
        return bits

    def masks_after(self, slot: int, drafts: list[int]) -> list[bytes]:
        """The masks behind drafts, each of which follows those before it, up to the first that the form forbids.

        They are followed by a copy of its matcher, and not by the answer itself: it has none of their work and errors.
        """
        masks = list[bytes]()
        signal.setitimer(signal.ITIMER_PROF, STEP_SECONDS)
        began = time.process_time()
        with suppress(FormError), panics("follow drafts"):
            matcher = self._answers[slot].matcher.deep_copy()
            for draft in drafts:
                if matcher.is_stopped() or matcher.try_consume_tokens([draft]) != 1:
                    break
                mask = matcher.compute_bitmask()
                check(matcher)
                masks.append(mask)
        self.drafting = time.process_time() - began <= DRAFTS_SECONDS
        return masks

    def _compiled(self) -> LLMatcher:
        if self._beginning is None:
            signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
            self._beginning = self._forms.matcher(self._grammar)
        return self._beginning


def main(folder: str) -> None:
    """Forks processes until standard input ends."""
    name_process("orca-forms")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their sockets show that they have ended
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Waking it interrupts nothing: a rank's question takes 13 us, not 400 where both run on one processor.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    checkpoint = read_checkpoint(folder)
    forms = Forms(checkpoint)
    with suppress(FormError):  # each form will say so
        forms.open()
    gc.collect()
    gc.freeze()  # so that a collection copies no pages
    control = socket.socket(fileno=0)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not descriptors:
            return
        if not os.fork():
            control.close()
            follow(socket.socket(fileno=descriptors[0]), descriptors[1], mask_bytes(checkpoint.vocab_size), forms)
            # Many end with their rank, whose successor wants the cores. Beside a load of 18 twelve of them took 1.9 to
            # 3.7 s to take their interpreters apart, and end in 0.1 s without that.
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def follow(connection: socket.socket, memory: int, size: int, forms: Forms) -> None:
    """Answers questions about one form until its socket ends. size: bytes of a mask."""
    masks, unread = mmap.mmap(memory, 0), bytearray()
    follower: Follower | None = None
    with connection, suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            unread += part
            if follower is None:
                follower = _begun(forms, unread)
            if follower is None:
                continue
            said, drafted = b"", list[Question]()
            for question in _questions(unread):
                number, slot, read, tokens, drafts = question
                try:
                    at = place_of(slot, 0, size)
                    masks[at : at + size] = follower.mask(slot, read, tokens)[:size]
                    said += SAID.pack(number, SLOW if follower.slow else QUICK, 0)
                    if drafts:
                        drafted.append(question)
                except FormError as error:
                    why = str(error).encode()
                    said += SAID.pack(number, NONE, len(why)) + why
                if follower.slow:
                    connection.sendall(said)
                    said = b""
            connection.sendall(said)
            for question in drafted:
                behind = follower.masks_after(question.slot, question.drafts) if follower.drafting else []
                for n, mask in enumerate(behind, 1):
                    at = place_of(question.slot, n, size)
                    masks[at : at + size] = mask[:size]
                connection.sendall(SAID.pack(question.number, BEHIND if follower.drafting else NO_MORE, len(behind)))


def _begun(forms: Forms, unread: bytearray) -> Follower | None:
    """Takes the form from the beginning of what has come, once it is whole."""
    if len(unread) < LENGTH.size or len(unread) < LENGTH.size + (size := LENGTH.unpack_from(unread)[0]):
        return None
    grammar = unread[LENGTH.size : LENGTH.size + size].decode()
    del unread[: LENGTH.size + size]
    return Follower(forms, grammar)


def _questions(unread: bytearray) -> Iterator[Question]:
    """Takes the whole questions from what has come."""
    while len(unread) >= ASK.size:
        number, slot, read, count, drafts = ASK.unpack_from(unread)
        end = ASK.size + 4 * (count + drafts)
        if len(unread) < end:
            return
        tokens = array("i", bytes(unread[ASK.size : end])).tolist()
        del unread[:end]
        yield Question(number, slot, read, tokens[:count], tokens[count:])


if __name__ == "__main__":
    main(sys.argv[1])
