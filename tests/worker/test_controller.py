"""The controller over real gRPC: what it refuses, and that it answers whatever the GPU thread does."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from checkpoints import make_gpt2, make_timed
from iterations import Begins, begins, iteration_of
from lora import make_lora
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca_common.adapters import Adapter
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import Unavailable
from orca_common.protocol import PROTOCOL, TERM_METADATA
from orca_common.telemetry import Telemetry
from orca_common.tls import Plaintext
from orca_worker.data_plane.rendezvous import Rendezvous
from orca_worker.iteration.model import Compute, ReadAdapter
from orca_worker.models.cpu import StageOnCPU
from orca_worker.partition import Types
from orca_worker.rank import lane
from orca_worker.rank.controller import Controller
from orca_worker.stage.gpu_thread import GpuThread
from orca_worker.stage.stage import Stage

Stream = Any  # grpc.aio's bidirectional call


@dataclass
class Rank:
    """A controller that serves, and a master's stub for it."""

    controller: Controller
    stub: worker_pb2_grpc.ControllerStub
    channel: grpc.aio.Channel
    failures: list[str]
    number: int = 0

    async def member(self, term: int = 1, epoch: int = 1, slots: int = 4096, block_size: int = 16) -> None:
        await self.hello(term)
        await self.form(term, epoch, block_size=block_size)
        await self.stub.Allocate(pb.AllocateRequest(term=term, epoch=epoch, slots=slots))

    async def hello(self, term: int, protocol: int = PROTOCOL) -> pb.HelloResponse:
        return await self.stub.Hello(pb.HelloRequest(protocol=protocol, engine="e-0", term=term))

    async def form(self, term: int, epoch: int, **fields: Any) -> pb.FormResponse:
        fields = {"tensor_parallel": 1, "pipeline_parallel": 1, "block_size": 16} | fields
        formation = pb.Formation(**fields)
        return await self.stub.Form(pb.FormRequest(term=term, epoch=epoch, formation=formation))

    async def iterate(self, run: Stream, term: int = 1, epoch: int = 1, **fields: Any) -> None:
        self.number = fields.pop("number", self.number + 1)
        iteration = iteration_of(term=term, epoch=epoch, number=self.number, **fields)
        await run.write(pb.ControlMessage(iteration=iteration))


@asynccontextmanager
async def serving(folder: Path, telemetry: Telemetry | None = None, adapters_folder: str = "") -> AsyncIterator[Rank]:
    checkpoint = read_checkpoint(folder, None, (), adapters_folder)
    torch_device = None
    if checkpoint.model_type != "orca_timed":
        import torch

        torch_device = torch.device("cpu")
    stage = Stage(checkpoint, Types.of("float32"), torch_device, None, Compute(1))
    failures: list[str] = []
    rendezvous = Rendezvous("127.0.0.1", torch_device)
    controller = Controller(checkpoint, stage, telemetry or Telemetry("test"), rendezvous, Plaintext(), failures.append)
    server = controller.server()
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Rank(controller, worker_pb2_grpc.ControllerStub(channel), channel, failures)
    assert await controller.leave(5)
    await server.stop(grace=1)


@pytest.fixture
async def rank(tmp_path: Path) -> AsyncIterator[Rank]:
    async with serving(make_timed(tmp_path, vocab=500)) as rank:
        yield rank


def initiation(row: int, *token_ids: int, **fields: Any) -> Begins:
    return begins(row, token_ids, [2 * row, 2 * row + 1], claim=row + 100, **fields)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and sentence of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


async def ending(run: Stream) -> tuple[grpc.StatusCode, str]:
    """Status and sentence with which a Run ends."""
    return await run.code(), await run.details()


