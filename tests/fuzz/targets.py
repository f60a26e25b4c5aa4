"""The parsers that take bytes from outside. Each takes any bytes; what it may raise is an OrcaError with a sentence."""

import asyncio
import json
import resource
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from zlib import crc32

from fuzz.doors import Door
from google.protobuf.message import DecodeError, Message

from orca.v1 import orca_pb2 as pb
from orca.v1 import worker_pb2 as pb_worker
from orca.v1.pool_pb2 import PoolRequest
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.checkpoint import Checkpoint, quantization, read_checkpoint
from orca_common.errors import FailedPrecondition, Internal, OrcaError
from orca_common.gguf.folder import made
from orca_common.gguf.header import gguf_header
from orca_common.lanes.connection import Connection
from orca_common.lanes.server import LaneCall
from orca_common.telemetry import Telemetry
from orca_common.tls import Plaintext
from orca_endpoint.anthropic.request import parse as parse_message
from orca_endpoint.ollama.request import parse_chat as parse_ollama_chat
from orca_endpoint.ollama.request import parse_generate
from orca_endpoint.openai.chat.request import parse as parse_chat
from orca_endpoint.openai.completions.request import parse
from orca_endpoint.openai.content import Placed
from orca_endpoint.openai.request import Asked
from orca_endpoint.openai.responses.request import Input, asked
from orca_endpoint.openai.responses.request import parse as parse_response
from orca_endpoint.requests.chats import Chats
from orca_endpoint.requests.defaults import not_followed, read_defaults
from orca_endpoint.requests.forms import FormCompiler
from orca_endpoint.requests.threads import Threads
from orca_endpoint.requests.validation import Validator
from orca_endpoint.settings import EndpointSettings
from orca_endpoint.text.chat_template import CannotRender, read_chat_template
from orca_endpoint.text.vocabulary import Vocabulary
from orca_pool.records import Claimed
from orca_scheduler.core.core import Member
from orca_scheduler.lifecycle.events import Entry, Opened, PodSeen
from orca_scheduler.lifecycle.lifecycle import Lifecycle
from orca_scheduler.lifecycle.places import Shape
from orca_scheduler.master.output import Held
from orca_scheduler.master.reports import first_tokens, made_of, problem_of
from orca_scheduler.ranks.answers import problem_of_hello, problem_of_table
from orca_scheduler.ranks.rank import Listener, Rank, hello_of
from orca_worker.data_plane.blocks import ANSWER, ASKED, BLOCK, SECRET, SERVED, Block, BlockServer, pull
from orca_worker.data_plane.blocks import Asked as AskedBlocks
from orca_worker.data_plane.rendezvous import Rendezvous
from orca_worker.iteration.model import Compute
from orca_worker.models.families import check_partition, family_of
from orca_worker.models.gpt2.configuration import GPT2Config
from orca_worker.partition import SINGLE, Types
from orca_worker.pod.supervisor import Supervisor
from orca_worker.rank.controller import Controller
from orca_worker.rank.lane import Lane, hearer
from orca_worker.settings import SupervisorSettings
from orca_worker.stage.stage import Stage

if TYPE_CHECKING:
    from orca_worker.processes.forks import Forks

M = TypeVar("M", pb_worker.HelloResponse, pb_worker.RankTable)
Target = Callable[[bytes], None]
CORPUS = Path(__file__).parent / "corpus"
VOCABULARY = 256  # of the engine whose reports are read
TEXT = "some text, grüße 😀"


