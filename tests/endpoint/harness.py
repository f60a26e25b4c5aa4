"""An endpoint on a real pool. The test plays the engine: it claims requests from the pool and commits tokens."""

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from redis.asyncio import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from orca.v1 import orca_pb2 as pb
from orca.v1.orca_pb2_grpc import OrcaStub
from orca.v1.pool_pb2 import PoolRequest
from orca_common.scores import NOTHING, SCORE, TOP
from orca_endpoint.app import EndpointApp
from orca_endpoint.settings import EndpointSettings
from orca_pool.pool import Pool
from orca_pool.records import Claimed, CommitRow, EngineInfo, Reason
from orca_pool.wire import TOKEN

M = TypeVar("M", bound=Message)

VOCABULARY, POSITIONS, EOS, SLOTS = 512, 256, 0, 200
WORDS = "the request pool holds every request of the iteration; naïve café 東京 😀 grüße, один два. "


def make_model(folder: Path, tokenizer: bool = True, positions: int = POSITIONS) -> Path:
    """Makes what an endpoint reads of a checkpoint: a configuration and a small byte-level BPE. Id 0 is <|end|>."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_positions": positions, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def make_tool_model(folder: Path, template: str, special: list[str] | None = None) -> Path:
    """The model of `make_model` with a chat template, and marks of calls as special tokens."""
    make_model(folder, positions=1024)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(special or [])
    tokenizer.save(str(path))
    config = {"bos_token": "<|end|>", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    return tokenizer


def top_of(token_id: int, count: int) -> bytes:
    """The token and the ids after it, each less probable than the one before."""
    return b"".join(TOP.pack((token_id + n) % VOCABULARY, -0.5 - n) for n in range(count))


class Engine:
    """Plays an engine's master and the scheduler that sweeps. A pool has one of it."""

    def __init__(self, pool: Pool, name: str = "engine-0") -> None:
        self._pool, self._name, self._owner = pool, name, secrets.token_hex(4)
        self._term = self._have = self.iteration = 0
        self._slots = SLOTS

    async def form(self, slots: int = SLOTS) -> None:
        term = await self._pool.acquire(self._name, self._owner, None)
        assert term is not None
        self._term, self._slots = term, slots
        await self._pool.renew(self._name, self._owner, term, epoch=1, form=EngineInfo(self._name, 1, 1, slots, 1))

    async def change_weights(self, weights: str) -> None:
        """The engine forms anew with these; what it had claimed goes back."""
        lease = self._name, self._owner, self._term
        held = await self._pool.holding(*lease)
        assert held is not None
        await self._pool.give_back(*lease, {claimed.request_id: (claimed.claim, False) for claimed in held.requests})
        form = EngineInfo(self._name, 1, 1, self._slots, 1)
        await self._pool.renew(*lease, form=form, weights=weights)

    async def load_adapters(self) -> None:
        """Its ranks have all adapters of the pool's table from now on."""
        table = (await self._pool.adapters()).entries
        has = [(adapter, "fingerprint", "") for adapter in table]
        assert await self._pool.tell_adapters(self._name, self._owner, self._term, has)

    async def sweep(self) -> None:
        """Does for ever what every scheduler's renewal does."""
        while True:
            await self._pool.renew_scheduler(self._owner)
            await asyncio.sleep(0.1)

    async def claim(self) -> Claimed:
        """Waits for the next request."""
        cursor: bytes | None = None
        while True:
            answer = await self._pool.claim(
                self._name, self._owner, self._term, self._have, count=1, slots=self._slots, total=self._slots
            )
            assert answer is not None
            self._have = max(self._have, answer.last_claim)
            if answer.requests:
                return answer.requests[0]
            cursor, _ = await self._pool.hints(self._name, cursor, wait=1.0)

    async def commit(self, request: Claimed, base: int, ids: Sequence[int], finish: Reason | None = None) -> int:
        """Commits tokens from index `base` on. Returns the pool's answer for the row."""
        self.iteration += 1
        record = PoolRequest.FromString(request.record)
        tokens = b"".join(TOKEN.pack(i, -0.5 if record.sampling.logprobs else math.nan, self.iteration) for i in ids)
        count = record.sampling.top_logprobs
        tops = b"".join(top_of(i, count) for i in ids)
        prompt = b""
        if record.sampling.prompt_logprobs and base == 0:
            _, *rest = enumerate(record.prompt_ids)
            prompt = SCORE.pack(math.nan) + NOTHING * count
            prompt += b"".join(SCORE.pack(-n) + top_of(i, count) for n, i in rest)
        row = CommitRow(request.request_id, request.claim, base, tokens, finish, tops, prompt)
        answer = await self._pool.commit(self._name, self._owner, self._term, [row])
        assert answer is not None
        return answer.rows[0]

    async def answer(self, request: Claimed, ids: Sequence[int], finish: Reason = Reason.LENGTH) -> None:
        """Commits a whole answer, one token at a time."""
        for n, token in enumerate(ids):
            last = n == len(ids) - 1
            await self.commit(request, n, [token], finish if last else None)

    async def serve(self, script: Callable[[PoolRequest], Sequence[int]]) -> None:
        """Answers requests for ever with the script's tokens. They end by LENGTH, or by an end token among them."""
        while True:
            request = await self.claim()
            record = PoolRequest.FromString(request.record)
            ids = list(script(record))[: record.max_new_tokens]
            ends = [n for n, token in enumerate(ids) if token in record.end_token_ids]
            if not ends:
                await self.answer(request, ids)
                continue
            ids = ids[: ends[0] + 1]
            await self.answer(request, ids, Reason.STOP_TOKEN if ids[-1] in record.stop_token_ids else Reason.EOS)