async def test_a_rank_says_who_it_is(rank: Rank) -> None:
    hello = await rank.hello(3)
    assert (hello.protocol, hello.epoch, hello.iteration, hello.slots, list(hello.rows)) == (PROTOCOL, 0, 0, 0, [])
    assert (hello.vocab_size, hello.max_positions, len(hello.model_digest)) == (500, 2048, 16)
    assert hello.pid
    assert hello.host
    assert hello.incarnation == (await rank.hello(3)).incarnation
    assert rank.controller.ready() is not None

    await rank.member(term=3, epoch=7, slots=320)
    run = rank.stub.Run()
    await rank.iterate(run, 3, 7, number=41, new=[initiation(4, 1, 2, 3), initiation(2, 9)])
    report = (await run.read()).iteration
    assert (report.epoch, report.number, len(report.token_ids), len(report.logprobs)) == (7, 41, 2, 2)
    assert 0 < report.times.received <= report.times.started <= report.times.computed <= report.times.sent
    hello = await rank.hello(3)
    assert (hello.epoch, hello.iteration, hello.slots) == (7, 41, 320)
    assert hello.formation == pb.Formation(tensor_parallel=1, pipeline_parallel=1, block_size=16)
    assert [(row.row, row.claim, row.length) for row in hello.rows] == [(2, 102, 1), (4, 104, 3)]
    await rank.iterate(run, 3, 7, free_rows=[2], rows=[4], starts=[3], tokens=[report.token_ids[0]])
    await run.read()
    assert [(row.row, row.length) for row in (await rank.hello(3)).rows] == [(4, 4)]


async def test_another_protocol_changes_nothing(rank: Rank) -> None:
    await rank.hello(3)
    for other in (PROTOCOL - 1, PROTOCOL + 2):
        assert (await rank.hello(9, protocol=other)).protocol == PROTOCOL
    await rank.hello(3)


async def test_a_master_of_the_next_protocol_is_obeyed(rank: Rank) -> None:
    assert (await rank.hello(9, protocol=PROTOCOL + 1)).protocol == PROTOCOL
    with pytest.raises(grpc.aio.AioRpcError, match="term 3 is old: this rank has seen 9"):
        await rank.hello(3)


async def test_old_terms_are_refused(rank: Rank) -> None:
    await rank.member(term=5)
    for call in (
        rank.hello(4),
        rank.form(4, 9),
        rank.stub.Allocate(pb.AllocateRequest(term=4, epoch=1, slots=16)),
    ):
        code, sentence = await refusal(call)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert sentence == "term 4 is old: this rank has seen 5"
    run = rank.stub.Run()
    await rank.iterate(run, 4, new=[initiation(1, 1)])
    assert await ending(run) == (grpc.StatusCode.FAILED_PRECONDITION, "term 4 is old: this rank has seen 5")
    old = rank.stub.Run(metadata=[(TERM_METADATA, "4")])
    assert await ending(old) == (grpc.StatusCode.FAILED_PRECONDITION, "term 4 is old: this rank has seen 5")


async def test_a_stranger_cannot_shut_masters_out(rank: Rank) -> None:
    """A term that no pool gives would be higher than that of all masters to come."""
    await rank.member(term=5)
    run = rank.stub.Run()
    for call in (rank.hello(2**64 - 1), rank.form(2**60, 9)):
        code, sentence = await refusal(call)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "none that a pool gives" in sentence
    code, sentence = await refusal(rank.stub.Hello(pb.HelloRequest(protocol=PROTOCOL, engine="x" * 300, term=9)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence.startswith("engine: is a name of 300 characters")
    large = pb.HelloRequest(protocol=PROTOCOL, engine="x" * (80 << 20), term=9)
    code, sentence = await refusal(rank.stub.Hello(large))
    assert (code, sentence.partition("; ")[2]) == (grpc.StatusCode.INVALID_ARGUMENT, "at most 67108864")
    await rank.iterate(run, 5, new=[initiation(1, 1)])
    assert (await run.read()).iteration.number, "the rank still obeys its master"


async def test_a_new_master_ends_the_lane_of_the_old(rank: Rank) -> None:
    await rank.member(term=5)
    run = rank.stub.Run()
    await rank.iterate(run, 5, new=[initiation(1, 1)])
    await run.read()
    hello = await rank.hello(6)
    assert (hello.epoch, hello.iteration, len(hello.rows)) == (1, 1, 1)
    assert await ending(run) == (grpc.StatusCode.FAILED_PRECONDITION, "term 6 has taken over")
    run = rank.stub.Run()
    await rank.iterate(run, 6, rows=[1], starts=[1], tokens=[7])
    assert (await run.read()).iteration.number == 2


async def test_a_rank_is_ready_while_a_master_runs_its_epoch(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank.controller.ready() == "not a member of an engine's epoch yet"
    await rank.member(epoch=3)
    assert rank.controller.ready() == "no master holds its control lane"
    run = rank.stub.Run()
    for epoch, reason in [
        (0, "its master waits for the engine's other ranks"),
        (3, None),
        (4, "its master waits for the engine's other ranks"),
        (3, None),
    ]:
        await run.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=1, epoch=epoch)))
        await run.read()
        assert rank.controller.ready() == reason
    with monkeypatch.context() as patched:
        patched.setattr(lane, "SILENCE", -1.0)
        assert rank.controller.ready() == "its master has been silent for 0 s"
    assert rank.controller.ready() is None
    run.cancel()
    while rank.controller.ready() is None:
        await asyncio.sleep(0)
    assert rank.controller.ready() == "no master holds its control lane"


