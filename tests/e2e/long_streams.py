"""Streams over all features for `long_run.py`, as their clients read them: exactly on, wherever their endpoint dies.

gRPC is read by our client library, completions and chats as docs/openai.md says (`Last-Event-ID`, `from`), responses by
OpenAI's library. All that a stream brings becomes one string, so that two runs of a request compare byte for byte.
"""

import asyncio
import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx2 as httpx
from openai import APIError, APIStatusError, AsyncOpenAI
from schemas import a_schema
from tool_templates import some_tools

from orca_client import Accepted, AsyncOrcaClient, OrcaError

BYTES = 256  # ids of the tokens that are bytes
SILENT = 1.5  # seconds without a byte after which a client leaves an endpoint, which sends comments more often
COMMENTS = 0.4  # seconds of silence before a comment
AVOIDED = 5.0  # seconds for which an endpoint that failed is called after the others
PAUSE = 0.05  # seconds between two calls
GRACE = 60  # seconds for which a request lives on without a call
LONGEST = 120.0  # seconds of a stream, all calls together
AGAIN = (429, 503)  # statuses that are answered with another call
ID = "x-orca-request"  # the header with an answer's id
ENDS = ("response.completed", "response.incomplete")
HELD = ("response, tools",)  # features whose tokens are held back for long, so that their waits tell little
OF_A_RUN = ("iteration", "engine", "timings", "cached_tokens")  # of a token, or of an end: another one in each run
TIMES = re.compile(r'(?<=ed_at": )[0-9.]+')  # of a response
CACHED_OF = "prompt_tokens_details"  # of a usage: cached tokens alone, other ones in each run
CACHED = re.compile(r'(?<="cached_tokens": )[0-9]+')  # of a response's prompt
CALL = re.compile(r'(?<="call_id": ")[^"]+')
GRAMMAR = 'start: N ("+" N){1,9}\nN: /[1-9][0-9]{0,2}/'
REGEXES = (r"((ab|cd){3} ){6}[0-9]{3}", r"[a-f]{8,40}", r"-?(0|[1-9][0-9]{8})(\.[0-9]{1,30})?", "(é{1,3}x){9}")