def corpus(name: str) -> list[bytes]:
    """The inputs that a target begins with."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


@contextmanager
def targets(folder: Path, runner: asyncio.Runner) -> Iterator[dict[str, Target]]:
    """By name; each has a folder of this name in the corpus. folder: an empty one, for the files that they parse. At
    the end the processes end that they have begun."""
    (validator, settings), http = _endpoint(folder / "doors"), Door(folder / "http", runner)
    yield {
        "config": _config(folder / "config"),
        "generation-config": _generation_config(folder / "generation"),
        "tokenizer": _tokenizer(folder / "tokenizer"),
        "safetensors": _safetensors(folder / "safetensors"),
        "index": _index(folder / "index"),
        "gguf": _gguf(folder / "gguf"),
        "quantized": _quantized(folder / "quantized"),
        "generate": _message(validator, pb.GenerateRequest, lambda check, request: runner.run(check.generate(request))),
        "resume": _message(validator, pb.ResumeRequest, lambda check, request: check.resume(request)),
        "cancel": _message(validator, pb.CancelRequest, lambda check, request: check.cancel(request)),
        "completions": _completions(validator, settings, runner),
        "chats": _conversations(validator, runner, lambda raw: parse_chat(raw, max_samples=32)),
        "messages": _conversations(validator, runner, parse_message),
        "ollama-chats": _conversations(validator, runner, parse_ollama_chat),
        "ollama-prompts": _conversations(validator, runner, parse_generate),
        "responses": _conversations(validator, runner, lambda raw: alone(parse_response(raw))),
        "chat-template": _chat_template(folder / "template"),
        "http": http,
        "http2": _http2(runner),
        "reports": _reports(runner),
        "control": _control(folder / "control", runner),
        "calls": _calls(folder / "calls", runner),
        "greetings": _answers(pb_worker.HelloResponse, _greeting),
        "tables": _answers(pb_worker.RankTable, _table),
        "fences": _fences(folder / "fences", runner),
        "blocks": _blocks,
        "pulls": _pulls,
    }
    http.close()
    runner.run(validator.close())


# -- files of a checkpoint


def _config(folder: Path) -> Target:
    folder.mkdir(parents=True)
    path = folder / "config.json"

    def target(raw: bytes) -> None:
        path.write_bytes(raw)
        with suppress(OrcaError):
            checkpoint = read_checkpoint(folder)
            check_partition(checkpoint, 1, 1)
            family_of(checkpoint).share(checkpoint, SINGLE, Types.of("float32"))

    return target


def _generation_config(folder: Path) -> Target:
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(corpus("config")[0])
    path = folder / "generation_config.json"

    def target(raw: bytes) -> None:
        path.write_bytes(raw)
        with suppress(OrcaError):
            checkpoint = read_checkpoint(folder)
            not_followed(folder, checkpoint.model_type)
            read_defaults(folder, checkpoint.vocab_size)

    return target


def _tokenizer(folder: Path) -> Target:
    folder.mkdir(parents=True)
    path = folder / "tokenizer.json"

    def target(raw: bytes) -> None:
        path.write_bytes(raw)
        with suppress(OrcaError):
            vocabulary = Vocabulary(path)
            ids = [0, 1, 2]
            with suppress(Internal):  # a panic, or an error of the library
                ids = vocabulary.encode(TEXT)
            assert len(ids) < 10_000
            with suppress(Internal):
                vocabulary.decode(ids)
            stream = vocabulary.detokenizer()
            for token in [*ids[:50], 0, 1, (1 << 24) - 1]:
                stream.push(token)
            stream.flush()

    return target


def _chat_template(folder: Path) -> Target:
    folder.mkdir(parents=True)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def target(raw: bytes) -> None:
        (folder / "tokenizer_config.json").write_bytes(raw)
        with suppress(OrcaError, CannotRender):
            template = read_chat_template(folder)
            if template is not None:
                template.render(messages, {}, 1 << 16, seconds=0.1)

    return target


def _gguf(folder: Path) -> Target:
    folder.mkdir(parents=True)
    path = folder / "model.gguf"

    def target(raw: bytes) -> None:
        path.unlink(missing_ok=True)  # a file that is cut to nothing is flushed by some file systems
        path.write_bytes(raw)
        with suppress(OrcaError):
            header = gguf_header(path)
            assert all(0 <= one.start <= one.start + one.size <= len(raw) for one in header.tensors.values())
            json.dumps(made(path, header), allow_nan=False)

    return target


def _safetensors(folder: Path) -> Target:
    from orca_worker.models.weights import read_header

    folder.mkdir(parents=True)
    path = folder / "model.safetensors"

    def target(raw: bytes) -> None:
        path.write_bytes(raw)
        with suppress(OrcaError):
            for entry in read_header(path).values():
                assert 0 <= entry.start <= len(raw)

    return target


def _quantized(folder: Path) -> Target:
    """A line with a `quantization_config`, and behind it a file with a matrix `m` of 24 outputs and 64 inputs."""
    from orca_worker.models.coded import CodedFiles, Part
    from orca_worker.models.formats.layout import layout_of

    folder.mkdir(parents=True)
    part = Part("m", 24, 64, (range(3, 9), range(17, 24)), (range(64),), False)
    along = part._replace(outs=(range(24),), ins=(range(5, 12), range(40, 64)))

    def target(raw: bytes) -> None:
        said, _, weights = raw.partition(b"\n")
        (folder / "config.json").write_bytes(b'{"model_type": "llama", "quantization_config": ' + said + b"}")
        (folder / "model.safetensors").write_bytes(weights)
        with suppress(OrcaError):
            layout = layout_of(quantization(folder), "a model")
            if layout is None:
                return
            files = CodedFiles(folder, "", layout)
            files.check([part])
            for one in (part, along):
                codes, group, _ = files.read(one)
                assert codes.numbers(slice(None), group).shape == (len(codes.codes), len(group))

    return target


def _index(folder: Path) -> Target:
    import torch

    from orca_worker.models.gpt2.layers import record
    from orca_worker.models.weights import Weights

    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(corpus("config")[0])
    (folder / "one.safetensors").write_bytes(corpus("safetensors")[0])
    path, device = folder / "model.safetensors.index.json", torch.device("cpu")
    slices = record(GPT2Config.read(read_checkpoint(folder)), SINGLE).slices

    def target(raw: bytes) -> None:
        path.write_bytes(raw)
        with suppress(OrcaError):
            Weights(folder, "transformer.", slices, torch.float32, device)

    return target


# -- the doors


def _endpoint(folder: Path) -> tuple[Validator, EndpointSettings]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(corpus("config")[0])
    (folder / "tokenizer.json").write_bytes(corpus("tokenizer")[0])
    (folder / "tokenizer_config.json").write_bytes(corpus("chat-template")[0])
    settings = EndpointSettings(model=str(folder))
    checkpoint: Checkpoint = read_checkpoint(folder)
    threads = Threads("tokenizing", 1, 8, 8)
    vocabulary = Vocabulary(folder / "tokenizer.json")
    template, special = read_chat_template(folder), vocabulary.special_tokens
    chats = Chats(folder, template, settings.max_prompt_bytes, settings.chat_tokens, special)
    return Validator(settings, checkpoint, vocabulary, threads, chats, FormCompiler(checkpoint)), settings


def _message(validator: Validator, kind: type[Message], check: Callable[[Validator, Any], object]) -> Target:
    def target(raw: bytes) -> None:
        with suppress(OrcaError, DecodeError):
            check(validator, kind.FromString(raw))

    return target


def _completions(validator: Validator, settings: EndpointSettings, runner: asyncio.Runner) -> Target:
    async def check(raw: bytes) -> None:
        asked = parse(raw, settings.max_prompts)
        for sample in asked.samples:
            await validator.generate(sample.request, sample.names, loose=asked.loose)

    def target(raw: bytes) -> None:
        with suppress(OrcaError):
            runner.run(check(raw))

    return target


# -- HTTP/2 of the lanes

SOCKET = socket.socket()  # a connection sets its options


class Recorder(asyncio.Transport):
    """Takes what a connection writes."""

    def __init__(self) -> None:
        super().__init__({"socket": SOCKET})
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def _conversations(validator: Validator, runner: asyncio.Runner, parse: Callable[[bytes], Asked]) -> Target:
    """parse: reads the body of a method."""

    async def check(raw: bytes) -> None:
        asked = parse(raw)
        for sample in asked.samples:
            await validator.generate(sample.request, sample.names, loose=asked.loose, open_end=sample.open_end)

    def target(raw: bytes) -> None:
        with suppress(OrcaError):
            runner.run(check(raw))

    return target


def alone(given: Input) -> Asked:
    """A response's request without what it refers to."""
    return asked(given, [], [item for item in given.items if isinstance(item, Placed)])


