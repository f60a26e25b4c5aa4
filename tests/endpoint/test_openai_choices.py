"""n, best_of, echo and logprobs of the OpenAI door, as OpenAI's client and lm-evaluation-harness ask for them."""

import asyncio
import json
import weakref
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx2 as httpx
import pytest
from endpoint.harness import World, encode, until
from openai import AsyncOpenAI, BadRequestError

from orca.v1.orca_pb2 import GenerateRequest
from orca.v1.pool_pb2 import PoolRequest
from orca_endpoint.calls.call import Call
from orca_endpoint.calls.events import PromptToken, Token, TopToken
from orca_endpoint.openai.answer import Choice
from orca_endpoint.openai.completions import method, request
from orca_endpoint.openai.completions.answer import Logprobs
from orca_endpoint.openai.completions.method import best
from orca_endpoint.openai.completions.request import parse
from orca_endpoint.openai.generations import AT_ONCE, Merged
from orca_endpoint.openai.request import generation, seed_of_sample


def spell(orca: World, token_id: int) -> str:
    return orca.serving.app.endpoint.spell(token_id)


async def test_several_choices(orca: World, client: AsyncOpenAI) -> None:
    """Each has a request and a seed of its own; the prompt is counted once."""
    seen: list[PoolRequest] = []

    def script(record: PoolRequest) -> list[int]:
        seen.append(record)
        return encode(orca, "abc"[record.sampling.seed % 3]) * 2

    async with orca.background(script):
        answer = await client.completions.create(model="tiny", prompt=["a", "b"], n=3, max_tokens=2, seed=7)
        again = await client.completions.create(model="tiny", prompt=["a", "b"], n=3, max_tokens=2, seed=7)
    seeds = [7, seed_of_sample(7, 1), seed_of_sample(7, 2)]
    assert sorted(record.sampling.seed for record in seen[:6]) == sorted(seeds * 2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == ["abc"[seed % 3] * 2 for seed in seeds] * 2
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 12)
    assert sorted(record.request_id for record in seen[:6]) == [f"{answer.id}-{k}" for k in range(6)]


