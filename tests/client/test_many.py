"""Many prompts at once: the order of the answers, and both clients against a scripted endpoint."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from client.conftest import Stage
from client.scripted import FINISH, Act, Face, Script, Threads
from hypothesis import given
from hypothesis import strategies as st

from orca_client import Answer, FinishReason, InvalidArgument
from orca_client.many import Many, Prompt
from orca_common import errors

Connect = Callable[..., Any]


def answer(position: int, prompt: Prompt) -> Answer:
    return Answer(position, prompt, f"r{position}", "", (), None, None)


@given(
    count=st.integers(0, 12), concurrency=st.integers(1, 5), picks=st.lists(st.integers(0, 4)), in_order=st.booleans()
)
def test_every_prompt_once(count: int, concurrency: int, picks: list[int], in_order: bool) -> None:
    """Whichever prompt ends next: never more than `concurrency` run, each is answered once, in order if asked."""
    told: list[tuple[int, int | None]] = []
    many = Many([[n] for n in range(count)], concurrency, in_order, lambda *progress: told.append(progress))
    running: list[tuple[int, Prompt]] = []
    given_out: list[int] = []
    ended: list[int] = []
    for pick in [*picks, *[0] * count]:
        running += many.start()
        assert len(running) == many.running == min(concurrency, count - len(ended))
        if not running:
            break
        position, prompt = running.pop(pick % len(running))
        ended.append(position)
        given_out += [given.position for given in many.end(answer(position, prompt))]
    assert given_out == (list(range(count)) if in_order else ended)
    assert sorted(ended) == list(range(count))
    assert told == [(n + 1, count) for n in range(count)]


def test_what_is_no_batch() -> None:
    with pytest.raises(InvalidArgument, match="concurrency: must be at least 1"):
        Many(["a"], 0, True)
    with pytest.raises(InvalidArgument, match="several prompts, not one"):
        Many("a", 1, True)


async def answers(face: Face, iterator: Any) -> AsyncGenerator[Answer]:
    """The answers as they come, whichever client they are from."""
    if isinstance(face, Threads):
        while (answer := await asyncio.to_thread(next, iterator, None)) is not None:
            yield answer
    else:
        async for answer in iterator:
            yield answer


async def leave(face: Face, iterator: Any) -> None:
    await (asyncio.to_thread(iterator.close) if isinstance(face, Threads) else iterator.aclose())


async def test_answers_in_order(stage: Stage, face: Face, connect: Connect) -> None:
    """A prompt that fails, here or at the server, has its error in its answer; the others go on."""
    script = Script(Act(upto=2, end=errors.DataLoss("the pool lost tokens")))
    client = connect((await stage.endpoint(script)).address)
    prompts: Sequence[Any] = ["a", b"no text", "c", [1, 2]]
    told: list[tuple[int, int | None]] = []
    got = client.generate_many(prompts, max_new_tokens=6, concurrency=1, progress=lambda *p: told.append(p))
    lost, refused, *good = [answer async for answer in answers(face, got)]
    assert (lost.position, str(lost.error), len(lost.tokens), lost.text) == (0, "the pool lost tokens", 2, "")
    assert (refused.prompt, refused.request_id, refused.finished) == (b"no text", "", None)
    assert isinstance(refused.error, InvalidArgument)
    assert [answer.position for answer in good] == [2, 3]
    for answer in good:
        assert answer.text == " w0 w1 w2 w3 w4 w5!"
        assert answer.finished is not None
        assert answer.finished.reason is FinishReason.LENGTH
    assert told == [(n, 4) for n in (1, 2, 3, 4)]
    assert [call.request.text for call in script.calls] == ["a", "c", ""]
    assert {call.request.stream_interval for call in script.calls} == {16}, "nobody reads along"


async def test_answers_as_they_come(stage: Stage, face: Face, connect: Connect) -> None:
    """The slow first prompt holds nobody up. When the iteration is left, its request is cancelled."""
    script = Script(Act(upto=1), FINISH, FINISH)
    client = connect((await stage.endpoint(script)).address)

    def prompts() -> Any:
        yield from "abc"

    got = client.generate_many(prompts(), max_new_tokens=6, concurrency=2, in_order=False)
    reader = answers(face, got)
    first = await anext(reader)
    second = await anext(reader)
    slow = next(
        call.request.request_id
        for call in script.calls
        if call.request.request_id not in {first.request_id, second.request_id}
    )
    await script.said.get()  # a call that ends before the endpoint hangs is not seen to be left
    await reader.aclose()
    await leave(face, got)
    await script.left.get()
    await face.run(client.close)
    assert script.cancelled == [slow]


async def test_bounded_concurrency(stage: Stage, face: Face, connect: Connect) -> None:
    script = Script(*[Act(upto=1)] * 3)
    client = connect((await stage.endpoint(script)).address)
    got = client.generate_many(["x"] * 10, max_new_tokens=6, concurrency=3)
    reading = asyncio.ensure_future(anext(answers(face, got)))
    for _ in range(3):
        await script.said.get()
    assert len(script.calls) == 3
    await face.run(client.close)
    assert (await reading).error is not None