def _http2(runner: asyncio.Runner) -> Target:
    """The first byte says in how large pieces the rest comes, and whether its frames are given lengths that fit."""

    async def check(raw: bytes) -> None:
        wrong: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        tasks: list[asyncio.Task[None]] = []

        def begin(connection: Connection, number: int, fields: dict[str, str]) -> LaneCall:
            call = LaneCall(connection, number, fields)
            call.task = asyncio.get_running_loop().create_task(_echo(call))
            tasks.append(call.task)
            return call

        open_ones: set[Connection] = set()
        connection, transport = Connection(begin, open_ones), Recorder()
        connection.connection_made(transport)
        first, raw = raw[0], raw[1:]
        connection.data_received(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        if first & 1:
            raw = fitted(raw)
        size = 1 << first // 16
        pieces = [raw[n : n + size] for n in range(0, len(raw), size)] if len(raw) < 1000 * size else [raw]
        for n, piece in enumerate(pieces):
            connection.data_received(piece)
            match (first + n) % 32:
                case 0:
                    connection.pause_writing()
                case 5:
                    connection.resume_writing()
                case _:
                    pass
            await asyncio.sleep(0)
        connection.resume_writing()
        for _ in range(20):
            await asyncio.sleep(0)
        transport.close()
        connection.connection_lost(None)
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            assert end is None or isinstance(end, asyncio.CancelledError), end
        assert not open_ones
        assert not wrong, wrong

    def target(raw: bytes) -> None:
        runner.run(check(raw or b"\0"))

    return target


async def _echo(call: LaneCall) -> None:
    over: asyncio.Future[OrcaError | None] = asyncio.get_running_loop().create_future()
    call.listen(call.send, over.set_result)
    call.end(await over)


def fitted(raw: bytes) -> bytes:
    """The same with lengths of at most 600 bytes, the last of which ends with the input."""
    out, at = bytearray(), 0
    while len(raw) - at > 9:
        size = min(int.from_bytes(raw[at : at + 3]) % 600, len(raw) - at - 9)
        out += size.to_bytes(3) + raw[at + 3 : at + 9 + size]
        at += 9 + size
    return bytes(out)


# -- the lanes between a scheduler and its ranks


def _reports(runner: asyncio.Runner) -> Target:
    """A rank's messages on its control lane, and reports of iterations that pass for right ones."""
    members = [
        Member(1, 0, 0, 3, 1, (0,), None),
        Member(2, 1, 5, 3, 3, (), 9),
        Member(3, 2, 0, 3, 0, (1,), None),
    ]
    record = PoolRequest(prompt_ids=[1, 2, 3], sampling=SamplingParams(top_logprobs=1, prompt_logprobs=True))
    claimed = [Claimed("r", claim, 0, 3, b"", [], 0, None, 0, 0, 0) for claim in (1, 3)]
    held = {one.claim: Held(one, record, None, bytearray(), 0, top_size=8) for one in claimed}

    def returned(rank: int, report: pb_worker.IterationReport) -> None:
        if problem_of(report, members, [10, 11], held, VOCABULARY) is None:
            made, *_ = made_of(report, first_tokens(report, members).values())
            assert len(made) == 2
            assert all(token < VOCABULARY for tokens in made for token in tokens)

    async def check(raw: bytes) -> None:
        wrong: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        told = Listener(lambda event: None, lambda: None, returned, lambda *_: None, lambda *_: None, lambda: 9)
        rank = Rank(0, "engine", 1, 1, Plaintext(), told, {})
        rank._heard(raw)
        await asyncio.sleep(0)
        assert not wrong, wrong

    return lambda raw: runner.run(check(raw))


def _control(folder: Path, runner: asyncio.Runner) -> Target:
    """A master's messages on the control lane of a rank. An iteration may fail, without taking much memory."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "orca_timed", "vocab_size": 256, "n_positions": 96}')
    stage = Stage(read_checkpoint(folder), Types.of("float32"), None, 64, Compute(1, "auto"))

    def take(message: pb_worker.ControlMessage) -> None:
        if message.HasField("iteration"):
            stage.form(4)
            stage.allocate(64, 4)
            with suppress(Exception):  # the rank reports it, and ends
                stage.run(message.iteration)

    async def check(raw: bytes) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        hearer(pb_worker.ControlMessage, take, asyncio.get_running_loop().create_future())(raw)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 19), "half a GB for one message"

    return lambda raw: runner.run(check(raw))


def _calls(folder: Path, runner: asyncio.Runner) -> Target:
    """Calls of masters and of other ranks: each input is what one rank gets, in turn; two bytes of length, one of the
    method. The rank refuses by a sentence and stays well, but for an iteration that failed, which it reports.

    An epoch of more than one rank needs others to be formed: only its refusals are here.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "orca_timed", "vocab_size": 256, "n_positions": 96}')
    checkpoint, telemetry = read_checkpoint(folder), Telemetry("fuzz")
    rendezvous = Rendezvous("127.0.0.1", None)

    async def converse(raw: bytes) -> None:
        failures: list[str] = []
        iterations = 0
        stage = Stage(checkpoint, Types.of("float32"), None, 64, Compute(1, "auto"))
        rank = Controller(checkpoint, stage, telemetry, rendezvous, Plaintext(), failures.append)
        unary: list[tuple[type[Message], Callable[[Any], Coroutine[Any, Any, Message]]]] = [
            (pb_worker.HelloRequest, rank.hello),
            (pb_worker.FormRequest, rank.form),
            (pb_worker.AllocateRequest, rank.allocate),
        ]
        over: asyncio.Future[OrcaError | None] = asyncio.get_running_loop().create_future()
        relayed = hearer(pb_worker.Iteration, lambda iteration: rank._take(iteration, None), over)
        lane = Lane(lambda report: None)
        told = hearer(pb_worker.ControlMessage, partial(rank._told, lane), lane.over)
        try:
            async with asyncio.timeout(10):
                for method, message in framed(raw):
                    match method % 5:
                        case 3:
                            relayed(message)
                            iterations += 1
                        case 4:
                            if rank._lanes.current is None:  # a greeting with a newer term ends one
                                rank._lanes.open(lane, None)
                            told(message)
                            iterations += 1
                        case number:
                            kind, call = unary[number]
                            with suppress(DecodeError):
                                request = kind.FromString(message)
                                if isinstance(request, pb_worker.FormRequest) and ranks_of(request) > 1:
                                    request.ClearField("controllers")
                                answer, *_ = await asyncio.gather(call(request), return_exceptions=True)
                                if isinstance(answer, Internal) or not isinstance(answer, Message | OrcaError):
                                    raise AssertionError(answer)
            for end in (over, lane.over):
                assert not (end.done() and isinstance(end.result(), Internal)), end
            assert not failures or iterations, failures
        finally:
            rank._lanes.closed(lane)
            assert await rank.leave(5)

    return lambda raw: runner.run(converse(raw))


