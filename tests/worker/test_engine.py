"""Engines of several ranks: their tokens must equal those of transformers, however the model is cut."""

import asyncio
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from checkpoints import make_gpt2, make_shape, make_timed
from properties import PART
from reference import Reference
from worker.driver import Sampled
from worker.engines import Broken, Master, in_process, serve
from worker.test_families import requests_for

from orca.v1 import worker_pb2 as pb
from orca.v1 import worker_pb2_grpc
from orca_common.address import split_address
from orca_common.checkpoint import read_checkpoint
from orca_common.errors import FailedPrecondition
from orca_common.protocol import PROTOCOL
from orca_worker.data_plane.backends import Gloo, Group
from orca_worker.data_plane.plane import DataPlane
from orca_worker.data_plane.process_groups import ProcessGroups
from orca_worker.data_plane.rendezvous import Rendezvous
from orca_worker.models.families import topology
from orca_worker.partition import Place, Types
from orca_worker.rank import epoch

CUTS = [(2, 1), (3, 2), (1, 4)]


@pytest.mark.parametrize(("tp", "pp"), CUTS if PART > 1 else [*CUTS, (1, 2), (2, 2), (3, 1)])
async def test_tokens_equal_transformers(tmp_path: Path, tp: int, pp: int) -> None:
    """Only the heads divide evenly: there are 7 layers, a vocabulary of 211 and an inner size of 50."""
    layers = 4 if (tp, pp) == (3, 2) else 7  # Figure 6: 4 layers, 2 stages, 3 tensor ranks
    folder = make_gpt2(tmp_path, heads=6, layers=layers, hidden=36, vocab=211, positions=48, seed=tp, n_inner=50)
    requests = requests_for(211, 8, seed=pp)
    async with in_process(folder, tp, pp, seed=tp) as (master, _):
        await master.run(requests)
    reference = Reference(folder)
    assert len({tuple(request.made) for request in requests}) >= 6, (
        "a model that answers all prompts alike tests nothing"
    )
    for request in requests:
        assert request.made == reference.greedy(request.prompt, request.new_tokens)


CUT = {  # shapes of other families, and the cuts that they are tried in
    "llama, tied, biases, 1 K/V head, large heads": [(1, 1), (3, 2)],  # each rank has that head
    "llama, 10 heads": [(5, 3)],
    "mistral, a window": [(3, 2)],
    "mistral, 10 heads, all K/V heads, tied, a window": [(2, 1)],
    "qwen2, tied": [(2, 2)],
    "qwen3, windows of some layers": [(2, 3)],
    "gemma3, windows but in one layer": [(2, 3)],
    "neox": [(2, 2)],
    "gptj": [(2, 2)],
}