async def test_a_new_run_ends_the_one_before(rank: Rank) -> None:
    await rank.member()
    first = rank.stub.Run()
    await first.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=1)))
    await first.read()
    second = rank.stub.Run()
    await second.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=2)))
    assert (await second.read()).heartbeat.number == 2
    assert await ending(first) == (grpc.StatusCode.ABORTED, "a newer Run took over")


@pytest.mark.parametrize(
    ("term", "epoch", "number", "sentence"),
    [
        (1, 2, 11, "iteration 11 is of epoch 2: this rank is a member of 3"),
        (1, 4, 11, "iteration 11 is of epoch 4: this rank is a member of 3"),
        (1, 3, 10, "iteration 10 is old: this rank has taken 10"),
        (1, 3, 9, "iteration 9 is old: this rank has taken 10"),
    ],
)
async def test_iterations_of_another_time_are_refused(
    rank: Rank, term: int, epoch: int, number: int, sentence: str
) -> None:
    await rank.member(epoch=3)
    run = rank.stub.Run()
    await rank.iterate(run, 1, 3, number=10, new=[initiation(1, 1)])
    await run.read()
    await rank.iterate(run, term, epoch, number=number, new=[initiation(2, 1)])
    assert await ending(run) == (grpc.StatusCode.FAILED_PRECONDITION, sentence)
    assert [row.row for row in (await rank.hello(1)).rows] == [1]
    assert not rank.failures


async def test_a_message_that_comes_twice_counts_once(rank: Rank) -> None:
    await rank.member(epoch=3)
    run = rank.stub.Run()
    for number in (10, 10, 11, 11):
        await rank.iterate(run, 1, 3, number=number, new=[initiation(number, 1)])
    found: list[int] = []
    while len(found) < 2:
        report = await run.read()
        if report.HasField("iteration"):
            found.append(report.iteration.number)
    assert found == [10, 11]
    assert not rank.failures


async def test_iterations_need_a_member(rank: Rank) -> None:
    await rank.form(1, 3)
    run = rank.stub.Run()
    await run.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=8)))  # heartbeats do not
    assert (await run.read()).heartbeat == pb.Heartbeat(number=8, iteration=0)
    await rank.iterate(run, 1, 3, new=[initiation(1, 1)])
    code, sentence = await ending(run)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert sentence.endswith("a member of none")