def framed(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Methods and messages, the last of which ends with the input."""
    at = 0
    while len(raw) - at > 3:
        size = int.from_bytes(raw[at : at + 2])
        yield raw[at + 2], raw[at + 3 : at + 3 + size]
        at += 3 + size


def ranks_of(request: pb_worker.FormRequest) -> int:
    return request.formation.tensor_parallel * request.formation.pipeline_parallel


def _answers(kind: type[M], take: Callable[[Lifecycle, M], None]) -> Target:
    """Answers of ranks and supervisors, and what the life of their engine makes of those that pass for right ones."""

    def target(raw: bytes) -> None:
        with suppress(DecodeError):
            lifecycle = Lifecycle("engine-0", Shape(1, 1, 1, block_size=4), ("pod:1",))
            lifecycle.step(Opened(0.0, 7, (), False))
            take(lifecycle, kind.FromString(raw))

    return target


def _greeting(lifecycle: Lifecycle, hello: pb_worker.HelloResponse) -> None:
    if problem_of_hello(hello) is None:
        lifecycle.step(hello_of(0.1, lifecycle.life, 0, hello))


def _table(lifecycle: Lifecycle, table: pb_worker.RankTable) -> None:
    if problem_of_table(table.ranks) is None:
        entries = tuple(Entry(one.local_rank, one.address, one.pid, 0) for one in table.ranks)
        lifecycle.step(PodSeen(0.1, lifecycle.life, 0, entries))


# -- the fence, and blocks of keys and values between engines


class Fenced:
    """The process of a rank, as its supervisor sees it: it notes the signals that it gets."""

    def __init__(self, pid: int) -> None:
        self.pid, self.signals = pid, list[signal.Signals]()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.ended.set_result(-signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


def _fences(folder: Path, runner: asyncio.Runner) -> Target:
    """A master's fence: it ends the process that it names, and no other."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "orca_timed", "vocab_size": 256, "n_positions": 96}')
    settings = SupervisorSettings(model=str(folder), ranks=3)

    async def check(raw: bytes) -> None:
        with suppress(DecodeError, OrcaError):
            request = pb_worker.FenceRequest.FromString(raw)
            supervisor: Any = Supervisor(settings, cast("Forks", None))
            try:
                processes = [Fenced(4711), Fenced(1 << 30), None]  # of the third rank none runs
                for rank, process in zip(supervisor._ranks, processes, strict=True):
                    rank.process = process
                meant = next(
                    (
                        one
                        for n, one in enumerate(processes)
                        if one and (n, one.pid) == (request.local_rank, request.pid)
                    ),
                    None,
                )
                answer = await supervisor.Fence(request, None)
                assert answer.killed is (meant is not None)
                for process in filter(None, processes):
                    assert process.signals == ([signal.SIGKILL] if process is meant else [])
            finally:
                supervisor.close()

    return lambda raw: runner.run(check(raw))


