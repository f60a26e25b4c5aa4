"""The most probable tokens at each place and the prompt's logprobs, from the pool to a gRPC client."""

import asyncio
from typing import Any

import pytest
from endpoint.harness import World, collect, encode, generation, read, tokens_of

from orca.v1 import orca_pb2 as pb
from orca_pool.records import Reason


def asking(ids: list[int], **fields: Any) -> pb.GenerateRequest:
    return generation(ids, top_logprobs=2, prompt_logprobs=True, **fields)


def check_prompt(messages: list[pb.PromptToken], ids: list[int]) -> None:
    assert [message.token_id for message in messages] == ids
    assert not messages[0].HasField("logprob")
    assert not messages[0].top
    for n, message in enumerate(messages[1:], 1):
        assert message.logprob == -n
        assert [(top.token_id, top.logprob) for top in message.top] == [(ids[n], -0.5), (ids[n] + 1, -1.5)]


async def test_over_a_stream(orca: World) -> None:
    prompt, made = encode(orca, "東京 the pool"), encode(orca, "the 😺")
    async with orca.background(lambda record: made):
        responses = await collect(orca.stub.Generate(asking(prompt, max_new_tokens=len(made))))
    (with_prompt,) = [response for response in responses if response.prompt]
    assert with_prompt.tokens[0].index == 0
    check_prompt(list(with_prompt.prompt), prompt)
    assert "".join(message.text for message in with_prompt.prompt) == "東京 the pool"
    tokens = tokens_of(responses)
    assert [token.token_id for token in tokens] == made
    for token in tokens:
        assert token.logprob == -0.5
        assert [(top.token_id, top.logprob) for top in token.top] == [
            (token.token_id, -0.5),
            (token.token_id + 1, -1.5),
        ]
    spelled = [token.top[0].text for token in tokens]
    assert "bytes:" not in "".join(token.text for token in tokens)
    assert any(text.startswith("bytes:\\x") for text in spelled)  # a part of 😀
    assert spelled[0] == tokens[0].text


@pytest.mark.parametrize("from_index", [0, 2])
async def test_resume(orca: World, from_index: int) -> None:
    """The prompt comes again from index 0 on; the tops are those of the tokens that come."""
    prompt, made = [5, 6, 7], [20, 30, 40, 50]
    stream = orca.stub.Generate(asking(prompt, max_new_tokens=4, request_id=f"r-{from_index}", attempt=1))
    request = await orca.engine.claim()
    await orca.engine.commit(request, 0, made[:3])
    await read(stream, 4)
    again = orca.stub.Resume(pb.ResumeRequest(request_id=f"r-{from_index}", from_index=from_index, attempt=2))
    await read(again, 1 + 3 - from_index)
    await orca.engine.commit(request, 3, made[3:], Reason.LENGTH)
    rest = await collect(again)
    assert [[top.token_id for top in token.top] for token in tokens_of(rest)] == [[50, 51]]
    last = orca.stub.Resume(pb.ResumeRequest(request_id=f"r-{from_index}", from_index=from_index, attempt=3))
    responses = await collect(last)
    assert [[top.token_id for top in token.top] for token in tokens_of(responses)] == [
        [i, i + 1] for i in made[from_index:]
    ]
    shown = [message for response in responses for message in response.prompt]
    if from_index:
        assert not shown
    else:
        check_prompt(shown, prompt)


async def test_a_whole_answer(orca: World) -> None:
    prompt, made = [5, 6, 7], [20, 30]
    async with orca.background(lambda record: made):
        answer = await orca.stub.GenerateText(asking(prompt, max_new_tokens=2))
    check_prompt(list(answer.prompt), prompt)
    assert [[top.token_id for top in token.top] for token in answer.tokens] == [[20, 21], [30, 31]]
    assert list(answer.logprobs) == [-0.5, -0.5]


async def test_an_end_before_the_first_token(orca: World) -> None:
    """There are no logprobs of the prompt yet, and nobody waits for them."""
    stream = orca.stub.Generate(asking([5, 6], request_id="ends-early"))
    await read(stream, 1)
    await orca.engine.claim()
    await orca.stub.Cancel(pb.CancelRequest(request_id="ends-early"))
    async with asyncio.timeout(10):
        (end,) = await collect(stream)
    assert end.finished.reason == pb.FINISH_REASON_CANCELLED
