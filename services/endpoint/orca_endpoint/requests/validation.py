"""The checks of requests, for both doors. Each error names the field as the caller wrote it.

A `GenerateRequest` becomes `Work`: the pool's record and what a submit needs beside it. Otherwise InvalidArgument is
raised, or FailedPrecondition for what this model cannot do.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from orca.v1.orca_pb2 import (
    TOOL_CHOICE_NONE,
    TOOL_CHOICE_REQUIRED,
    CancelRequest,
    GenerateRequest,
    ResumeRequest,
)
from orca.v1.pool_pb2 import PoolRequest
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.checkpoint import Checkpoint
from orca_common.errors import ErrorReason, FailedPrecondition, InvalidArgument
from orca_common.reservation import Reservation

from ..settings import EndpointSettings
from ..text.tool_calls import Syntax
from ..text.vocabulary import Vocabulary
from .chats import Chats
from .forms import Form, FormCompiler, LeftOut
from .sampling import sampling_params
from .threads import TEXT_IN_LOOP, Threads
from .tools import TOOLS

MAX_ID = 128
REQUEST_ID = re.compile(r"[A-Za-z0-9._:~-]+")
MAX_ATTEMPT = (1 << 53) - 1  # Lua's numbers are exact up to this one
MAX_INTERVAL = 256  # tokens that may wait for one another


@dataclass(frozen=True)
class Work:
    """A valid request, ready for the pool."""

    record: PoolRequest
    body_digest: str  # see `body_digest` below
    attempt: int
    left_out: Sequence[LeftOut] = ()  # of the schemas that its answer follows

    @property
    def max_tokens(self) -> int:
        """Input tokens + max_new_tokens: the slots that the request fills at the end."""
        return len(self.record.prompt_ids) + self.record.max_new_tokens

    def upfront(self, reservation: Reservation | None) -> int:
        """Slots that must be free for the request to begin. Without an engine: `max_tokens`."""
        if reservation is None:
            return self.max_tokens
        return reservation.upfront(len(self.record.prompt_ids), self.record.max_new_tokens)


class Attempts:
    """Attempt numbers for callers that send none: the clock in microseconds, always growing."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last = max(self._last + 1, time.time_ns() // 1000)
        return self._last