@dataclass
class Serving:
    """A running endpoint and ways to reach it."""

    app: EndpointApp
    addresses: dict[str, str]
    stub: OrcaStub
    channel: grpc.aio.Channel

    @property
    def http(self) -> str:
        return f"http://{self.addresses['http']}"

    async def quiet(self) -> None:
        """Waits until no call is open and all detaches are sent."""
        async with asyncio.timeout(60):
            await self.app.delivery.idle()
            await self.app.delivery.settled(60)


@dataclass
class World:
    """One pool with an engine that formed, and one endpoint."""

    redis_url: str
    name: str
    model: Path
    pool: Pool
    engine: Engine
    serving: Serving

    @property
    def stub(self) -> OrcaStub:
        return self.serving.stub

    @asynccontextmanager
    async def background(self, script: Callable[[PoolRequest], Sequence[int]]) -> AsyncIterator[None]:
        """Inside, the engine answers all requests by a script."""
        task = asyncio.create_task(self.engine.serve(script))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def serving(redis_url: str, pool: str, model: Path, **settings: Any) -> AsyncIterator[Serving]:
    """An endpoint in this event loop, ready."""
    app = EndpointApp(EndpointSettings.load(redis_url=redis_url, pool=pool, model=str(model), **settings))
    options = [("grpc.max_send_message_length", -1)]
    try:
        addresses = await app.start()
        async with grpc.aio.insecure_channel(addresses["grpc"], options=options) as channel:
            yield Serving(app, addresses, OrcaStub(channel), channel)
    finally:
        await app.close()


@asynccontextmanager
async def world(redis_url: str, model: Path, *, slots: int = SLOTS, **settings: Any) -> AsyncIterator[World]:
    name = f"test-{secrets.token_hex(4)}"
    async with Pool(redis_url, name, patience=20) as pool:  # the test's own, which is not what is tested
        engine = Engine(pool)
        await engine.form(slots)
        async with serving(redis_url, name, model, **settings) as started:
            sweeping = asyncio.create_task(engine.sweep())
            try:
                await until(lambda: started.app.endpoint.not_ready() is None)
                yield World(redis_url, name, model, pool, engine, started)
            finally:
                sweeping.cancel()
                await asyncio.gather(sweeping, return_exceptions=True)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for a condition that other tasks make true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def generation(ids: Sequence[int] = (5, 6, 7), max_new_tokens: int = 8, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_new_tokens=max_new_tokens, **fields)


def encode(orca: World, text: str, special: bool = True) -> list[int]:
    """A text's token ids. special: with those around every prompt."""
    assert orca.serving.app.vocabulary is not None
    return orca.serving.app.vocabulary.encode(text, special)


async def lose_entry(redis: Redis, pool: str, endpoint: str) -> None:
    """Gives the next number of an endpoint's delivery stream to an entry that nobody gets, if the stream exists."""
    script = """
    local id = redis.call('XADD', KEYS[1], 'NOMKSTREAM', '0-*', 'e', '', 'p', '')
    return id and redis.call('XDEL', KEYS[1], id)
    """
    await redis.eval(script, 1, f"orca:{{{pool}}}:delivery:{endpoint}")  # type: ignore[misc]


async def collect(call: Any) -> list[pb.GenerateResponse]:
    responses = []
    while isinstance(response := await call.read(), pb.GenerateResponse):  # the end is another object
        responses.append(response)
    return responses


async def read(call: Any, count: int) -> list[pb.GenerateResponse]:
    """The next responses, until they hold so many events: Accepted, tokens and Finished count one each."""
    responses: list[pb.GenerateResponse] = []
    while (held := sum(events_in(response) for response in responses)) < count:
        response = await call.read()
        assert isinstance(response, pb.GenerateResponse)
        responses.append(response)
    assert held == count
    return responses


def events_in(response: pb.GenerateResponse) -> int:
    return response.HasField("accepted") + len(response.tokens) + response.HasField("finished")


def tokens_of(responses: Sequence[pb.GenerateResponse]) -> list[pb.Token]:
    return [token for response in responses for token in response.tokens]


def ids_of(responses: Sequence[pb.GenerateResponse]) -> list[int]:
    """The token ids. Checks that their indices have no hole."""
    tokens = tokens_of(responses)
    assert [token.index for token in tokens] == list(range(tokens[0].index, tokens[0].index + len(tokens)))
    return [token.token_id for token in tokens]


def text_of(responses: Sequence[pb.GenerateResponse]) -> str:
    return "".join("".join(t.text for t in response.tokens) + response.finished.text for response in responses)


def detail_of(error: grpc.aio.AioRpcError, kind: M) -> M:
    """The google.rpc detail of this kind that an error carries."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:  # type: ignore[arg-type]
                if detail.Unpack(kind):
                    return kind
    raise AssertionError(f"no {type(kind).__name__} in {error}")


def field_of(error: grpc.aio.AioRpcError) -> str:
    """The field that an error names."""
    return detail_of(error, error_details_pb2.BadRequest()).field_violations[0].field