@pytest.mark.parametrize(("shape", "tp", "pp"), [(shape, *cut) for shape, cuts in CUT.items() for cut in cuts])
async def test_other_families(tmp_path: Path, shape: str, tp: int, pp: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each rank reads its share, and no byte more."""
    caplog.set_level("INFO")
    folder = make_shape(tmp_path, shape)
    requests = requests_for(211, 6, seed=pp)
    async with in_process(folder, tp, pp, seed=tp) as (master, _):
        await master.run(requests)
    reference = Reference(folder)
    assert len({tuple(request.made) for request in requests}) >= 5
    for request in requests:
        assert request.made == reference.greedy(request.prompt, request.new_tokens)
    read = {
        (line.__dict__["stage"], line.__dict__["tensor_rank"]): line.__dict__["bytes_read"]
        for line in caplog.records
        if line.message == "model loaded"
    }
    ranks = topology(read_checkpoint(folder), tp, pp, Types.of("float32"))
    assert read == {(rank.stage, rank.tensor_rank): rank.weight_bytes for rank in ranks}


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 3)])
async def test_draws_and_logprobs_do_not_depend_on_the_cut(tmp_path: Path, tp: int, pp: int) -> None:
    folder = make_gpt2(tmp_path, heads=2, layers=3, hidden=16, vocab=97, positions=48, seed=11, initializer_range=0.5)
    sampling: dict[str, float] = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "logprobs": True}
    made = []
    for cut in ((1, 1), (tp, pp)):
        requests = requests_for(97, 6, seed=4)
        for seed, request in enumerate(requests):
            request.sampling = sampling | {"seed": seed}
        async with in_process(folder, *cut) as (master, _):
            await master.run(requests)
        made.append(requests)
    for alone, cut in zip(*made, strict=True):
        assert cut.made == alone.made
        assert cut.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (1, 3), (3, 2)])
async def test_run_ahead_takes_tokens_from_the_data_plane(tmp_path: Path, tp: int, pp: int) -> None:
    """The next iteration of a batch is issued before its tokens are back: the sampling rank sends them directly."""
    folder = make_gpt2(tmp_path, heads=3, layers=3, hidden=24, vocab=97, positions=48, seed=12)
    pairs = [[Sampled([seed, 5, 7], 6), Sampled([90 - seed], 6)] for seed in range(pp)]
    async with in_process(folder, tp, pp, return_tokens=True) as (master, _):
        flight = [await master.issue(pair, []) for pair in pairs]
        for _ in range(5):
            ahead = [await master.issue([], pair, ahead=True) for pair in pairs]
            for batch in flight:
                await master.collect(batch)
            flight = ahead
        for batch in flight:
            await master.collect(batch)
    reference = Reference(folder)
    for request in (request for pair in pairs for request in pair):
        assert len(request.made) == 6
        assert request.made == reference.greedy(request.prompt, 6)


async def test_every_rank_reports_every_iteration(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path, heads=2, layers=3, hidden=16, vocab=97, positions=48, seed=1)
    async with in_process(folder, 2, 2) as (master, _):
        (request,) = requests_for(97, 1, seed=1)
        await master.run([request])
        while len(master.times) < 4 * request.new_tokens:
            await asyncio.sleep(0)
        for (rank, number), times in master.times.items():
            assert 0 < times.received <= times.taken <= times.started <= times.computed <= times.sent
            tokens = len(request.prompt) if number == 1 else 1
            hidden = tokens * 16 * 4  # bytes of the hidden states
            reduces = 2 * (2 if rank < 2 else 1) + (rank < 2)  # 2 a layer, of 2 layers and 1; the embedding
            logits = (rank == 3) * 16  # a greedy request: its largest logit and that token, two float64
            assert times.data_bytes == reduces * hidden + (rank < 2) * hidden + logits
            assert times.control_bytes == master.times[0, number].control_bytes > 0
        formed = await master.form()
        assert [one.slot_bytes for one in formed] == [2 * 2 * 8 * 4] * 2 + [2 * 1 * 8 * 4] * 2


async def test_times_do_not_compete_with_tokens(tmp_path: Path) -> None:
    """The first stage keeps times while iterations wait, but only until the next heartbeat."""
    folder = make_timed(tmp_path, seconds=0.1)
    async with in_process(folder, 1, 2) as (master, _):
        batches = [await master.issue(requests_for(97, 1, seed=seed), []) for seed in range(8)]
        await master.collect(batches[0])
        await master.lanes[0].write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=5)))
        heartbeat = await master.heartbeats.get()
        assert (0, 1) in master.times
        assert heartbeat.number == 5
        assert heartbeat.iteration >= 1
        for batch in batches[1:]:
            await master.collect(batch)
        while len(master.times) < 16:
            await asyncio.sleep(0)
        assert master.messages < 8


async def test_control_is_sent_ahead_of_the_data(tmp_path: Path) -> None:
    """The control message reaches the last stage before the first stage has computed (paper section 4.2)."""
    folder = make_timed(tmp_path, seconds=0.4)  # so long that a busy machine relays in less
    async with in_process(folder, 1, 3) as (master, _):
        batches = [await master.issue(requests_for(97, 1, seed=seed), []) for seed in range(3)]
        for batch in batches:
            await master.collect(batch)
        while len(master.times) < 9:
            await asyncio.sleep(0)
        for number in (1, 2, 3):
            stages = [master.times[stage, number] for stage in range(3)]
            assert stages[0].received <= stages[1].received <= stages[2].received
            assert stages[2].received < stages[0].computed
            for before, after in pairwise(stages):
                assert after.taken < before.computed or number > 1
                assert after.started >= before.computed
        # iteration 2 computes in stage 0 while 1 does in stage 1
        assert master.times[0, 2].started < master.times[1, 1].computed


async def test_old_messages_are_refused_on_every_hop(tmp_path: Path) -> None:
    folder = make_timed(tmp_path)
    async with in_process(folder, 1, 2) as (master, _):
        await master.collect(await master.issue(requests_for(97, 1, seed=1), []))
        second = worker_pb2_grpc.ControllerStub(master.channels[1])
        for term, epoch, number, sentence in (
            (0, 1, 2, "term 0 is old: this rank has seen 1"),
            (1, 7, 2, "iteration 2 is of epoch 7: this rank is a member of 1"),
            (1, 1, 1, "iteration 1 is old: this rank has taken 1"),
        ):
            relay: Any = second.Relay()
            await relay.write(pb.Iteration(term=term, epoch=epoch, number=number))
            assert (await relay.code(), await relay.details()) == (grpc.StatusCode.FAILED_PRECONDITION, sentence)
        lane: Any = second.Run()
        await lane.write(pb.ControlMessage(iteration=pb.Iteration(term=1, epoch=1, number=2)))
        assert await lane.details() == "iteration 2 came by Run: here they come by a relay"


@pytest.mark.parametrize(
    ("tp", "pp", "sentence"),
    [
        (4, 1, "tp 4: 6 heads cannot be shared evenly by 4 tensor ranks"),
        (1, 4, "pp 4: 3 layers are too few for 4 stages"),
        (6, 1, "tp 6: an inner size of 5 is too small for 6 tensor ranks"),
    ],
)
async def test_impossible_cuts_are_refused(tmp_path: Path, tp: int, pp: int, sentence: str) -> None:
    folder = make_gpt2(tmp_path, heads=6, layers=3, hidden=36, vocab=97, positions=48, seed=1, n_inner=5)
    rank = await serve(folder)
    async with grpc.aio.insecure_channel(rank.address) as channel:
        formation = pb.Formation(tensor_parallel=tp, pipeline_parallel=pp, block_size=4)
        request = pb.FormRequest(term=1, epoch=1, formation=formation)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await worker_pb2_grpc.ControllerStub(channel).Form(request)
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, sentence)
    with pytest.raises(FailedPrecondition, match=sentence):
        topology(read_checkpoint(folder), tp, pp, Types.of("float32"))
    await rank.controller.leave(1)
    await rank.server.stop(grace=0)


async def test_run_ahead_needs_an_epoch_that_returns_tokens(tmp_path: Path) -> None:
    """Otherwise increments without tokens would continue from an old token."""
    folder = make_timed(tmp_path, seconds=0)
    async with in_process(folder, 1, 2) as (master, ranks):
        (request,) = requests_for(97, 1, seed=3)
        first, second = await master.issue([request], []), await master.issue([], [request], ahead=True)
        both = asyncio.gather(master.collect(first), master.collect(second))
        with pytest.raises(Broken, match="this epoch does not return them"):
            await both
        ranks[0].failures.clear()


async def test_tokens_that_nobody_asks_for_are_taken_in(tmp_path: Path) -> None:
    """Requests of one token each: no increment ever needs the returned tokens, and they do not pile up."""
    folder = make_timed(tmp_path, seconds=0)
    async with in_process(folder, 1, 2, return_tokens=True) as (master, ranks):
        for seed in range(20):
            requests = [Sampled([seed + 1], 1), Sampled([seed + 2], 1)]
            await master.collect(await master.issue(requests, []))
            for request in requests:
                master.free(request)
        assert len(ranks[0].stage._owed) <= 3


async def test_a_request_that_comes_twice_gets_one_answer(tmp_path: Path) -> None:
    """The second one comes while the first is under way: the rank forms once, and opens its relays once."""
    ranks = [await serve(make_timed(tmp_path)) for _ in range(2)]
    master = Master([rank.address for rank in ranks], 1, 2, 64)
    master.epoch = 1
    channels = [grpc.aio.insecure_channel(rank.address) for rank in ranks]
    stubs = [worker_pb2_grpc.ControllerStub(channel) for channel in channels]
    stores = [stubs[0].HostStore(pb.HostStoreRequest(term=1, epoch=1)) for _ in range(2)]
    address, again = [(await call).address for call in stores]
    assert address == again
    requests = master.form_requests(address)
    first = [stubs[0].Form(requests[0]) for _ in range(2)]  # both wait for the other rank
    await stubs[1].Form(requests[1])
    formed, again = [await call for call in first]
    assert formed == again
    allocate = pb.AllocateRequest(term=1, epoch=1, slots=64)
    await asyncio.gather(*(stub.Allocate(allocate) for stub in stubs for _ in range(2)))
    hellos = [await stub.Hello(pb.HelloRequest(protocol=PROTOCOL, engine="e-0", term=1)) for stub in stubs]
    assert [hello.epoch for hello in hellos] == [1, 1]
    for channel in channels:
        await channel.close()
    for rank in ranks:
        assert await rank.controller.leave(5)
        await rank.server.stop(grace=0)


async def test_a_rank_that_lost_a_neighbour_says_so_and_stays(tmp_path: Path) -> None:
    """It takes no more iterations of the epoch, and its lane goes on: its master must not suspect it."""
    async with in_process(make_timed(tmp_path), 1, 2) as (master, ranks):
        await master.collect(await master.issue(requests_for(97, 1, seed=1), []))
        await ranks[1].server.stop(grace=0)
        while "broke" not in (reason := ranks[0].controller.ready() or ""):
            await asyncio.sleep(0)
        assert reason.startswith(f"the relay to {ranks[1].address} broke: ")
        stub = worker_pb2_grpc.ControllerStub(master.channels[0])
        assert (await stub.Hello(pb.HelloRequest(protocol=PROTOCOL, engine="e-0", term=1))).epoch == 0
        await master.issue(requests_for(97, 1, seed=2), [])
        while (0, f"lost: {reason}") not in master.broken:
            await asyncio.sleep(0)
        await master.lanes[0].write(pb.ControlMessage(heartbeat=pb.Heartbeat(number=8)))
        assert await master.heartbeats.get() == pb.Heartbeat(number=8, iteration=1)
        assert not ranks[0].failures


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Is set when the test has failed, too: the interpreter waits for threads that leave groups."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_rank_whose_groups_are_not_left_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: threading.Event
) -> None:
    """NCCL's abort may hang when a peer of the same node was killed. Each epoch would leave more on the device."""

    class Held(Gloo):
        """Groups of a device, whose abort does not end."""

        in_streams = True

        def leave(self, group: Group) -> None:
            over.wait()
            super().leave(group)

    def plane(self: Rendezvous, place: Place, number: int, store: str, returns_tokens: bool) -> DataPlane:
        return ProcessGroups(place, number, split_address(store), Held(self.host), returns_tokens)

    monkeypatch.setattr(Rendezvous, "plane", plane)
    monkeypatch.setattr(epoch, "LEAVE", 0.05)
    folder = make_gpt2(tmp_path, heads=2, layers=1, hidden=16, vocab=97, positions=48, seed=1)
    async with in_process(folder, 2, 1) as (master, ranks):
        requests = requests_for(97, 2, seed=4)
        await master.run(requests)
        assert all(len(request.made) == request.new_tokens for request in requests)
        await master.form()
        while not all(rank.failures for rank in ranks):
            await asyncio.sleep(0)
        for rank in ranks:
            assert rank.failures == ["the process groups of epoch 1 were not left within 0.05 s"]
            rank.failures.clear()
        over.set()
