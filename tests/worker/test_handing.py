"""A request goes on at another rank with the keys and values that the first one has computed: the tokens are
transformers', and what comes damaged is found by its keys before anything runs on it."""

import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from checkpoints import make_gpt2
from reference import Reference
from worker.driver import make_stage

from orca.v1 import worker_pb2 as pb
from orca_common.block_keys import root_of
from orca_common.errors import FailedPrecondition
from orca_scheduler.ranks.members import increment, initiation, put_members
from orca_worker.data_plane import blocks
from orca_worker.data_plane.blocks import ANSWER, ASKED, BLOCK, REFUSED, SERVED, Asked, Block, BlockServer, receive
from orca_worker.stage.stage import Stage

VOCAB, BLOCK_SIZE, SLOTS, EPOCH = 97, 4, 256, 9
ROOT = bytes.fromhex(root_of("a tenant"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpt2(tmp_path_factory.mktemp("m"), heads=2, layers=2, hidden=16, vocab=VOCAB, positions=96, seed=5)


class Held(NamedTuple):
    """A request that the first rank has begun."""

    row: int
    claim: int
    prompt: list[int]
    token: int


@dataclass
class Pair:
    """Two ranks of engines of their own. `serve` is what the second one reaches; `ends` has what it has reported."""

    first: Stage
    second: Stage
    source: pb.BlockSource
    numbers: int = 0
    free: list[int] = field(default_factory=list[int])  # rows of the second rank that have ended
    ends: "queue.Queue[pb.Pulled]" = field(default_factory=queue.Queue)

    def begin(self, prompt: list[int], row: int) -> Held:
        """The first rank initiates a request in this row, which had another one before."""
        self.numbers += 1
        count = -(-(len(prompt) + 1) // BLOCK_SIZE)
        message = pb.Iteration(number=self.numbers, free_rows=[row])
        message.admissions.add(row=row, claim=self.numbers, token_ids=prompt, root=ROOT)
        put_members(message, [initiation(row, len(prompt), range(row * 12, row * 12 + count))])
        return Held(row, self.numbers, prompt, self.first.run(message).token_ids[0])

    def pull(self, held: Held, new: int) -> pb.Pulled:
        """The second rank pulls a request, which is to have `new` tokens. Returns when that has ended."""
        self.numbers += 1
        positions = len(held.prompt)
        handed = pb.Handed(epoch=EPOCH, claim=held.claim, row=held.row, positions=positions, sources=[self.source])
        admission = pb.Admission(
            row=3, claim=self.numbers, token_ids=[*held.prompt, held.token], generated=1, computed=positions, root=ROOT
        )
        taken = range(5, 5 + -(-(positions + new) // BLOCK_SIZE))
        pull = pb.Pull(admission=admission, blocks=taken, handed=handed)
        self.second.run(pb.Iteration(number=self.numbers, free_rows=self.free, pull=pull))
        self.free = [3]
        return self.ends.get(timeout=20)

    def go_on(self, held: Held, new: int) -> list[int]:
        """The request's tokens on the second rank, of which all iterations are increments."""
        made = [held.token]
        while len(made) < new:
            self.numbers += 1
            message = pb.Iteration(number=self.numbers)
            token = None if len(made) == 1 else made[-1]
            put_members(message, [increment(3, len(held.prompt) + len(made) - 1, token)])
            made += self.second.run(message).token_ids
        return made


def pair(folder: Path, kernels: str = "auto", serve: Callable[[Stage], pb.BlockSource] | None = None) -> Pair:
    first, second = (make_stage(folder, SLOTS, BLOCK_SIZE, kernels=kernels) for _ in range(2))
    both = Pair(first, second, (serve or served)(first))
    second.pulled = both.ends.put
    return both


def served(stage: Stage) -> pb.BlockSource:
    server = BlockServer("127.0.0.1", stage.blocks_of)
    return pb.BlockSource(address=f"127.0.0.1:{server.port}", secret=server.secret)


def prompts(draw: random.Random) -> Iterator[list[int]]:
    while True:
        yield [draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_tokens_and_bytes(folder: Path, kernels: str) -> None:
    """Prompts that end within a block and at its end: no position is computed twice, and whole blocks move."""
    both, reference = pair(folder, kernels), Reference(folder)
    block_bytes = 2 * 2 * 16 * 4 * BLOCK_SIZE  # keys and values, layers, hidden, float32
    for length in (1, 3, 4, 5, 8, 17, 40):
        prompt = [(5 * length + 3 * n) % VOCAB for n in range(length)]
        held = both.begin(prompt, length % 4)
        pulled = both.pull(held, 9)
        assert pulled.error == ""
        assert pulled.bytes == -(-length // BLOCK_SIZE) * block_bytes
        assert both.go_on(held, 9) == reference.greedy(prompt, 9)


@pytest.mark.long
def test_a_request_of_gpt2_124m(tmp_path: Path) -> None:
    """272 tokens in bfloat16 are 17 blocks of 16. Prints the transfer's time beside that of as many bytes alone."""
    model = make_gpt2(tmp_path / "m", heads=12, layers=12, hidden=768, vocab=31, positions=320, seed=1)
    first, second = (make_stage(model, 288, 16, dtype="bfloat16", kernels="torch") for _ in range(2))
    both = Pair(first, second, served(first))
    ended = list[float]()

    def pulled(end: pb.Pulled) -> None:
        ended.append(time.monotonic())
        both.ends.put(end)

    second.pulled = pulled
    both.numbers += 1
    message = pb.Iteration(number=1)
    message.admissions.add(row=1, claim=1, token_ids=[n % 31 for n in range(272)], root=ROOT)
    put_members(message, [initiation(1, 272, range(18))])
    held = Held(1, 1, list(message.admissions[0].token_ids), first.run(message).token_ids[0])
    admission = pb.Admission(row=3, claim=2, token_ids=[*held.prompt, held.token], generated=1, computed=272, root=ROOT)
    handed = pb.Handed(epoch=EPOCH, claim=1, row=1, positions=272, sources=[both.source])
    began = time.monotonic()
    second.run(pb.Iteration(number=2, pull=pb.Pull(admission=admission, blocks=range(18), handed=handed)))
    end = both.ends.get(timeout=30)
    assert end.error == ""
    assert end.bytes == 17 * 589_824
    print(f"{end.bytes / 1e6:.1f} MB in {ended[0] - began:.4f} s, its floor {floor(end.bytes):.4f} s")


def floor(size: int) -> float:
    """Seconds for this number of bytes over a loopback connection alone."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sending = socket.create_connection(listening.getsockname())
        receiving, _ = listening.accept()
        with sending, receiving:
            began = time.monotonic()
            threading.Thread(target=sending.sendall, args=[bytes(size)], daemon=True).start()
            receive(receiving, size, began + 30)
            return time.monotonic() - began


def test_what_is_not_there_is_refused(folder: Path) -> None:
    both = pair(folder)
    held = both.begin([5, 6, 7, 8, 9], 1)
    for wrong, why in (
        (held._replace(claim=77), "has not 5 positions of claim 77"),
        (held._replace(row=2), "row 2 has not 5 positions"),
        (held._replace(prompt=[5, 6, 7, 8]), "has not 4 positions"),
        (held._replace(prompt=[5, 6, 7, 1, 9]), "block 0 has the keys and values of other tokens"),
        (held._replace(prompt=[5, 6, 7, 8, 1]), "block 1 has the keys and values of other tokens"),
    ):
        assert why in both.pull(wrong, 3).error
    both.source.secret = bytes(16)
    assert "onnection" in both.pull(held, 3).error
    both.source.address = "127.0.0.1:1"
    assert "Connection" in both.pull(held, 3).error


def test_a_pull_that_does_not_fit_the_engine_is_reported(folder: Path) -> None:
    """The other engine has said it, so the rank goes on, and the row may not run."""
    both = pair(folder)
    held = both.begin([5, 6, 7, 8, 9], 1)
    handed = pb.Handed(epoch=EPOCH, claim=held.claim, row=1, positions=5, sources=[both.source] * 2)
    admission = pb.Admission(row=3, claim=9, token_ids=[*held.prompt, held.token], generated=1, computed=5, root=ROOT)
    for harm, why in (
        (pb.Handed(), "2 sources for an engine of 1 ranks"),
        (pb.Handed(positions=4), "4 positions of 6 tokens"),
    ):
        both.numbers += 1
        pull = pb.Pull(admission=admission, blocks=[5, 6], handed=handed)
        pull.handed.MergeFrom(harm)
        both.second.run(pb.Iteration(number=both.numbers, pull=pull))
        end = both.ends.get(timeout=20)
        assert (end.number, why in end.error) == (both.numbers, True), end
        with pytest.raises(FailedPrecondition, match="row 3"):
            both.go_on(held, 2)
    both.free = [3]
    assert both.pull(held, 3).error == ""
    assert len(both.go_on(held, 3)) == 3


def test_another_layout_is_refused(folder: Path) -> None:
    both = pair(folder)
    held = both.begin([5, 6, 7, 8, 9], 1)
    other = make_stage(folder, SLOTS, BLOCK_SIZE, kernels="torch")
    other.pulled = both.ends.put
    both.second = other
    assert "are no blocks of" in both.pull(held, 3).error


def test_a_row_does_not_run_before_its_blocks_are_there(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        both = pair(folder)
        both.source.address = f"127.0.0.1:{silent.getsockname()[1]}"
        held = Held(1, 1, [5, 6, 7, 8, 9], 3)
        threading.Thread(target=both.pull, args=[held, 3], daemon=True).start()
        connection, _ = silent.accept()
        with connection, pytest.raises(FailedPrecondition, match="row 3 runs, and its keys and values were not pulled"):
            both.go_on(held, 3)


def test_a_frozen_source_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "STALL", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        both = pair(folder)
        both.source.address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert "timed out" in both.pull(Held(1, 1, [5, 6, 7], 3), 3).error


@pytest.mark.parametrize(
    "said",
    [ANSWER.pack(REFUSED, 40) + b"x" * 40, ANSWER.pack(SERVED, 0) + BLOCK.pack(b"k" * 16, 4096, 1)],
    ids=["a refusal", "a header"],
)
def test_a_source_that_says_a_byte_now_and_then_is_given_up(
    folder: Path, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of the answer it is in."""
    monkeypatch.setattr(blocks, "LONGEST", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def serve() -> None:
            connection, _ = slow.accept()
            with connection, suppress(OSError):
                for byte in said:
                    connection.sendall(bytes([byte]))
                    if over.wait(0.1):
                        return

        serving = threading.Thread(target=serve)
        serving.start()
        both = pair(folder)
        both.source.address = f"127.0.0.1:{slow.getsockname()[1]}"
        assert "took too long" in both.pull(Held(1, 1, [5, 6, 7], 3), 3).error
        over.set()
        serving.join()


def test_a_greeting_takes_no_longer_than_all_of_its_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps no connection."""
    monkeypatch.setattr(blocks, "GREETING", 0.5)
    address = pair(folder).source.address.split(":")
    with socket.create_connection((address[0], int(address[1])), 10) as slow:
        slow.settimeout(0.1)
        for _ in range(ASKED.size - 1):
            try:
                slow.sendall(b"x")
                assert slow.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            return
    pytest.fail("it has still not ended")


def test_those_without_the_secret_take_no_places(folder: Path) -> None:
    both = pair(folder)
    held = both.begin([5, 6, 7, 8, 9], 1)
    host, port = both.source.address.split(":")
    with ExitStack() as silent:
        for _ in range(blocks.MOST):
            silent.enter_context(socket.create_connection((host, int(port))))
        assert both.pull(held, 3).error == ""


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError()])
def test_whatever_ends_a_pull_is_reported(folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler keeps row, slots and request until it knows."""

    def write(block: int, payload: bytes | bytearray) -> None:
        raise error

    both = pair(folder)
    held = both.begin([5, 6, 7, 8, 9], 1)
    monkeypatch.setattr(both.second._kv, "write", write)
    assert type(error).__name__ in both.pull(held, 3).error


def test_a_row_that_is_freed_gets_no_more_blocks(folder: Path) -> None:
    """Its blocks may be another row's: what comes late is not written."""
    read, go_on = threading.Event(), threading.Event()

    def held_up(stage: Stage) -> pb.BlockSource:
        def blocks_of(asked: Asked) -> Iterator[Block]:
            for block in stage.blocks_of(asked):
                read.set()
                go_on.wait()
                yield block

        server = BlockServer("127.0.0.1", blocks_of)
        return pb.BlockSource(address=f"127.0.0.1:{server.port}", secret=server.secret)

    both = pair(folder, serve=held_up)
    held = both.begin([5, 6, 7, 8, 9], 1)
    pulling = threading.Thread(target=lambda: both.ends.put(both.pull(held, 3)))
    pulling.start()
    read.wait()
    message = pb.Iteration(number=99, free_rows=[3])
    message.admissions.add(row=1, claim=99, token_ids=[1, 2], root=ROOT)
    put_members(message, [initiation(1, 2, [5, 6])])
    both.second.run(message)
    before = both.second._kv.read(5)
    go_on.set()
    pulling.join()
    assert "the row was freed meanwhile" in both.ends.get().error
    assert both.second._kv.read(5) == before


def test_a_row_that_changes_under_the_reader_is_not_served(folder: Path) -> None:
    """The first rank gives the row to another request between two blocks."""
    both = pair(folder)
    held = both.begin([5, 6, 7, 8, 9], 1)
    asked = Asked(EPOCH, 1, held.claim, 5, both.first._layout)
    served = both.first.blocks_of(asked)
    next(served)
    both.begin([7, 7, 7, 7, 7], 1)
    with pytest.raises(FailedPrecondition, match="row 1"):
        next(served)


class Faulty:
    """Serves genuine blocks, and does one kind of harm to them on their way."""

    def __init__(self, stage: Stage, draw: random.Random) -> None:
        self._stage, self._draw = stage, draw
        self.others: list[Asked] = []  # of other requests
        self.kind = ""
        self._listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        self.source = pb.BlockSource(address=f"127.0.0.1:{self._listening.getsockname()[1]}", secret=bytes(16))

    def _serve(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with connection:
                until = time.monotonic() + 30
                _, epoch, row, claim, positions, size = ASKED.unpack(receive(connection, ASKED.size, until))
                asked = Asked(epoch, row, claim, positions, receive(connection, size, until).decode())
                connection.sendall(ANSWER.pack(SERVED, 0) + self._harmed(asked))

    def _harmed(self, asked: Asked) -> bytes:
        draw, good = self._draw, self._framed(asked)
        n = draw.randrange(len(good))
        match self.kind:
            case "swapped":  # two blocks of one request
                m = draw.randrange(len(good))
                good[n], good[m] = good[m], good[n]
            case "swapped keys and values":  # under the right keys
                m, head = draw.randrange(len(good)), BLOCK.size
                good[n], good[m] = good[n][:head] + good[m][head:], good[m][:head] + good[n][head:]
            case "stale":  # what the blocks of another request have
                other = self._framed(draw.choice(self.others))
                good[n] = draw.choice(other)
            case "truncated":
                whole = b"".join(good)
                return whole[: draw.randrange(len(whole))]
            case "shorter":
                key, size, checksum = BLOCK.unpack(good[n][: BLOCK.size])
                good[n] = BLOCK.pack(key, size - 8, checksum) + good[n][BLOCK.size : -8]
            case "a bit":
                at, whole = draw.randrange(len(good[n])), bytearray(good[n])
                whole[at] ^= 1 << draw.randrange(8)
                good[n] = bytes(whole)
            case kind:
                raise AssertionError(kind)
        return b"".join(good)

    def _framed(self, asked: Asked) -> list[bytes]:
        frames = list[bytes]()
        for key, payload in self._stage.blocks_of(asked):
            checksum = blocks.crc32(payload, blocks.crc32(key))
            frames.append(BLOCK.pack(key, len(payload), checksum) + payload)
        return frames


KINDS = ("swapped", "swapped keys and values", "stale", "truncated", "shorter", "a bit")


@pytest.mark.parametrize("faults", [150, pytest.param(2000, marks=pytest.mark.long)])
def test_a_faulty_transfer_makes_no_wrong_token(folder: Path, faults: int) -> None:
    """A swapped, stale or truncated block is a verdict on the transfer, unless it is the right one after all."""
    draw = random.Random(faults)
    harm: list[Faulty] = []

    def serve(stage: Stage) -> pb.BlockSource:
        harm.append(Faulty(stage, draw))
        return harm[0].source

    both, reference = pair(folder, serve=serve), Reference(folder)
    texts, found, right = prompts(draw), 0, 0
    kept = [both.begin(next(texts), row) for row in range(4)]
    for n in range(faults):
        held = draw.choice(kept)
        harm[0].kind = KINDS[n % len(KINDS)]
        harm[0].others = [
            Asked(EPOCH, other.row, other.claim, len(other.prompt), both.first._layout)
            for other in kept
            if other != held
        ]
        if both.pull(held, 4).error:
            found += 1
        else:
            right += 1
            assert both.go_on(held, 4) == reference.greedy(held.prompt, 4), harm[0].kind
        if draw.random() < 0.1:
            row = draw.randrange(4)
            kept[row] = both.begin(next(texts), row)
    assert found > 0.8 * faults
    print(f"{found} faulty transfers were found, {right} brought what was wanted")
