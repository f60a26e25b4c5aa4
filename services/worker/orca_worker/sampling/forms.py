"""Which tokens may follow in the answers of requests that ask for a form, worked out beside the rank.

`follower` does the work, in a process for each form, while the layers run. A rank asks it, and waits for no more than
`WAIT` of an iteration: a request whose mask is not there then makes no token, and its last position runs again in the
next iteration. So what a form takes is its own requests' time.

A mask depends on the request's form and on its committed tokens alone. So a request that starts again after a
recovery, as an initiation of both, goes on with the same masks, and so do the answers of a process that has ended. A
form that cannot be followed any further, or takes too much time, ends its request, never the iteration.
"""

import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np

from orca_common.checkpoint import Checkpoint

from ..iteration.batch import Batch
from ..iteration.rows import Adjusted
from .follower import ASK, LENGTH, NONE, SAID, SLOW, mask_bytes

log = logging.getLogger(__name__)

WAIT = 0.005  # seconds of an iteration, behind its layers, for masks that are not there yet
PATIENCE = 60.0  # seconds for a mask, where the machine has no time for it
IDLE = 16  # processes that are kept for forms without answers: a form that comes again is compiled already
SLOTS = 1 << 16  # answers of one form at a time. Its memory takes room where masks are written


class Answer:
    """`rows.Constraint`: the answer of one request so far, against its form."""

    def __init__(self, form: "Form", slot: int, collect: Callable[[], None]) -> None:
        self.form, self.slot, self._collect = form, slot, collect
        self.tokens = np.zeros(0, np.int32)  # the mask that was asked for last follows them
        self.read = 0  # how many of them the form's process had before
        self.pending = False  # it has not answered
        self.fresh = False  # it was asked in this iteration
        self._begun = 0.0  # when, by time.monotonic()
        self._mask: np.ndarray | None = None
        self._waits = self._void = False

    def begin(self, tokens: np.ndarray) -> None:
        """Asks for the mask of the next token, unless that was done. tokens: [n], the whole answer so far."""
        self.fresh = not self._waits
        if self.fresh:
            self.tokens, self._mask, self._begun = tokens.astype(np.int32), None, time.monotonic()
            self.form.ask(self)
            return
        # An iteration that was sent ahead goes on from a token that was not made.
        self._void = len(tokens) != len(self.tokens)
        if self.pending and time.monotonic() - self._begun > PATIENCE:
            self.end(f"no mask came within {PATIENCE:g} s")

    def allowed(self) -> np.ndarray | None:
        """As of `Constraint`, for the batch that was begun last."""
        self._collect()
        mask = None if self._void else self._mask
        self._waits, self._void = mask is None, False
        return mask

    def take(self, mask: np.ndarray) -> None:
        """The mask of the next token, [V] bool, has come."""
        self.read, self.pending, self._mask = len(self.tokens), False, mask

    def end(self, why: str) -> None:
        """No token can follow."""
        log.warning("a form cannot be followed: its request ends", extra={"tokens": len(self.tokens), "why": why})
        self.take(np.zeros(self.form.vocab_size, bool))


class Form:
    """A form that requests ask for, and the process that follows it, which is started when it is asked.

    fork: hands two descriptors to a new process. Raises BlockingIOError when that must be tried again.
    """

    def __init__(self, grammar: str, vocab_size: int, fork: Callable[[Sequence[int]], None]) -> None:
        self.vocab_size, self.slow = vocab_size, False
        self.answers: weakref.WeakValueDictionary[int, Answer] = weakref.WeakValueDictionary()  # by slot
        self._grammar, self._fork, self._size = grammar.encode(), fork, mask_bytes(vocab_size)
        self._numbers = count()
        self._asked: dict[int, Answer] = {}  # questions that were not answered, the oldest first
        self._unsent, self._unread = bytearray(), bytearray()
        self._connection: socket.socket | None = None
        self._masks: mmap.mmap | None = None

    def answer(self, collect: Callable[[], None]) -> Answer:
        """The answer of a request that begins here."""
        slot = next(slot for slot in count() if slot not in self.answers)
        self.answers[slot] = made = Answer(self, slot, collect)
        return made

    def ask(self, answer: Answer) -> None:
        """Asks for the mask that follows an answer's tokens, with the next `flush`."""
        number, rest = next(self._numbers), answer.tokens[answer.read :]
        answer.pending, self._asked[number] = True, answer
        self._unsent += ASK.pack(number, answer.slot, answer.read, len(rest)) + rest.tobytes()

    def flush(self) -> None:
        """Sends what can be sent without waiting."""
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # the latter show where it is read
            if self._connection is None:
                self._open()
            elif self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]

    def collect(self) -> None:
        """Takes in what the process has answered."""
        if self._connection is None:
            return
        try:
            while part := self._connection.recv(1 << 16):
                self._unread += part
        except BlockingIOError:
            self._read()
        except ConnectionResetError:
            self._lost()
        else:
            self._read()
            self._lost()

    def register(self, poll: select.poll) -> None:
        """Has `poll` return when `flush` or `collect` has something to do."""
        if self._connection is not None:
            poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("orca-masks")
        try:
            os.ftruncate(memory, SLOTS * self._size)
            self._fork((theirs.fileno(), memory))
            self._masks = mmap.mmap(memory, 0)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory)
        ours.setblocking(False)
        weakref.finalize(self, ours.close)  # the process ends with it
        self._connection, self.slow = ours, False
        self._unsent[:0] = LENGTH.pack(len(self._grammar)) + self._grammar
        self.flush()

    def _read(self) -> None:
        """Takes in the answers that have come whole."""
        at = 0
        while len(self._unread) >= at + SAID.size:
            number, kind, size = SAID.unpack_from(self._unread, at)
            if len(self._unread) < at + SAID.size + size:
                break
            sentence = self._unread[at + SAID.size : at + SAID.size + size].decode()
            at += SAID.size + size
            answer = self._asked.pop(number)
            self.slow = kind == SLOW
            if kind == NONE:
                answer.end(sentence)
            else:
                answer.take(self._mask(answer.slot))
        del self._unread[:at]

    def _mask(self, slot: int) -> np.ndarray:
        assert self._masks is not None
        bits = np.frombuffer(self._masks, np.uint8, self._size, slot * self._size)
        return np.unpackbits(bits, count=self.vocab_size, bitorder="little").view(bool)

    def _lost(self) -> None:
        """The process has ended: by a limit of time or memory, most likely, in the step that it was asked for first.

        The other answers begin again, in a new process.
        """
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        self._unsent.clear()
        self._unread.clear()
        for answer in self.answers.values():
            answer.read = 0
        asked = [*self._asked.values()]
        self._asked.clear()
        for answer in asked[:1]:
            answer.end("a step has ended its process: it took too much time or memory")
        for answer in asked[1:]:
            self.ask(answer)
        if asked[1:]:
            self.flush()