class Wrong(Exception):
    """A stream has ended as it should not. `kind` is counted, the message is for a reader."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


@dataclass(frozen=True)
class Ask:
    """A request. way: the door and method that it takes; body: what it sends there."""

    feature: str
    way: str
    body: Mapping[str, Any]


class Wait:
    """A stream that is open: it waits for its next token."""

    def __init__(self, waits: "Waits", feature: str) -> None:
        self._waits, self._feature = waits, feature
        self._timed = feature not in HELD
        self.since, self.begun = time.monotonic(), False

    def came(self) -> None:
        """A token has come, or the end."""
        now = time.monotonic()
        if self._timed:
            self._waits.waited(now - max(self.since, self._waits.since), self.begun, self._feature)
        self.since, self.begun = now, True

    def end(self) -> None:
        """The whole stream has come."""
        self.came()
        self._waits.open.discard(self)


class Waits:
    """How long the streams that are open have waited since `start`. Seconds.

    inside: the longest wait for a token that was not a stream's first, or for its end; first: for a first one;
    of: the feature of the stream that waited longest.
    """

    def __init__(self) -> None:
        self.of = ""
        self.since = self.inside = self.first = 0.0
        self.open: set[Wait] = set()

    def start(self) -> None:
        """Begins anew: what was waited for until now counts no more."""
        self.since, self.inside, self.first, self.of = time.monotonic(), 0.0, 0.0, ""

    def waited(self, seconds: float, begun: bool, feature: str) -> None:
        """A stream of a feature has waited; begun: for another token than its first."""
        if seconds > max(self.inside, self.first):
            self.of = feature
        if begun:
            self.inside = max(self.inside, seconds)
        else:
            self.first = max(self.first, seconds)

    @contextmanager
    def streams(self, feature: str, count: int = 1) -> Iterator[list[Wait]]:
        """Some streams, which are open while the block runs and they have not ended."""
        streams = [Wait(self, feature) for _ in range(count)]
        self.open.update(streams)
        try:
            yield streams
        finally:
            self.open.difference_update(streams)

    async def settled(self) -> None:
        """Waits until each stream that is open now has had a token, or has ended."""
        now = time.monotonic()
        while any(stream.since <= now for stream in self.open):
            await asyncio.sleep(0.02)


# -- requests


def asks(seed: int, count: int, vocabulary: int, *, chats: bool, encoder: bool) -> list[Ask]:
    """Requests of all features in turn, drawn by the seed. chats: the model has a template that takes tools; encoder:
    it has an encoder, whose inputs have no logprobs."""
    draw = random.Random(f"asks {seed}")
    makers = [_greedy, _drawn, _scored, _stopped, _regex, _schema, _grammar, _completion, _choices]
    if chats:
        makers += [_called, _chat, _chat_choices, _chat_schema, _chat_tools, _response, _response_tools]
    made = [maker(draw, vocabulary) for maker, _ in zip(itertools.cycle(makers), range(count), strict=False)]
    if encoder:
        made = [
            Ask(one.feature, one.way, {k: v for k, v in one.body.items() if k != "prompt_logprobs"}) for one in made
        ]
    return made


def _prompt(draw: random.Random, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(draw.randint(1, 48))]


def _sampling(draw: random.Random) -> dict[str, Any]:
    return {"temperature": draw.choice((0.7, 1.0, 1.5)), "top_p": draw.choice((0.8, 1.0)), "seed": draw.getrandbits(60)}


def _length(draw: random.Random) -> int:
    return draw.randint(16, 64)


def _greedy(draw: random.Random, vocabulary: int) -> Ask:
    body = {"prompt": _prompt(draw, vocabulary), "max_new_tokens": _length(draw), "ignore_eos": True}
    return Ask("greedy", "generate", body)


def _drawn(draw: random.Random, vocabulary: int) -> Ask:
    body = {"prompt": _prompt(draw, vocabulary), "max_new_tokens": _length(draw), **_sampling(draw), "top_k": 50}
    body |= {"repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 0.7, "min_p": 0.02}
    return Ask("seed, penalties", "generate", body)


def _scored(draw: random.Random, vocabulary: int) -> Ask:
    body = {"prompt": _prompt(draw, vocabulary), "max_new_tokens": _length(draw), **_sampling(draw)}
    return Ask("logprobs", "generate", {**body, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": True})


def _stopped(draw: random.Random, vocabulary: int) -> Ask:
    stop = ["".join(draw.choices("abcdefgh", k=2)) for _ in range(8)]
    body = {"prompt": f"text {draw.random()} é", "max_new_tokens": 64, **_sampling(draw), "stop": stop}
    return Ask("stop strings", "generate", body)


def _formed(draw: random.Random, vocabulary: int, **form: str) -> Ask:
    body = {"prompt": _prompt(draw, BYTES), "max_new_tokens": 100, "temperature": 1.0, "seed": draw.getrandbits(60)}
    return Ask(f"form: {next(iter(form))}", "generate", {**body, **form})


def _regex(draw: random.Random, vocabulary: int) -> Ask:
    return _formed(draw, vocabulary, regex=draw.choice(REGEXES))


def _schema(draw: random.Random, vocabulary: int) -> Ask:
    return _formed(draw, vocabulary, json_schema=json.dumps(a_schema(draw)))


def _grammar(draw: random.Random, vocabulary: int) -> Ask:
    return _formed(draw, vocabulary, grammar=GRAMMAR)


def _called(draw: random.Random, vocabulary: int) -> Ask:
    body: dict[str, Any] = {"prompt": [{"role": "user", "content": f"{draw.random()}"}], "max_new_tokens": 100}
    body |= {"tools": some_tools(draw, 1), "tool_choice": "required", "temperature": 1.0, "seed": draw.getrandbits(60)}
    return Ask("tools", "generate", body)


def _streamed(draw: random.Random, **body: Any) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}} if body.get("n", 1) == 1 else {}
    sampling = {"temperature": 1.0, "seed": draw.getrandbits(60)}
    return {"model": "model", "stream": True, "detach_grace": GRACE, **sampling, **usage, **body}


def _completion(draw: random.Random, vocabulary: int) -> Ask:
    body = _streamed(draw, prompt=_prompt(draw, vocabulary), max_tokens=_length(draw), logprobs=2)
    return Ask("completion, logprobs", "completions", body | {"stop": ["ab", "cd", "ef"]})


def _choices(draw: random.Random, vocabulary: int) -> Ask:
    body = _streamed(draw, prompt=_prompt(draw, vocabulary), max_tokens=_length(draw), logprobs=1, n=draw.randint(2, 3))
    return Ask("completion, n", "completions", body)


def _messages(draw: random.Random) -> list[dict[str, str]]:
    return [{"role": "system", "content": "é"}, {"role": "user", "content": f"{draw.random()}"}]


def _chat(draw: random.Random, vocabulary: int) -> Ask:
    body = _streamed(draw, messages=_messages(draw), max_tokens=_length(draw), logprobs=True, top_logprobs=2)
    return Ask("chat, logprobs", "chat/completions", body)


def _chat_choices(draw: random.Random, vocabulary: int) -> Ask:
    body = _streamed(draw, messages=_messages(draw), max_tokens=_length(draw), logprobs=True, n=2)
    return Ask("chat, n", "chat/completions", body)


def _chat_schema(draw: random.Random, vocabulary: int) -> Ask:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": a_schema(draw)}}
    body = _streamed(draw, messages=_messages(draw), max_tokens=100, response_format=form)
    return Ask("chat, form", "chat/completions", body)


def _chat_tools(draw: random.Random, vocabulary: int) -> Ask:
    choice = draw.choice(("required", "required", "auto"))
    tools: dict[str, Any] = {"tools": some_tools(draw, 1), "tool_choice": choice}
    # With logprobs each token is an event. Without, a call's beginning is held back until its name is whole.
    return Ask(
        "chat, tools",
        "chat/completions",
        _streamed(draw, messages=_messages(draw), max_tokens=100, logprobs=True, **tools),
    )


def _responded(draw: random.Random, **more: Any) -> dict[str, Any]:
    ours = {"seed": draw.getrandbits(60), "detach_grace": GRACE}
    return {"model": "model", "input": f"{draw.random()}", "temperature": 1.0, "extra_body": ours, **more}


def _response(draw: random.Random, vocabulary: int) -> Ask:
    return Ask("response", "responses", _responded(draw, max_output_tokens=_length(draw)))


def _response_tools(draw: random.Random, vocabulary: int) -> Ask:
    tools = [{"type": "function", **tool["function"]} for tool in some_tools(draw, 1)]
    return Ask(
        "response, tools", "responses", _responded(draw, max_output_tokens=100, tools=tools, tool_choice="required")
    )


# -- clients


class Clients:
    """Sends requests to the endpoints of a release, and reads their streams to the end."""

    def __init__(self, grpc: Sequence[str], http: Sequence[str], waits: Waits) -> None:
        """Addresses of the endpoints' doors."""
        self._waits = waits
        self._library = AsyncOrcaClient(grpc, keepalive=1.0)
        self._http = {f"http://{address}": httpx.AsyncClient(timeout=SILENT) for address in http}
        self._openai = {
            base: AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=SILENT)
            for base in self._http
        }
        self._turn = itertools.count()
        self._failed = dict.fromkeys(self._http, 0.0)  # when
        self.resumed = Counter[str]()  # streams over HTTP that were taken up again, by their path

    async def close(self) -> None:
        await self._library.close()
        for client in (*self._http.values(), *self._openai.values()):
            await (client.aclose() if isinstance(client, httpx.AsyncClient) else client.close())

    async def answer(self, ask: Ask) -> str:
        """Reads a request's stream, and returns all that it has brought. Raises Wrong."""
        ways = {"generate": self._generate, "responses": self._response}
        try:
            async with asyncio.timeout(LONGEST):
                if ask.way in ways:
                    return await ways[ask.way](ask)
                return await self._choices(ask)
        except TimeoutError:
            raise Wrong("no end", f"no end within {LONGEST:g} s") from None

    async def _generate(self, ask: Ask) -> str:
        brought: list[Any] = []
        with self._waits.streams(ask.feature) as (wait,):
            try:
                async with self._library.generate(**ask.body) as stream:
                    async for event in stream:
                        if not isinstance(event, Accepted):
                            brought.append({k: v for k, v in asdict(event).items() if k not in OF_A_RUN})
                            wait.came()
            except OrcaError as error:
                raise Wrong(type(error).__name__, str(error)) from error
            wait.end()
        return json.dumps(brought)

    def _door(self) -> str:
        """The base of the next endpoint that did not fail just now. Where all did: of the one that failed first."""
        turn, now = next(self._turn), time.monotonic()
        doors = [base for base, failed in self._failed.items() if now - failed > AVOIDED]
        return doors[turn % len(doors)] if doors else min(self._failed, key=self._failed.__getitem__)

    async def _choices(self, ask: Ask) -> str:
        """The choices of a completion or chat: the stream of all, and behind a break one of each that has not ended."""
        method, count = ask.way, ask.body.get("n", 1)
        with self._waits.streams(ask.feature, count) as waits:
            choices = [Choice(wait, count > 1) for wait in waits]
            while not (name := await self._all(method, ask.body, choices)):
                await asyncio.sleep(PAUSE)
            paths = [f"/v1/{method}/{name}-{n}" for n in range(count)] if count > 1 else [f"/v1/{method}/{name}"]
            self.resumed[method] += sum(not choice.ended for choice in choices)
            await asyncio.gather(*(self._rest(*one) for one in zip(paths, choices, strict=True)))
        return json.dumps([choice.brought() for choice in choices])

    async def _all(self, method: str, body: Mapping[str, Any], choices: Sequence["Choice"]) -> str:
        """Reads the choices of a request until their stream ends or breaks. Returns its id; "": it has none yet."""
        name = ""
        try:
            async for found, event in self._events("POST", f"/v1/{method}", json=body):
                name = found
                if event is not None:
                    of = event.data["choices"]
                    choices[of[0]["index"] if of else 0].take(event)
            for choice in choices:
                choice.end()
        except Broken:
            pass
        return name

    async def _rest(self, path: str, choice: "Choice") -> None:
        """Reads a choice to its end, from where the client is."""
        while not choice.ended:
            await asyncio.sleep(PAUSE)
            asked = {"from": choice.seen, "include_usage": "false" if choice.alone else "true"}
            with suppress(Broken):
                async for _, event in self._events("GET", path, params=asked):
                    if event is not None:
                        choice.take(event)
                choice.end()

    async def _events(self, method: str, path: str, **given: Any) -> AsyncIterator[tuple[str, "Event | None"]]:
        """The id of an answer, and its events but [DONE], with which it ends. Raises Broken, and Wrong."""
        base = self._door()
        event = Event()
        try:
            async with self._http[base].stream(method, base + path, **given) as answer:
                if answer.status_code in AGAIN:
                    raise Broken(f"status {answer.status_code}")
                if answer.status_code != httpx.codes.OK:
                    text = (await answer.aread()).decode()
                    raise Wrong(f"{method} {answer.status_code}", text)
                name = answer.headers[ID]
                yield name, None
                async for line in answer.aiter_lines():
                    if line.startswith("id: "):
                        event.number = line[4:]
                    elif line == "data: [DONE]":
                        return
                    elif line.startswith("data: "):
                        event.data = json.loads(line[6:])
                    elif not line and event.data:
                        if error := event.data.get("error"):
                            if error["type"] == "server_error":
                                raise Broken(error["message"])
                            raise Wrong(f"event {error['type']}", error["message"])
                        yield name, event
                        event = Event()
            raise Broken("no [DONE]")
        except httpx.TransportError as error:
            self._failed[base] = time.monotonic()
            raise Broken(repr(error)) from None

    async def _response(self, ask: Ask) -> str:
        """The events of a response, which OpenAI's client takes up behind the last one."""
        events: list[Any] = []
        name = ""
        with self._waits.streams(ask.feature) as (wait,):
            while not events or events[-1].type not in ENDS:
                base = self._door()
                responses = self._openai[base].responses
                try:
                    if name:
                        self.resumed[ask.way] += 1
                        last: dict[str, Any] = {"starting_after": len(events) - 1} if events else {}
                        stream: Any = await responses.retrieve(name, stream=True, **last)
                    else:
                        stream = await responses.create(**ask.body, stream=True)
                        name = stream.response.headers[ID]
                    async for event in stream:
                        if event.sequence_number != len(events):
                            raise Wrong("numbers", f"event {event.sequence_number} came where {len(events)} was due")
                        events.append(event)
                        wait.came()
                except APIStatusError as error:
                    if error.status_code not in AGAIN:
                        raise Wrong(f"response {error.status_code}", str(error)) from error
                    await asyncio.sleep(PAUSE)
                except (APIError, httpx.TransportError):
                    self._failed[base] = time.monotonic()
                    await asyncio.sleep(PAUSE)
            wait.end()
        whole = json.dumps([event.model_dump(mode="json") for event in events])
        calls: dict[str, str] = {}  # ids of calls, which are drawn: each by the order in which it came
        whole = CALL.sub(lambda found: calls.setdefault(found[0], f"call {len(calls)}"), whole)
        return CACHED.sub("0", TIMES.sub("0", whole.replace(name.rpartition("_")[2], "ID")))