class Validator:
    """Checks requests against one model and one endpoint's limits."""

    def __init__(
        self,
        settings: EndpointSettings,
        checkpoint: Checkpoint,
        vocabulary: Vocabulary | None,
        threads: Threads,
        chats: Chats,
        forms: FormCompiler,
        forced_end: int | None = None,
    ) -> None:
        """threads: tokenize long texts. forced_end: the token with which the model's longest answers end."""
        self._limits, self._model, self._vocabulary, self._threads = settings, checkpoint, vocabulary, threads
        self._chats, self._forms, self._forced_end = chats, forms, forced_end
        self._attempts = Attempts()

    async def generate(
        self,
        request: GenerateRequest,
        names: Mapping[str, str] | None = None,
        encoded: Sequence[int] | None = None,
        room: int | None = None,
        caller: str = "",
        loose: Collection[str] = (),
        adapter: str = "",
        open_end: bool = False,
    ) -> Work:
        """The work of a valid request; the caller adds `record.trace`. Raises InvalidArgument, FailedPrecondition, and
        ResourceExhausted when too many long texts wait.

        names: the caller's names of fields, where they differ from orca.v1's. encoded: the tokens of the request's
        prompt, where another request had the same. room: tokens that prompt and answer may have together in an engine,
        for a request that does not say how long its answer may be: a chat, or one with an `open_end`. caller: the
        tenant or host, whose turn it is. loose: fields with schemas of which an answer need only follow what can be
        enforced. adapter: the id of the one that the request's model names.
        """
        check = Fields(names or {})
        request_id = self.request_id(request.request_id) if request.request_id else f"req-{secrets.token_hex(12)}"
        attempt = self._attempt(request.attempt)
        grace = self._grace(request, check)
        if request.prompt_logprobs and (self._model.has_encoder or self._model.prefix_lm):
            field = check.name("prompt_logprobs")
            why = "has an encoder" if self._model.has_encoder else "is a prefix LM"
            raise FailedPrecondition(f"{field}: this model {why}: tokens of its prompts have no logprobs", field)
        sampling = sampling_params(request, request_id, self._model.vocab_size, check.error)
        stops = self._endings(request, check)
        self._interval(request.stream_interval, check)
        new, is_chat = request.max_new_tokens, request.WhichOneof("prompt") == "chat"
        if new < 1 and not (is_chat or open_end):
            raise check.error("max_new_tokens", "must be at least 1")
        syntax = self._chats.tool_syntax(request.chat, check) if is_chat else None
        form = await self._form(request, syntax, check, caller, loose)
        if form is not None:
            sampling = sampling if sampling is not None else SamplingParams()
            sampling.grammar = form.grammar
        prompt_ids = await self._prompt(request, check, encoded, new or 1, caller)
        if not new:
            left = min(room or self._model.max_positions, self._model.max_positions) - len(prompt_ids)
            new = max(min(self._chats.tokens or left, left), 1)
        # An answer with a form is cut where it is, and not made to look whole.
        if self._forced_end is not None and form is None and not request.ignore_eos:
            sampling = sampling if sampling is not None else SamplingParams()
            sampling.forced_end.token_id, sampling.forced_end.max_new_tokens = self._forced_end, new
        eos = () if request.ignore_eos else self._model.eos_token_ids
        if is_chat and eos and self._vocabulary is not None and self._vocabulary.end is not None:
            eos = (*eos, self._vocabulary.end)  # templates end an answer with the tokenizer's
        ends = sorted({*stops, *eos})
        if least := self._least(request, new, form is not None or bool(request.chat.tools), check):
            sampling = sampling if sampling is not None else SamplingParams()
            sampling.not_before.min_new_tokens = least
            sampling.not_before.token_ids.extend(ends)
        if adapter:
            sampling = sampling if sampling is not None else SamplingParams()
            sampling.adapter = adapter
        record = PoolRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            max_new_tokens=new,
            sampling=sampling,
            end_token_ids=ends,
            stop_token_ids=stops,
            stop=request.stop,
            detach_grace=grace,
            show_special_tokens=request.show_special_tokens,
            tool_syntax=syntax.name if syntax is not None and request.chat.tool_choice != TOOL_CHOICE_NONE else "",
        )
        digest = body_digest(request, request.model if adapter else "")
        return Work(record, digest, attempt, () if form is None else form.left_out)

    def resume(self, request: ResumeRequest) -> int:
        """Checks a ResumeRequest and returns its attempt. Raises InvalidArgument."""
        self.request_id(request.request_id)
        if request.from_index > self._model.max_positions:
            raise InvalidArgument("from_index", f"must be at most {self._model.max_positions}")
        if len(request.digest) not in {0, hashlib.sha1().digest_size}:
            raise InvalidArgument("digest", "must be the 20 bytes of a SHA-1, or empty")
        self._interval(request.stream_interval, Fields({}))
        return self._attempt(request.attempt)

    def cancel(self, request: CancelRequest) -> None:
        """Checks a CancelRequest. Raises InvalidArgument."""
        self.request_id(request.request_id)

    async def close(self) -> None:
        """Ends the processes that compile forms and render chats."""
        await self._forms.close()
        await self._chats.close()

    # -- the parts
    def request_id(self, request_id: str) -> str:
        """Checks the id of a request and returns it. Raises InvalidArgument."""
        if not request_id:
            raise InvalidArgument("request_id", "is missing")
        if len(request_id) > MAX_ID:
            raise InvalidArgument("request_id", f"has {len(request_id)} characters; at most {MAX_ID} are allowed")
        if not REQUEST_ID.fullmatch(request_id):
            raise InvalidArgument("request_id", "may hold only letters, digits and . _ : ~ -")
        return request_id

    def _attempt(self, attempt: int) -> int:
        if attempt > MAX_ATTEMPT:
            raise InvalidArgument("attempt", f"must be below 2^53; it is {attempt}")
        return attempt or self._attempts.next()

    def _interval(self, tokens: int, check: "Fields") -> None:
        if tokens > MAX_INTERVAL:
            raise check.error("stream_interval", f"is {tokens}; at most {MAX_INTERVAL} are allowed")

    def _grace(self, request: GenerateRequest, check: "Fields") -> float:
        grace, limit = request.detach_grace, self._limits.max_detach_grace
        if grace.seconds < 0 or not 0 <= grace.nanos <= 999_999_999:
            raise check.error("detach_grace", "must not be negative")
        seconds = grace.seconds + grace.nanos / 1e9
        if seconds > limit:
            raise check.error("detach_grace", f"is {seconds:g} s; at most {limit:g} s are allowed")
        return seconds

    def _endings(self, request: GenerateRequest, check: "Fields") -> Sequence[int]:
        """The tokens that end the answer: those of the request, and special tokens among its stop strings."""
        limits, special = self._limits, list[int]()
        if len(request.stop) > limits.max_stop_strings:
            raise check.error("stop", f"has {len(request.stop)} strings; at most {limits.max_stop_strings} are allowed")
        for n, stop in enumerate(request.stop):
            size = len(stop.encode())
            if size == 0:
                raise check.error("stop", "is an empty string", n)
            if size > limits.max_stop_bytes:
                raise check.error("stop", f"has {size} bytes; at most {limits.max_stop_bytes} are allowed", n)
            if self._vocabulary is not None:
                token, within = self._vocabulary.special_in(stop)
                if token is not None:
                    special.append(token)
                elif within is not None:
                    problem = f"holds the special token {within!r}, which has no text in an answer; give it alone"
                    raise check.error("stop", problem, n)
        if request.stop and self._vocabulary is None:
            problem = "stop: this model has no tokenizer.json and so no text; use stop_token_ids"
            raise FailedPrecondition(problem, "stop", reason=ErrorReason.NO_TOKENIZER)
        if len(request.stop_token_ids) > limits.max_stop_token_ids:
            count, limit = len(request.stop_token_ids), limits.max_stop_token_ids
            raise check.error("stop_token_ids", f"has {count} ids; at most {limit} are allowed")
        self._known(request.stop_token_ids, "stop_token_ids", check)
        return list(dict.fromkeys([*request.stop_token_ids, *special]))

    def _least(self, request: GenerateRequest, new: int, has_form: bool, check: "Fields") -> int:
        """Tokens that the answer has at least. new: those that it has at most."""
        least = request.min_new_tokens
        if least > new:
            raise check.error("min_new_tokens", f"is {least}, but the answer has at most {new} tokens")
        if least and (has_form or request.stop):
            why = "stop strings end an answer where they come" if request.stop else "a form says where its answer ends"
            raise check.error("min_new_tokens", f"must be 0 here: {why}")
        return least

    async def _form(
        self, request: GenerateRequest, syntax: Syntax | None, check: "Fields", caller: str, loose: Collection[str]
    ) -> Form | None:
        """The form that the answer is held to; None: it is free. syntax: of its calls, where the chat has tools."""
        form, found = request.WhichOneof("form"), None
        if form is None and syntax is None:
            return None
        if request.ignore_eos:
            field = check.name(form if form is not None else TOOLS)
            raise check.error("ignore_eos", f"must be false with {field}: the end of such an answer is such a token")
        if form is not None:
            found = await self._forms.grammar(form, getattr(request, form), check, caller, loose=form in loose)
        choice = request.chat.tool_choice
        if syntax is None or (choice == TOOL_CHOICE_NONE and found is not None):
            return found
        schema = None
        if form is not None and choice != TOOL_CHOICE_REQUIRED:
            field = check.name(TOOLS)
            if form != "json_schema":
                raise check.error(form, f"is not allowed with {field}; json_schema is")
            schema = request.json_schema
        tools = await self._forms.tools(request.chat, syntax.name, schema, check, caller, loose=TOOLS in loose)
        return Form(tools.grammar, [*(found.left_out if found is not None else ()), *tools.left_out])

    async def _prompt(
        self,
        request: GenerateRequest,
        check: "Fields",
        encoded: Sequence[int] | None,
        new: int,
        caller: str,
    ) -> Sequence[int]:
        """The prompt's tokens. new: those of the answer, for which there must be room."""
        match request.WhichOneof("prompt"):
            case "token_ids":
                field, ids = "token_ids.ids", request.token_ids.ids
                if not ids:
                    raise check.error(field, "the prompt is empty")
            case "text":
                field, ids = "text", await self._encoded(request.text, "text", check, encoded, new, caller)
            case "chat":
                field, chat = "chat.messages", request.chat
                self._spelled(field, check)
                text, mark = ("", "") if encoded else await self._chats.text(chat, check, caller)
                ids = await self._encoded(text, field, check, encoded, new, caller, special=False, mark=mark)
            case _:
                raise check.error("prompt", "is missing: give text, token ids, or messages")
        self._fits(len(ids), new, field, check)
        self._known(ids, field, check)
        return ids

    async def _encoded(
        self,
        text: str,
        field: str,
        check: "Fields",
        encoded: Sequence[int] | None,
        new: int,
        caller: str,
        special: bool = True,
        mark: str = "",
    ) -> Sequence[int]:
        """The tokens of a text. special: with those that the tokenizer puts around it. mark: in special tokens' names
        that are text."""
        if encoded:
            return encoded
        size, limit = len(text.encode()), self._limits.max_prompt_bytes
        if size > limit:
            raise check.error(field, f"the prompt has {size} bytes; at most {limit} are allowed")
        vocabulary = self._spelled(field, check)
        if vocabulary.longest_token:
            self._fits(-(-size // vocabulary.longest_token), new, field, check, "at least ")
        encode = partial(vocabulary.encode_marked, text, mark) if mark else partial(vocabulary.encode, text, special)
        ids = encode() if size <= TEXT_IN_LOOP else await self._threads.run(encode, caller)
        if not ids:
            raise check.error(field, "the prompt is empty" if not text else "the prompt has no tokens")
        return ids

    def _spelled(self, field: str, check: "Fields") -> Vocabulary:
        """The vocabulary. Raises FailedPrecondition where the model has none."""
        if self._vocabulary is None:
            name = check.name(field)
            problem = f"{name}: this model has no tokenizer.json; give the prompt as token ids"
            raise FailedPrecondition(problem, name, reason=ErrorReason.NO_TOKENIZER)
        return self._vocabulary

    def _fits(self, tokens: int, new: int, field: str, check: "Fields", about: str = "") -> None:
        limit = self._model.max_positions
        if tokens >= limit:
            raise check.error(field, f"the prompt has {about}{tokens} tokens; the model has {limit} positions")
        if tokens + new > limit:
            allowed = limit - tokens
            problem = f"is {new}, but the prompt has {about}{tokens} tokens and the model {limit} positions: "
            raise check.error("max_new_tokens", problem + f"at most {allowed} are allowed")

    def _known(self, ids: Sequence[int], field: str, check: "Fields") -> None:
        if ids and max(ids) >= self._model.vocab_size:
            n = next(n for n, i in enumerate(ids) if i >= self._model.vocab_size)
            problem = f"is {ids[n]}, but the vocabulary has {self._model.vocab_size} tokens"
            raise check.error(field, problem, n)


class Fields:
    """Makes errors that name the request's fields as the caller does."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def name(self, field: str) -> str:
        """The caller's name for a field of ours."""
        return self._names.get(field) or (field.removeprefix("sampling.") if self._names else field)

    def error(self, field: str, problem: str, position: int | None = None, place: str = "") -> InvalidArgument:
        """place: inside of the field, as ".properties.name"."""
        name = self.name(field) + place
        return InvalidArgument(name if position is None else f"{name}[{position}]", problem)


def body_digest(request: GenerateRequest, adapter: str = "") -> str:
    """SHA-256 of the request without id, attempt, grace, interval, and a model that is the endpoint's own.

    Two requests with the same body are the same generation.
    """
    body = GenerateRequest()
    body.CopyFrom(request)
    for field in ("request_id", "attempt", "detach_grace", "stream_interval", "model"):
        body.ClearField(field)
    body.model = adapter
    return hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()