class Masks:
    """The masks of this rank's requests."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder, self._vocab_size = checkpoint.folder, checkpoint.vocab_size
        self._forms: OrderedDict[str, Form] = OrderedDict()  # by grammar, the one that was asked for last at the end
        self._forks: Forks | None = None
        self._answers: list[Answer] = []  # of the batch
        self._alone = self._collected = True

    def begin(self, batch: Batch) -> None:
        """Starts on the masks of a batch's next tokens."""
        ends, of = batch.out_ends, batch.out_member
        constrained = {
            n: one for n, one in batch.adjusted.items() if one.asked.grammar and (not n or of[n] != of[n - 1])
        }
        self._answers = [self._answer_of(one) for one in constrained.values()]
        for form in {answer.form for answer in self._answers}:
            form.collect()  # a process that has ended by now is asked nothing
        for answer, (n, one) in zip(self._answers, constrained.items(), strict=True):
            answer.begin(one.tokens[one.prompt : int(ends[n])])
        self._alone, self._collected = len(self._answers) == len(batch.out_at), False
        for form in {answer.form for answer in self._answers if answer.pending}:
            form.flush()

    def _collect(self) -> None:
        """Takes in the masks that are there, and waits `WAIT` for others, once a batch."""
        if self._collected:
            return
        self._collected = True
        end = time.monotonic() + WAIT
        for form in {answer.form for answer in self._answers if answer.pending}:
            form.collect()
        while forms := self._awaited():
            poll = select.poll()
            for form in forms:
                form.register(poll)
            if not poll.poll(max(0.0, 1000 * (end - time.monotonic()))):
                return
            for form in forms:
                form.flush()
                form.collect()

    def _awaited(self) -> set[Form]:
        """The forms that a batch waits for.

        Beside requests that have their tokens it does not wait for one that was late before.
        """
        pending = [answer for answer in self._answers if answer.pending]
        if not self._alone or len(pending) < len(self._answers):
            pending = [answer for answer in pending if answer.fresh and not answer.form.slow]
        return {answer.form for answer in pending}

    def _answer_of(self, one: Adjusted) -> Answer:
        if not isinstance(one.answer, Answer):
            one.answer = self._form(one.asked.grammar).answer(self._collect)
        return one.answer

    def _form(self, grammar: str) -> Form:
        form = self._forms.get(grammar)
        if form is None:
            if self._forks is None:
                self._forks = Forks(self._folder)
            form = self._forms[grammar] = Form(grammar, self._vocab_size, self._forks.fork)
            idle = [grammar for grammar, form in self._forms.items() if not form.answers]
            for other in idle[: -1 - IDLE]:
                del self._forms[other]
        self._forms.move_to_end(grammar)
        return form


class Forks:
    """The process that forks those of the forms. It is started again where it has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start()

    def fork(self, descriptors: Sequence[int]) -> None:
        """Has a process begin with these. Raises BlockingIOError when many are begun already."""
        try:
            socket.send_fds(self._control, [b"."], descriptors)
        except BrokenPipeError:
            log.error("the process that follows forms has ended", extra={"status": self._process.wait()})
            self._end()
            self._start()
            socket.send_fds(self._control, [b"."], descriptors)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.follower", str(self._folder)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic's message may quote the form
            )
        self._end = weakref.finalize(self, end, self._control, self._process)


def end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Ends the process that forks others, which end with their sockets."""
    control.close()
    process.kill()
    process.wait()
