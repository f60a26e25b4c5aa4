"""Which tokens may follow in the answers of requests that ask for a form, worked out beside the rank.

`follower` does the work, in a process for each form, while the layers run. A rank asks it, and waits for no more than
`WAIT` of an iteration: a request whose mask is not there then makes no token, and its last position runs again in the
next iteration. So what a form takes is its own requests' time.

Where an iteration verifies drafts, the masks behind them are asked for together with the first one. A draft that is
forbidden ends them, since the token made in its place is another one; and so does a mask that is not there in time.

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
from .follower import (
    ASK,
    BEHIND,
    LENGTH,
    MOST_DRAFTS,
    NO_MORE,
    NONE,
    SAID,
    SLOW,
    mask_bytes,
    place_of,
)

log = logging.getLogger(__name__)

WAIT = 0.005  # seconds of an iteration, behind its layers, for masks that are not there yet
PATIENCE = 60.0  # seconds for a mask, where the machine has no time for it
IDLE = 16  # processes that are kept for forms without answers: a form that comes again is compiled already


class Answer:
    """`rows.Constraint`: the answer of one request so far, against its form."""

    def __init__(self, form: "Form", slot: int, collect: Callable[[], None]) -> None:
        self.form, self.slot, self._collect = form, slot, collect
        self.tokens = np.zeros(0, np.int32)  # the mask that was asked for last follows them
        self.drafts = np.zeros(0, np.int32)  # masks behind these were asked for with it
        self.number = -1  # of that question
        self.drafted = False  # those masks have not come
        self.read = 0  # how many of them the form's process had before
        self.pending = False  # it has not answered
        self.fresh = False  # it was asked in this iteration
        self._begun = 0.0  # when, by time.monotonic()
        self._mask: np.ndarray | None = None
        self._behind: list[np.ndarray] = []  # of `drafts`, as many as the form allows
        self._same = 0  # of the drafts that are verified now, how many are those
        self._waits = self._void = False

    def begin(self, tokens: np.ndarray, drafts: np.ndarray) -> None:
        """Asks for the mask of the next token, and for those behind drafts, unless that was done.

        tokens: [n], the whole answer so far. drafts: [d], guesses for what follows.
        """
        self.fresh = not self._waits
        if self.fresh:
            self.tokens, self._mask, self._begun = tokens.astype(np.int32), None, time.monotonic()
            self.drafts, self._behind = drafts[:MOST_DRAFTS].astype(np.int32), []
            self._same = len(self.drafts)
            self.form.ask(self)
            return
        most = min(len(drafts), len(self.drafts))
        self._same = int(np.append(drafts[:most] == self.drafts[:most], False).argmin())
        # An iteration that was sent ahead goes on from a token that was not made.
        self._void = len(tokens) != len(self.tokens)
        if self.pending and time.monotonic() - self._begun > PATIENCE:
            self.end(f"no mask came within {PATIENCE:g} s")

    def allowed(self) -> np.ndarray | None:
        """The masks as `Constraint` has them, for the batch that was begun last."""
        self._collect()
        mask = None if self._void else self._mask
        self._waits, self._void = mask is None, False
        return mask

    def allowed_behind(self, drafts: int) -> np.ndarray | None:
        """The mask behind the first `drafts` drafts; None also where one of them is forbidden."""
        there = not self._waits and drafts <= min(len(self._behind), self._same)
        return self._behind[drafts - 1] if there else None

    def take_behind(self, masks: list[np.ndarray]) -> None:
        """Takes the masks behind drafts."""
        self.drafted, self._behind = False, masks

    def take(self, mask: np.ndarray) -> None:
        """The mask of the next token has come."""
        self.read, self.pending, self._mask = len(self.tokens), False, mask

    def end(self, why: str) -> None:
        """Notes that no token can follow."""
        log.warning("a form cannot be followed: its request ends", extra={"tokens": len(self.tokens), "why": why})
        self.take(np.zeros(self.form.size, np.uint8))


class Behind:
    """`rows.Constraint`: the answer, if its next tokens are these drafts."""

    def __init__(self, answer: Answer, drafts: int) -> None:
        self._answer, self._drafts = answer, drafts

    def allowed(self) -> np.ndarray | None:
        return self._answer.allowed_behind(self._drafts)


class Form:
    """A form that requests ask for, and the process that follows it, which is started when it is asked.

    fork: hands two descriptors to a new process. Raises BlockingIOError when that must be tried again.
    """

    def __init__(self, grammar: str, vocab_size: int, fork: Callable[[Sequence[int]], None]) -> None:
        self.size, self.slow = mask_bytes(vocab_size), False  # bytes of a mask
        self.drafting = True  # masks behind drafts have never taken long
        self.answers: weakref.WeakValueDictionary[int, Answer] = weakref.WeakValueDictionary()  # by slot
        self._grammar, self._fork = grammar.encode(), fork
        self._numbers = count()
        self._asked: dict[int, Answer] = {}  # questions that were not answered, the oldest first
        self._drafted: dict[int, Answer] = {}  # the same of their drafts
        self._unsent, self._unread = bytearray(), bytearray()
        self._connection: socket.socket | None = None
        self._masks: mmap.mmap | None = None

    def answer(self, collect: Callable[[], None]) -> Answer:
        """The answer of a request that begins here."""
        slot = next(slot for slot in count() if slot not in self.answers)
        self.answers[slot] = made = Answer(self, slot, collect)
        return made

    def ask(self, answer: Answer) -> None:
        """Asks for the mask that follows an answer's tokens, and those behind drafts, with the next `flush`."""
        answer.number, rest = next(self._numbers), answer.tokens[answer.read :]
        answer.pending, self._asked[answer.number] = True, answer
        drafts = answer.drafts if self.drafting and not self.slow else answer.drafts[:0]
        answer.drafted = len(drafts) > 0
        if answer.drafted:
            self._drafted[answer.number] = answer
        size = len(rest), len(drafts)
        self._unsent += ASK.pack(answer.number, answer.slot, answer.read, *size) + rest.tobytes() + drafts.tobytes()

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
            os.ftruncate(memory, place_of(0, MOST_DRAFTS + 1, self.size))
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
            if kind in (BEHIND, NO_MORE):
                at += SAID.size
                self._take_drafted(number, size)
                self.drafting = self.drafting and kind == BEHIND
                continue
            if len(self._unread) < at + SAID.size + size:
                break
            sentence = self._unread[at + SAID.size : at + SAID.size + size].decode()
            at += SAID.size + size
            answer = self._asked.pop(number)
            self.slow = kind == SLOW
            if kind == NONE:
                answer.end(sentence)
                self._take_drafted(number, 0)
            else:
                answer.take(self._mask(answer.slot))
        del self._unread[:at]

    def _take_drafted(self, number: int, count: int) -> None:
        answer = self._drafted.pop(number, None)
        if answer is not None and answer.number == number:  # otherwise its memory has those of a later question
            answer.take_behind([self._mask(answer.slot, n) for n in range(1, count + 1)])

    def _mask(self, slot: int, drafts: int = 0) -> np.ndarray:
        assert self._masks is not None
        return np.frombuffer(self._masks, np.uint8, self.size, place_of(slot, drafts, self.size)).copy()

    def _lost(self) -> None:
        """The process has ended: by a limit of time or memory, most likely, in the step that it was asked for first.

        The other answers begin again, in a new process. Where it was still at the drafts of an earlier question, all
        do, and have no more masks behind drafts.
        """
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        self._unsent.clear()
        self._unread.clear()
        for answer in self.answers.values():
            answer.read = 0
        asked, drafted = self._asked, self._drafted
        self._asked, self._drafted = {}, {}
        for answer in drafted.values():
            answer.take_behind([])
        if drafted.keys() - asked.keys():
            self.drafting = False
        elif asked:
            first = asked.pop(min(asked))
            first.end("a step has ended its process: it took too much time or memory")
        for answer in asked.values():
            self.ask(answer)
        if asked:
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
        formed = {n: one for n, one in batch.adjusted.items() if one.asked.grammar}
        constrained = {n: one for n, one in formed.items() if not n or of[n] != of[n - 1]}
        self._answers = [self._answer_of(one) for one in constrained.values()]
        for form in {answer.form for answer in self._answers}:
            form.collect()  # a process that has ended by now is asked nothing
        for answer, (n, one) in zip(self._answers, constrained.items(), strict=True):
            outputs = int(np.searchsorted(of, of[n], "right")) - n
            answer.begin(one.tokens[one.prompt : int(ends[n])], batch.token_ids[batch.out_at[n + 1 : n + outputs]])
            for drafts in range(1, outputs):
                formed[n + drafts].answer = Behind(answer, drafts)
        self._alone, self._collected = len(self._answers) == len(np.unique(of)), False
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
                for form in {answer.form for answer in self._answers if answer.drafted and not answer.pending}:
                    form.drafting = False  # the layers take less time than they do
                return
            for form in forms:
                form.flush()
                form.collect()

    def _awaited(self) -> set[Form]:
        """The forms that a batch waits for.

        Beside requests that have their tokens it does not wait for one that was late before.
        """
        pending = [answer for answer in self._answers if answer.pending]
        drafted = [answer for answer in self._answers if answer.drafted and answer.fresh and answer.form.drafting]
        if not self._alone or len(pending) < len(self._answers):
            pending = [answer for answer in pending if answer.fresh and not answer.form.slow]
        return {answer.form for answer in [*pending, *drafted]}

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