async def test_the_generations_of_a_prompt_are_tokenized_once(
    orca: World, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary, seen = orca.serving.app.vocabulary, list[str]()
    prompts: list[list[int]] = []
    assert vocabulary is not None
    encode = vocabulary.encode

    def counting(text: str, special: bool = True) -> list[int]:
        seen.append(text)
        return encode(text, special)

    def script(record: PoolRequest) -> list[int]:
        prompts.append(list(record.prompt_ids))
        return [10]

    monkeypatch.setattr(vocabulary, "encode", counting)
    async with orca.background(script):
        await client.completions.create(model="tiny", prompt=["the", "pool"], n=2, best_of=3, max_tokens=1)
    assert seen == ["the", "pool"]
    assert sorted(prompts) == sorted([encode("the")] * 3 + [encode("pool")] * 3)


async def test_many_generations_are_made_begun_and_released_in_several_turns(
    orca: World, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of others go on meanwhile: 1,700 of them held the loop for 8 ms at each of these."""
    endpoint, loop = orca.serving.app.endpoint, asyncio.get_running_loop()
    generate, pump, turns, now = endpoint.generate, Merged._pump, defaultdict[str, list[int]](list), Counter[str]()

    def count(what: str) -> None:
        if not now[what]:
            loop.call_soon(lambda: turns[what].append(now.pop(what)))
        now[what] += 1

    calls: list[weakref.finalize[[str], Any]] = []

    def made(common: GenerateRequest, k: int) -> GenerateRequest:
        count("made")
        return generation(common, k)

    def chosen(echoed: str | None) -> Choice:
        choice = Choice(echoed)
        weakref.finalize(choice, count, "choices")
        return choice

    def begun(merged: Merged, n: int, call: Call) -> Coroutine[Any, Any, None]:
        count("begun")
        return pump(merged, n, call)

    async def opened(*arguments: Any, **more: Any) -> Call:
        count("opened")
        call = await generate(*arguments, **more)
        calls.append(weakref.finalize(call, count, "released"))
        return call

    monkeypatch.setattr(request, "generation", made)
    monkeypatch.setattr(method, "Choice", chosen)
    monkeypatch.setattr(Merged, "_pump", begun)
    monkeypatch.setattr(endpoint, "generate", opened)
    async with orca.background(lambda record: [10]):
        await client.completions.create(model="tiny", prompt=[5, 6], n=60, max_tokens=1, echo=True)
    await until(lambda: (sum(turns["released"]), sum(turns["choices"])) >= (59, 60))
    calls[-1].detach()  # the reader of the delivery stream still names this call
    assert {what: sum(turns[what]) for what in ("opened", "begun")} == {"opened": 60, "begun": 60}
    assert max(map(max, turns.values())) <= 2 * AT_ONCE, turns


async def test_many_generations_end_in_several_turns(
    orca: World, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where their client leaves, or the last of them is refused."""
    loop, report, pump = asyncio.get_running_loop(), Call._report, Merged._pump
    turns, now = list[int](), Counter[str]()

    def begun(merged: Merged, n: int, call: Call) -> Coroutine[Any, Any, None]:
        now["begun"] += 1
        return pump(merged, n, call)

    def ended(call: Call, error: BaseException | None) -> None:
        if not now["ended"]:
            loop.call_soon(lambda: turns.append(now.pop("ended")))
        now["ended"] += 1
        report(call, error)

    monkeypatch.setattr(Merged, "_pump", begun)
    monkeypatch.setattr(Call, "_report", ended)
    leaving = asyncio.create_task(client.completions.create(model="tiny", prompt=[5, 6], n=60, max_tokens=1))
    await until(lambda: now["begun"] == 60)
    leaving.cancel()
    await until(lambda: sum(turns) == 60)
    with pytest.raises(BadRequestError):
        await client.completions.create(model="tiny", prompt=[*[[5, 6]] * 59, [5] * 1000], max_tokens=1)
    assert sum(turns) == 60 + 59
    assert max(turns) <= 2 * AT_ONCE, turns


async def test_a_prompt_that_is_refused_is_not_spelled(
    orca: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens may be far more than the model has positions, and no bound holds before it is checked."""
    vocabulary, spelled = orca.serving.app.vocabulary, list[int]()
    assert vocabulary is not None
    texts = vocabulary.texts

    def counting(ids: Sequence[int]) -> list[str]:
        spelled.append(len(ids))
        return texts(ids)

    monkeypatch.setattr(vocabulary, "texts", counting)
    body = {"model": "tiny", "prompt": [5] * 1000, "max_tokens": 1, "echo": True}
    answer = await http.post("/v1/completions", json=body)
    assert (answer.status_code, spelled) == (400, [])
    async with orca.background(lambda record: [10]):
        answer = await http.post("/v1/completions", json=body | {"prompt": [5]})
    assert (answer.status_code, spelled) == (200, [1])


async def test_several_choices_of_a_stream(orca: World, client: AsyncOpenAI) -> None:
    async with orca.background(lambda record: [10, 11]):
        stream = await client.completions.create(model="tiny", prompt="a", n=2, max_tokens=2, stream=True)
        ends = [chunk.choices[0].index async for chunk in stream if chunk.choices[0].finish_reason]
    assert sorted(ends) == [0, 1]


async def test_the_usage_so_far_in_each_chunk(orca: World, client: AsyncOpenAI) -> None:
    """guidellm and others ask for it: they count by it."""
    for end in (False, True):
        options: Any = {"continuous_usage_stats": True, "include_usage": end}
        async with orca.background(lambda record: [10, 11, 12]):
            stream = await client.completions.create(
                model="tiny", prompt="a", max_tokens=3, n=2, stream=True, stream_options=options
            )
            chunks = [chunk async for chunk in stream]
        for k in range(2):
            of_choice = [chunk.usage for chunk in chunks if chunk.choices and chunk.choices[0].index == k]
            counts = [(one.prompt_tokens, one.completion_tokens, one.total_tokens) for one in of_choice if one]
            assert counts == sorted(counts)
            assert (len(counts), counts[-1]) == (len(of_choice), (1, 3, 4))
        last = chunks[-1]
        assert (not last.choices, last.usage is not None and last.usage.completion_tokens) == (end, 6 if end else 3)


async def test_the_best_of_several(orca: World, client: AsyncOpenAI) -> None:
    """All were generated, so all are counted. Their logprobs are not shown to a caller who did not ask."""
    seen: list[PoolRequest] = []

    def script(record: PoolRequest) -> list[int]:
        seen.append(record)
        return [10, 11]

    async with orca.background(script):
        answer = await client.completions.create(model="tiny", prompt="a", n=2, best_of=4, max_tokens=2)
    assert (len(seen), len(answer.choices)) == (4, 2)
    assert all(record.sampling.logprobs for record in seen)
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 8)


def test_the_best_have_the_highest_mean_logprob() -> None:
    def choice(*logprobs: float) -> Choice:
        made = Choice()
        made.tokens += [Token(n, 5, "", logprob, 1, "e") for n, logprob in enumerate(logprobs)]
        return made

    choices = [choice(-3), choice(-1, -1, -1), choice(-2, -0.5), choice(-4), choice(), choice(-5)]
    assert best(choices, 2, 3) == [choices[1], choices[2], choices[3], choices[5]]
    assert best(choices, 3, 3) == choices


@pytest.mark.parametrize("wanted", [0, 1, 3])
async def test_top_logprobs(orca: World, client: AsyncOpenAI, wanted: int) -> None:
    ids = encode(orca, "the pool")
    async with orca.background(lambda record: ids):
        answer = await client.completions.create(model="tiny", prompt="a", max_tokens=len(ids), logprobs=wanted)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.5] * len(ids)
    assert logprobs.top_logprobs == [{spell(orca, i + n): -0.5 - n for n in range(max(wanted, 1))} for i in ids]


def test_the_chosen_token_is_one_more_when_it_is_not_among_the_best() -> None:
    token = Token(0, 7, "c", -4.0, 1, "e", (TopToken(5, "a", -0.5), TopToken(6, "b", -float("inf"))))
    found = Logprobs({5: "a", 6: "b", 7: "c"}.__getitem__).of([token], 3)
    assert found["top_logprobs"] == [{"a": -0.5, "b": -9999.0, "c": -4.0}]
    assert found["text_offset"] == [3]
    json.dumps(found, allow_nan=False)


def test_offsets_count_what_stands_in_the_text() -> None:
    """Neither a token that the tokenizer puts before a prompt, nor the space that it puts before its first word."""
    places = [PromptToken(1, "<s>", None, ()), PromptToken(2, " Orca", -1.0, ()), Token(0, 3, " all", -2.0, 1, "e")]
    names = {1: "<s>", 2: " Orca", 3: " all"}
    found = Logprobs(names.__getitem__).of(places, 0, "Orca all")
    assert (found["tokens"], found["text_offset"]) == (["<s>", " Orca", " all"], [0, 0, 4])


async def test_a_part_of_a_character_is_spelled_as_openai_does(orca: World, client: AsyncOpenAI) -> None:
    """The chosen token is among the keys of its most probable ones, by which evaluations see whether it was greedy."""
    ids = encode(orca, "東京 😀")
    async with orca.background(lambda record: ids):
        answer = await client.completions.create(model="tiny", prompt="a", max_tokens=len(ids), logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "東京 😀"
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens == [spell(orca, i) for i in ids]
    assert any(token.startswith("bytes:\\x") for token in logprobs.tokens)
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    shown = [
        b"".join(orca.serving.app.endpoint.token_bytes(i) for i in ids[:n]).decode(errors="ignore")
        for n in range(len(ids))
    ]
    assert logprobs.text_offset == [len(text) for text in shown]


@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo(orca: World, client: AsyncOpenAI, as_ids: bool) -> None:
    made = encode(orca, " holds")
    prompt: Any = encode(orca, "the pool 東京") if as_ids else "the pool 東京"
    async with orca.background(lambda record: made):
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=len(made), echo=True)
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=len(made), echo=True, stream=True, logprobs=1
        )
        chunks = [chunk async for chunk in stream]
    assert answer.choices[0].text == "the pool 東京 holds"
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the pool 東京 holds"
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    tokens = [token for part in parts for token in part.tokens or []]
    offsets = [offset for part in parts for offset in part.text_offset or []]
    assert "".join(tokens) == "the pool 東京 holds"
    assert offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]


async def test_the_request_of_lm_evaluation_harness(orca: World) -> None:
    """`local-completions` asks for loglikelihoods so, and reads the answer so (lm_eval 0.4.13)."""
    contexts, continuations = [[5, 6, 7], [8, 9]], [[10], [11, 12, 13]]
    tokens = [context + rest for context, rest in zip(contexts, continuations, strict=True)]
    payload = {
        "model": "tiny",
        "prompt": tokens,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    async with orca.background(lambda record: [20]), httpx.AsyncClient(base_url=orca.serving.http) as http:
        answer = await http.post("/v1/completions", json=payload)
        alone = await http.post("/v1/completions", json={**payload, "max_tokens": 0})
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    for choice, context, whole in zip(choices, contexts, tokens, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(whole) + 1
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        mine = logprobs["token_logprobs"][len(context) : -1]
        assert mine == [-n for n in range(len(context), len(whole))]
        tops = logprobs["top_logprobs"][len(context) : -1]
        assert [max(top.values()) for top in tops] == [-0.5] * len(mine)
    assert answer.json()["usage"] == {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    for choice, whole in zip(alone.json()["choices"], tokens, strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(whole)
        assert choice["text"] == "".join(choice["logprobs"]["tokens"])
        assert choice["finish_reason"] == "length"
    assert alone.json()["usage"] == {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9}


def test_neutral_values_make_a_plain_request() -> None:
    neutral = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "suffix": "",
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
        "min_p": 0,
        "top_k": -1,
        "logit_bias": {},
        "logprobs": None,
        "metadata": {},
        "store": False,
        "user": "",
        "detach_grace": 0,
        "stream": False,
        "stream_options": None,
    }
    plain = parse(b'{"prompt": "a"}', 32)
    same = parse(json.dumps({"prompt": "a", **neutral}).encode(), 32)
    assert same == plain