async def test_formations(rank: Rank) -> None:
    formed = await rank.form(1, 3)
    assert formed.slots % 16 == 0
    assert (await rank.form(1, 3)).slots == formed.slots  # the answer was lost
    for fields, sentence in [
        ({"tensor_parallel": 2}, "0 controllers of a 2 x 1 engine (tp x pp)"),
        ({"pipeline_parallel": 0}, "stage 0, tensor rank 0 of a 1 x 0 engine"),
        ({"stage": 1}, "stage 1, tensor rank 0 of a 1 x 1 engine"),
        ({"block_size": 0}, "block_size is 0"),
    ]:
        assert await refusal(rank.form(1, 4, **fields)) == (grpc.StatusCode.FAILED_PRECONDITION, sentence)
    code, sentence = await refusal(rank.form(1, 2))
    assert (code, sentence) == (grpc.StatusCode.FAILED_PRECONDITION, "epoch 2 is old: this rank has seen 3")
    for epoch, slots, part in [(2, 160, "not being formed"), (3, 8, "a block 16"), (3, formed.slots + 1, "holds")]:
        code, sentence = await refusal(rank.stub.Allocate(pb.AllocateRequest(term=1, epoch=epoch, slots=slots)))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert part in sentence
    for _ in range(2):  # the answer was lost
        await rank.stub.Allocate(pb.AllocateRequest(term=1, epoch=3, slots=160))
    assert (await rank.hello(1)).epoch == 3
    code, _ = await refusal(rank.form(1, 3))  # a member forms again only under a new epoch
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    await rank.form(1, 4)
    assert (await rank.hello(1)).epoch == 0
    assert rank.controller.ready() == "epoch 4 is being formed"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Timed models compute until this event is set."""
    gate = threading.Event()
    monkeypatch.setattr("orca_worker.models.timed.model.time", SimpleNamespace(sleep=lambda seconds: gate.wait(60)))
    yield gate
    gate.set()


async def test_beats_are_answered_while_the_gpu_computes(tmp_path: Path, gate: threading.Event) -> None:
    async with serving(make_timed(tmp_path, seconds=1)) as rank:
        await rank.member()
        run = rank.stub.Run()
        await rank.iterate(run, new=[initiation(1, 1, 2)])
        await rank.iterate(run, rows=[1], starts=[2])
        for number in range(10):  # each before the first iteration has run
            await run.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=number)))
            assert (await run.read()).heartbeat == pb.Heartbeat(number=number, iteration=0)
        gate.set()
        assert (await run.read()).iteration.number == 1
        assert (await run.read()).iteration.number == 2


async def test_a_report_goes_to_the_lane_that_asked(tmp_path: Path) -> None:
    async with serving(make_timed(tmp_path, seconds=0.2)) as rank:
        await rank.member()
        broken = rank.stub.Run()
        await rank.iterate(broken, new=[initiation(1, 1, 2)])
        await broken.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=1)))
        await broken.read()
        broken.cancel()
        hello = await rank.hello(1)  # waits for what runs
        assert (hello.iteration, [row.length for row in hello.rows]) == (1, [2])
        run = rank.stub.Run()
        await rank.iterate(run, new=[initiation(2, 1)])
        assert (await run.read()).iteration.number == 2


async def test_iterations_do_not_pile_up(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orca_worker.rank.iterations.MAX_WAITING", 2)
    async with serving(make_timed(tmp_path, seconds=1)) as rank:
        await rank.member()
        run = rank.stub.Run()
        for row in range(3):
            await rank.iterate(run, new=[initiation(row, 1)])
        assert await ending(run) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "2 iterations wait here already")
        gate.set()


async def test_a_failed_iteration_is_the_last(rank: Rank) -> None:
    await rank.member()
    run = rank.stub.Run()
    await rank.iterate(run, rows=[6], starts=[1], tokens=[1])
    report = (await run.read()).iteration
    assert report.error == "row 6 is not held"
    assert rank.failures == [report.error]
    assert rank.controller.ready() == "an iteration failed"
    await rank.iterate(run, new=[initiation(1, 1)])
    code, sentence = await ending(run)
    assert (code, sentence) == (grpc.StatusCode.UNAVAILABLE, "this rank has failed and is about to end")
    code, _ = await refusal(rank.form(1, 2))
    assert code == grpc.StatusCode.UNAVAILABLE


async def test_a_failed_rank_waits_for_nobody(rank: Rank) -> None:
    """Its master could not bring the engine to rest, because the failed batch never returns."""
    await rank.member()
    run = rank.stub.Run()
    await rank.iterate(run, rows=[6], starts=[1], tokens=[1])
    assert (await run.read()).iteration.error
    assert await asyncio.wait_for(rank.controller.leave(60), 20)
    assert await ending(run) == (grpc.StatusCode.UNAVAILABLE, "this rank is leaving")


async def test_a_message_that_is_none_ends_the_lane(rank: Rank) -> None:
    """A lane left open would look like a silent rank."""
    await rank.member()
    run = rank.channel.stream_stream("/orca.v1.Controller/Run", bytes, pb.Report.FromString)(
        metadata=((TERM_METADATA, "1"),)
    )
    await run.write(b"\xff\xff")
    async with asyncio.timeout(10):
        code, sentence = await ending(run)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence.startswith("message: not a valid ControlMessage")


async def test_a_stopped_gpu_thread_refuses_calls(tmp_path: Path) -> None:
    stage = Stage(read_checkpoint(make_timed(tmp_path)), Types.of("float32"), None, None, Compute(1))
    gpu = GpuThread(stage, lambda report: None)
    called = gpu.call(lambda: 1)
    gpu.stop()
    assert called.result(10) == 1
    with pytest.raises(Unavailable, match="leaving"):
        gpu.call(lambda: 1).result(10)
    assert gpu.join(10)


async def test_leaving_in_order(tmp_path: Path) -> None:
    """The rank says so, runs what its master still sends, and ends when the master has closed the lane."""
    async with serving(make_timed(tmp_path, seconds=0.05)) as rank:
        await rank.member()
        run = rank.stub.Run()
        await rank.iterate(run, new=[initiation(1, 1, 2)])
        assert (await run.read()).iteration.number == 1
        leaving = asyncio.create_task(rank.controller.leave(30))
        assert (await run.read()).HasField("leaving")
        assert rank.controller.ready() == "leaving"
        assert (await refusal(rank.hello(2))) == (grpc.StatusCode.UNAVAILABLE, "this rank is leaving")
        assert (await ending(rank.stub.Run()))[0] == grpc.StatusCode.UNAVAILABLE
        await rank.iterate(run, rows=[1], starts=[2])
        while (await run.read()).iteration.number != 2:
            pass
        assert not leaving.done()
        await run.done_writing()
        assert await asyncio.wait_for(leaving, 20)


async def test_leaving_finishes_what_was_accepted(tmp_path: Path, gate: threading.Event) -> None:
    """When the master does not close the lane, the rank ends it after a while."""
    async with serving(make_timed(tmp_path, seconds=1)) as rank:
        await rank.member()
        run = rank.stub.Run()
        await rank.iterate(run, new=[initiation(1, 1, 2)])
        await rank.iterate(run, rows=[1], starts=[2])
        await run.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=1)))
        await run.read()
        leaving = asyncio.create_task(rank.controller.leave(5))
        assert (await run.read()).HasField("leaving")
        gate.set()
        assert [(await run.read()).iteration.number for _ in range(2)] == [1, 2]
        assert await ending(run) == (grpc.StatusCode.UNAVAILABLE, "this rank is leaving")
        assert await leaving


async def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path, heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=1)
    (folder / "model.safetensors").unlink()
    async with serving(folder) as rank:
        code, sentence = await refusal(rank.form(1, 1))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "lacks weights" in sentence
        assert (await rank.hello(1)).epoch == 0


async def test_an_error_of_torch_is_told_and_ends_the_epoch(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master's verdict quotes it."""

    def allocate(self: Stage, slots: int, block_size: int) -> None:
        raise RuntimeError("CUDA out of memory")

    await rank.form(1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Stage, "allocate", allocate)
        code, sentence = await refusal(rank.stub.Allocate(pb.AllocateRequest(term=1, epoch=1, slots=160)))
    assert code == grpc.StatusCode.INTERNAL
    assert sentence == "Allocate: RuntimeError: CUDA out of memory"
    code, sentence = await refusal(rank.stub.Allocate(pb.AllocateRequest(term=1, epoch=1, slots=160)))
    assert (code, sentence) == (grpc.StatusCode.FAILED_PRECONDITION, "epoch 1 is not being formed here")
    await rank.member(1, 2)
    assert (await rank.hello(1)).epoch == 2