class Broken(Exception):
    """A call over HTTP has ended before its answer."""


@dataclass
class Event:
    """A server-sent event; "": it has no id."""

    number: str = ""
    data: dict[str, Any] = field(default_factory=dict[str, Any])


class Choice:
    """A choice of a completion or chat, as far as a client has it. alone: it is one of several, whose events have no
    ids; its tokens have logprobs, by which they are counted."""

    def __init__(self, wait: Wait, alone: bool) -> None:
        self.alone, self.seen, self.ended = alone, "0", False
        self._wait = wait
        self._text, self._finish, self._usage = "", "", None
        self._scores: dict[str, list[Any]] = {}
        self._calls: dict[int, list[str]] = {}  # name and arguments, by number

    def take(self, event: Event) -> None:
        """Adds an event, and notes where to go on."""
        if usage := event.data.get("usage"):
            self._usage = {name: value for name, value in usage.items() if name != CACHED_OF}
        self.seen = event.number or self.seen
        for choice in event.data["choices"]:
            delta = choice.get("delta", {})
            text, scores = choice.get("text", delta.get("content")) or "", choice["logprobs"] or {}
            self._text += text
            for kind, values in scores.items():
                self._scores.setdefault(kind, []).extend(values or ())
            for call in delta.get("tool_calls", ()):
                name, arguments = self._calls.setdefault(call["index"], ["", ""])
                function = call["function"]
                self._calls[call["index"]] = [name + function.get("name", ""), arguments + function["arguments"]]
            self._finish = choice["finish_reason"] or self._finish
            if self.alone:
                tokens = str(max(map(len, self._scores.values()), default=0))
                self.seen = tokens if scores or not text else f"{tokens}.1"  # a text behind the last token
                if self._finish:
                    self.end()
                    return
        self._wait.came()

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._wait.end()

    def brought(self) -> Any:
        return self._text, self._calls, self._finish, self._scores, self._usage