ROW = AskedBlocks(7, 1, 3, 8, "float32, 4")  # is what a rank has handed over: two blocks of
SIZE = 64  # bytes each


def two_blocks(asked: AskedBlocks) -> Iterator[Block]:
    """Reads the row. Raises FailedPrecondition for any other."""
    if asked != ROW:
        raise FailedPrecondition(f"row {asked.row} of claim {asked.claim} is not here")
    for n in range(2):
        yield Block(bytes([n]) * 16, bytes([n]) * SIZE)


def _blocks(raw: bytes) -> None:
    """The question of a rank that pulls blocks. The first byte says whether it knows the secret, which it never has
    from the input: without it there is no answer, and with it the row, or a sentence."""
    knows, question = raw[:1] > b"\x7f", raw[1:]
    server = BlockServer("127.0.0.1", two_blocks)
    try:
        if knows:
            question = server.secret + question[SECRET:]
        ours, theirs = socket.socketpair()
        with ours:
            ours.sendall(question[: 1 << 12])
            ours.shutdown(socket.SHUT_WR)
            server._strangers.acquire()
            server._serve(theirs)  # what it raises would end the thread of a connection with a trace
            answer = received(ours)
    finally:
        server.close()
    if not knows:
        assert not answer
    elif answer and answer[0] == SERVED:
        assert ASKED.unpack_from(question)[1:5] == ROW[:4]
        assert len(answer) == ANSWER.size + 2 * (BLOCK.size + SIZE)
    elif answer:
        _, length = ANSWER.unpack_from(answer)
        assert len(answer) == ANSWER.size + length


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side has ended; nothing where that had not read all."""
    came = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            came += part
    return came


def _pulls(raw: bytes) -> None:
    """The answer to a rank that pulls two blocks: it gets blocks that came as they were sent, or an error.

    The first byte says whether checksums are made right, so that inputs come further.
    """
    answer = raw[1:] if raw[:1] > b"\x7f" else as_answer(raw[1:])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = threading.Thread(target=_serve, args=[listening, answer])
        serving.start()
        with suppress(OrcaError, OSError):
            found = list(pull(f"127.0.0.1:{listening.getsockname()[1]}", bytes(SECRET), ROW, 2, SIZE))
            assert len(found) == 2
            sent = b"".join(BLOCK.pack(key, SIZE, crc32(payload, crc32(key))) + payload for key, payload in found)
            assert answer[ANSWER.size :].startswith(sent)
        serving.join()


def _serve(listening: socket.socket, answer: bytes) -> None:
    """Sends it to the next connection, and ends that."""
    connection, _ = listening.accept()
    with connection, suppress(OSError):
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        received(connection)


def as_answer(raw: bytes) -> bytes:
    """The same as served blocks of at most 127 bytes, with checksums that are right."""
    made, at = bytearray(ANSWER.pack(SERVED, 0)), ANSWER.size
    while len(raw) >= at + BLOCK.size:
        key, length, _ = BLOCK.unpack_from(raw, at)
        payload = raw[at + BLOCK.size :][: length % 128]
        made += BLOCK.pack(key, len(payload), crc32(payload, crc32(key))) + payload
        at += BLOCK.size + len(payload)
    return bytes(made)