async def test_a_real_model_keeps_its_weights_over_formations(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path, heads=3, layers=2, hidden=24, vocab=97, positions=48, seed=1)
    async with serving(folder) as rank:
        made = []
        for epoch in (1, 2):
            await rank.member(1, epoch, slots=64)
            run = rank.stub.Run()
            await rank.iterate(run, 1, epoch, new=[initiation(1, 5, 6, 7)])
            made.append((await run.read()).iteration.token_ids[0])
            (folder / "model.safetensors").unlink(missing_ok=True)
        assert made[0] == made[1]


async def test_iterations_run_between_the_adapters_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole table in one call of the GPU thread held them until the master judged the rank stuck. The newest table
    alone is answered: what an older one names is loaded no further."""
    base = make_gpt2(tmp_path / "base", heads=1, layers=1, hidden=8, vocab=97, positions=48, seed=1)
    a, b, c = (make_lora(tmp_path / name, base, name, seed=1).adapter for name in "abc")
    begun, may_end, real = (
        [threading.Event() for _ in range(3)],
        [threading.Event() for _ in range(3)],
        StageOnCPU.adapt,
    )

    def adapt(self: StageOnCPU, number: int, file: ReadAdapter | None) -> None:
        begun[number].set()
        assert may_end[number].wait(60)
        real(self, number, file)  # type: ignore[arg-type]

    def table(number: int, *adapters: Adapter) -> pb.ControlMessage:
        entries = [pb.AdapterEntry(id=f"{one.name}@1", name=one.name, folder=str(one.folder)) for one in adapters]
        return pb.ControlMessage(adapters=pb.AdapterTable(number=number, entries=entries))

    async with serving(base, adapters_folder=str(tmp_path)) as rank:
        await rank.member(slots=64)
        monkeypatch.setattr(StageOnCPU, "adapt", adapt)
        run = rank.stub.Run()
        await run.write(table(1, a, b))
        await asyncio.to_thread(begun[0].wait, 60)
        await rank.iterate(run, new=[initiation(1, 5, 6, 7)])
        await run.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=1)))  # what was written before has arrived
        assert (await run.read()).HasField("heartbeat")
        may_end[0].set()
        try:
            assert (await asyncio.wait_for(run.read(), 20)).iteration.number == 1
            await asyncio.to_thread(begun[1].wait, 60)
            await run.write(table(2, a, c))
            await run.write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=2)))
            assert (await run.read()).HasField("heartbeat")
        finally:
            for event in may_end:
                event.set()
        held = (await run.read()).adapters
        assert [(one.id, bool(one.fingerprint), one.error) for one in held.adapters] == [
            ("a@1", True, ""),
            ("c@1", True, ""),
        ]
        assert held.number == 2


async def test_a_span_for_each_iteration(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry("test")
    telemetry.enabled, telemetry.tracer = True, provider.get_tracer("test")
    async with serving(make_timed(tmp_path), telemetry) as rank:
        await rank.member()
        run = rank.stub.Run()
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await rank.iterate(run, new=[initiation(1, 1, 2)], trace={"traceparent": parent})
        await run.read()
    *parts, span = sorted(exporter.get_finished_spans(), key=lambda span: span.name == "orca.stage")
    assert span.name == "orca.stage"
    assert "orca.stage.compute" in {part.name for part in parts}
    context = span.get_span_context()
    assert context is not None
    assert all(part.parent is not None and part.parent.span_id == context.span_id for part in parts)
    moments = [moment for part in parts for moment in (part.start_time or 0, part.end_time or 0)]
    assert (span.start_time or 0) <= min(moments) <= max(moments) <= (span.end_time or 0)
    assert span.parent is not None
    assert f"{span.parent.span_id:x}" == "b7ad6b7169203331"
    assert span.attributes is not None
    assert (span.attributes["orca.iteration"], span.attributes["orca.batch_size"]) == (1, 1)
