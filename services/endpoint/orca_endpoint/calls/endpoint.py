"""The work that both doors share: admit requests, open calls, describe the model."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from orca.v1.orca_pb2 import CancelRequest, Engine, GenerateRequest, GetModelResponse, ResumeRequest
from orca.v1.pool_pb2 import PoolRequest
from orca_common.block_keys import keys_of, root_by
from orca_common.checkpoint import Checkpoint
from orca_common.errors import (
    DeadlineExceeded,
    ErrorReason,
    InvalidArgument,
    NotFound,
    OrcaError,
    Unavailable,
    echo,
)
from orca_common.metrics import Metrics
from orca_common.priorities import CLASSES, FAIR, Grant, Priority, lift_of
from orca_common.reservation import Reservation
from orca_common.sampling import scores_prompt
from orca_common.telemetry import Telemetry, trace_id_of
from orca_pool.keys import scoped
from orca_pool.pool import Pool
from orca_pool.records import QueueLimits, Turn
from orca_pool.retry import reached
from orca_pool.wire import pack_keys

from ..requests.arrivals import Arrivals
from ..requests.chats import Chats
from ..requests.defaults import Defaults
from ..requests.forms import FormCompiler
from ..requests.limits import full
from ..requests.threads import Threads
from ..requests.validation import Fields, Validator
from ..settings import EndpointSettings
from ..text.chat_template import ChatTemplate
from ..text.vocabulary import Vocabulary
from .adapters import ServedAdapters
from .call import Call, CallLimits, Submission
from .delivery import Delivery
from .events import Event
from .line import Outcome, current_line
from .metrics import CallMetrics, Meter
from .recent import Recent
from .span import RequestSpan
from .transcript import Transcript

log = logging.getLogger(__name__)

# A Resume finds room up to so many times `max_calls`: its request runs, and its endpoint may have died. Two full
# endpoints can so take over from each other.
RESUME_ROOM = 2
WATCH = 0.1  # seconds between looks at whether an engine has formed
LOOK = 5.0  # seconds between looks at what the engines reserve, once one has
WAITING, ALL_WAITING = 1024, 4096  # large inputs of one caller, and of all, that may wait for a thread
TOKENIZING = 4  # threads that tokenize: the library does without Python's lock
TOKENS_IN_LOOP = 4096  # of a request that is shown, some 2 ms of the loop; of a prompt whose blocks get keys, 0.4 ms
ENGINES_SECONDS = 1.0  # for which the list of engines is told again
NAMED = 16  # models that a sentence names
MODEL_HEADER = "x-gateway-model-name"  # by which proxies choose among releases; docs/models.md


class Endpoint:
    """Serves clients of both doors: checks their requests and opens their calls.

    Towards clients it is not ready, ready or draining.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        checkpoint: Checkpoint,
        vocabulary: Vocabulary | None,
        template: ChatTemplate | None,
        defaults: Defaults,
        pool: Pool,
        delivery: Delivery,
        telemetry: Telemetry,
        metrics: Metrics,
        grant_of: Callable[[str], Grant],
    ) -> None:
        """defaults: of the sampling, for methods whose callers need not say how to draw. grant_of: a tenant's."""
        self.settings, self.checkpoint, self.defaults = settings, checkpoint, defaults
        self.telemetry, self.metrics = telemetry, CallMetrics(metrics)
        self.metrics.count_calls(lambda: delivery.count)
        self.name = settings.served_model_name or checkpoint.name
        self.adapters = ServedAdapters(settings, self.name, pool)
        self.delivery, self._grant_of = delivery, grant_of
        self._pool, self.vocabulary = pool, vocabulary
        # Parsing holds Python's lock, so the loop shares it with one thread only.
        self.large = Threads("large-inputs", 1, WAITING, ALL_WAITING)
        self.tokenizing = Threads("tokenizing", TOKENIZING, WAITING, ALL_WAITING)
        chat_tokens = defaults.max_new_tokens or settings.chat_tokens
        special = () if vocabulary is None or settings.control_tokens_in_chats else vocabulary.special_tokens
        self.chats = Chats(checkpoint.folder, template, settings.max_prompt_bytes, chat_tokens, special)
        forms = FormCompiler(checkpoint)
        self._validator = Validator(
            settings,
            checkpoint,
            vocabulary,
            self.tokenizing,
            self.chats,
            forms,
            defaults.forced_end,
        )
        self.arrivals = Arrivals()
        self._engines = Recent(pool.engine_infos, ENGINES_SECONDS)
        self._limits = CallLimits(settings.pool_patience, settings.call_buffer)
        self._queue_limits = QueueLimits(
            settings.max_waiting_bytes, settings.tenant_requests or None, settings.tenant_waiting_tokens or None
        )
        self._formed = False  # whether an engine has ever formed
        self._reservation: Reservation | None = None  # of the engine that formed last
        self._prefix = "off"  # whose keys and values requests begin with there
        self._slots: int | None = None  # of the largest engine
        self._validating = 0  # requests whose text is being tokenized
        self.draining = False

    async def close(self) -> None:
        """Ends the threads and processes of the validation."""
        self.large.close()
        self.tokenizing.close()
        await self._validator.close()

    # -- readiness
    def not_ready(self) -> str | None:
        """Why no request can be served now; None when requests can be served. Callable from any thread."""
        if self.draining:
            return "leaving"
        if not self.delivery.on_time():
            return "the request pool does not answer"
        if not self._formed:
            return "no engine has formed yet"
        return None

    async def watch(self) -> None:
        """Waits until an engine has formed."""
        while not self._formed:
            await self._look()
            if not self._formed:
                await asyncio.sleep(WATCH)
        log.info("an engine has formed")

    async def follow(self) -> None:
        """Keeps up with the slots that engines reserve. Ends with its task."""
        while True:
            await asyncio.sleep(LOOK)
            await self._look()

    async def _look(self) -> None:
        identity = await reached(self._pool.identity)
        if identity is not None and identity.slots > 0:
            self._formed, self._reservation, self._slots = True, identity.reservation, identity.slots
            self._prefix = identity.prefix

    # -- the methods of orca.v1.Orca
    async def generate(
        self,
        request: GenerateRequest,
        deadline: float | None,
        carrier: Mapping[str, str],
        names: Mapping[str, str] | None = None,
        *,
        tenant: str = "",
        host: str = "",
        encoded: Sequence[int] | None = None,
        loose: Collection[str] = (),
        kept: bytes = b"",
        exchange: str = "",
        open_end: bool = False,
    ) -> Call:
        """A call that will submit the request.

        deadline: a moment of the loop's clock. carrier: the caller's metadata, for the trace. names: the caller's names
        of the request's fields (see `validation`). tenant: whose key the caller sent; empty without keys. host: the
        caller's. encoded: the tokens of its prompt, where they are known. loose: fields with schemas of which the
        answer need only follow what can be enforced. kept: what is kept beside the request, as long
        as the pool keeps it. exchange: the id of the HTTP request that it came with. open_end: an answer to a prompt
        that is no chat need have no `max_new_tokens` either. Raises what the validation raises,
        and when no call is admitted.
        """
        operation = "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
        model = request.model if request.model in self.adapters.ids else self.name
        span = self._span("orca.request", "orca.submit", carrier, operation, model)
        with refused(span):
            self._admit(deadline, self.settings.max_calls)
            self.check_model(request.model)
            adapter = self.adapters.ids.get(request.model, "")  # it may be replaced while the request is read
            turn = self._turn(request.priority, Fields(names or {}), tenant)
            self._validating += 1
            try:
                work = await self._validator.generate(
                    request, names, encoded, self._slots, tenant or host, loose, adapter, open_end
                )
                keys = await self._keys(work.record, tenant, host)
            finally:
                self._validating -= 1
        if span is not None:
            span.validated(work.record)
        work.record.trace.update(trace_of(span, carrier))
        work.record.kept, work.record.exchange = kept, exchange
        for part in work.left_out:
            self.metrics.relaxed(part.keyword, part.function)
        return Call(
            self._pool,
            self.delivery,
            self._limits,
            Transcript(work.record.request_id, self.vocabulary),
            tenant=tenant,
            attempt=work.attempt,
            meter=self._meter(tenant),
            submission=Submission(
                work,
                work.upfront(self._reservation),
                keys,
                deadline,
                self.settings.max_waiting,
                self._queue_limits,
                tenant or host,
                turn,
                self.arrivals,
            ),
            deadline=deadline,
            span=span,
            interval=request.stream_interval,
        )

    async def _keys(self, record: PoolRequest, tenant: str, host: str) -> bytes:
        """Keys of a request's blocks, by which the pool finds the engine with most of its prefix; b"" without any."""
        rule = self._reservation
        if rule is None or scores_prompt(record.sampling):
            return b""
        root = root_by(self._prefix, tenant, record.sampling.adapter)
        if not root:
            return b""

        def made() -> bytes:
            return pack_keys(keys_of(root, record.prompt_ids, rule.block_size)[1:])

        if len(record.prompt_ids) <= TOKENS_IN_LOOP:
            return made()
        return await self.tokenizing.run(made, tenant or host)

    def resume(
        self, request: ResumeRequest, deadline: float | None, carrier: Mapping[str, str], *, tenant: str = ""
    ) -> Call:
        """A call that will attach to a known request. Arguments and errors as in `generate`."""
        span = self._span("orca.resume", "orca.attach", carrier)
        with refused(span):
            self._admit(deadline, RESUME_ROOM * self.settings.max_calls)
            attempt = self._validator.resume(request)
        if span is not None:
            span.named(request.request_id)
        return Call(
            self._pool,
            self.delivery,
            self._limits,
            Transcript(request.request_id, self.vocabulary, from_index=request.from_index, digest=request.digest),
            tenant=tenant,
            attempt=attempt,
            meter=self._meter(tenant),
            deadline=deadline,
            span=span,
            interval=request.stream_interval,
        )

    def _turn(self, asked: int, check: Fields, tenant: str) -> Turn:
        """The place of a tenant's request in the queue as it comes. asked: its `priority`. Raises InvalidArgument."""
        grant = self._grant_of(tenant)
        if asked not in (0, *Priority):
            raise check.error("priority", f"is {asked}, which is no class: {', '.join(CLASSES)}")
        priority = Priority(asked) if asked else max(Priority.NORMAL, grant.highest)
        if priority < grant.highest:
            highest = grant.highest.name.lower()
            raise check.error(
                "priority", f"is {priority.name.lower()}; tenant {tenant!r} may ask for {highest} at most"
            )
        if self.settings.order == "fair":
            if asked and priority is not Priority.NORMAL:
                raise check.error(
                    "priority", "must be normal here: tenants have fair shares, by the weights of their keys"
                )
            return Turn(weight=grant.weight, priority=FAIR)
        return Turn(lift_of(priority, self.settings.aging), priority=priority)

    async def shown(self, request_id: str, *, tenant: str = "") -> tuple[list[Event], OrcaError | None]:
        """The events of a tenant's request so far: Accepted, its tokens, and Finished if it has ended. With the error
        that has ended it, if one has. The call that listens to it goes on.

        Raises InvalidArgument for what is no id, NotFound, and Unavailable when the pool stays away.
        """
        self._validator.request_id(request_id)
        give_up = asyncio.get_running_loop().time() + self.settings.pool_patience
        attached = await reached(lambda: self._pool.show(scoped(tenant, request_id)), give_up=give_up)
        if attached is None:
            raise NotFound(f"request {request_id} is not known; it may have ended long ago")
        events = list[Event]()

        def read() -> OrcaError | None:
            transcript = Transcript(request_id, self.vocabulary)
            try:
                events.extend(transcript.answer(attached))
                if transcript.next == "stop" and (end := attached.finish) is not None:  # a call has recorded it
                    events.append(transcript.stopped()._replace(times=end.times, cached_tokens=end.cached_tokens))
            except OrcaError as error:
                return error
            return None

        few = len(attached.tokens) <= TOKENS_IN_LOOP
        return events, read() if few else await self.large.run(read, tenant)

    async def cancel(self, request: CancelRequest, *, tenant: str = "") -> bool:
        """Cancels a request of a tenant. Whether it was alive.

        Raises NotFound, and Unavailable when the pool stays away.
        """
        self._validator.cancel(request)
        give_up = asyncio.get_running_loop().time() + self.settings.pool_patience
        alive = await reached(lambda: self._pool.cancel(scoped(tenant, request.request_id)), give_up=give_up)
        if alive is None:
            raise NotFound(f"request {request.request_id} is not known; it may have ended long ago")
        return alive

    @property
    def has_chat_template(self) -> bool:
        return self.chats.possible

    async def model(self) -> GetModelResponse:
        """The model, the limits of what is accepted, and the engines that have formed."""
        limits, checkpoint = self.settings, self.checkpoint
        return GetModelResponse(
            name=self.name,
            digest=checkpoint.digest,
            vocab_size=checkpoint.vocab_size,
            max_positions=checkpoint.max_positions,
            max_prompt_bytes=limits.max_prompt_bytes,
            max_stop_strings=limits.max_stop_strings,
            max_stop_bytes=limits.max_stop_bytes,
            eos_token_ids=checkpoint.eos_token_ids,
            has_tokenizer=self.vocabulary is not None,
            has_chat_template=self.has_chat_template,
            tool_syntax=self.chats.syntax,
            sampling_defaults=self.defaults.message(),
            engines=[
                Engine(
                    id=info.engine,
                    tensor_parallel=info.tensor_parallel,
                    pipeline_parallel=info.pipeline_parallel,
                    slots=info.slots,
                    epoch=info.epoch,
                    weights=info.weights,
                    policy=info.policy,
                )
                for info in await self._engines.get()
            ],
        )

    def check_model(self, wanted: str) -> None:
        """Raises NotFound for another model than the one that is served and its adapters. Empty: the model itself.

        Where other releases share the address a model must be named, or InvalidArgument is raised.
        """
        others = self.settings.others
        if wanted == self.name or wanted in self.adapters.ids or not (wanted or others):
            return
        served = (self.name, *self.adapters.ids, *others)
        all_names = ", ".join(repr(name) for name in served[:NAMED])
        if len(served) > NAMED:
            all_names += f" and {len(served) - NAMED} more"
        if not wanted:
            raise InvalidArgument("model", f"is missing; served here: {all_names}")
        sentence = f"model: {echo(wanted)!r} is not served here; {all_names} {'are' if len(served) > 1 else 'is'}"
        if wanted in others:  # without the header the proxy did not know the way
            sentence = f"model: {wanted!r} is served by another release; name it in {MODEL_HEADER}, too"
        raise NotFound(sentence, reason=ErrorReason.UNKNOWN_MODEL)

    # -- text
    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token of a prompt; "" without a tokenizer."""
        return self.vocabulary.texts(ids) if self.vocabulary is not None else [""] * len(ids)

    def spell(self, token_id: int) -> str:
        """The text of one token alone; "" without a tokenizer."""
        return self.vocabulary.spell(token_id) if self.vocabulary is not None else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token alone; none without a tokenizer."""
        return self.vocabulary.token_bytes(token_id) if self.vocabulary is not None else b""

    # -- the parts
    def _admit(self, deadline: float | None, max_calls: int) -> None:
        """Raises the error of a new call that cannot be served now. max_calls: streams above which it is refused."""
        if self.draining:
            raise Unavailable("this endpoint is leaving; call another one", reason=ErrorReason.ENDPOINT_LEAVING)
        if deadline is not None and deadline <= asyncio.get_running_loop().time():
            raise DeadlineExceeded("the deadline that the caller set had passed when the request arrived")
        if self.delivery.count + self._validating >= max_calls:
            raise full(f"this endpoint serves {max_calls} streams already")

    def _meter(self, tenant: str) -> Meter:
        line = current_line()
        return Meter(self.metrics, tenant, line.arrived if line is not None else time.monotonic())

    def _span(
        self,
        request: str,
        submit: str,
        carrier: Mapping[str, str],
        operation: str | None = None,
        model: str | None = None,
    ) -> RequestSpan | None:
        """The request's spans, from the arrival of its call on; None when nothing is traced."""
        if not self.telemetry.enabled:
            return None
        name = model or self.name
        return RequestSpan(self.telemetry.tracer, (request, submit), carrier, current_line(), name, operation)


@contextmanager
def refused(span: RequestSpan | None) -> Iterator[None]:
    """Ends the spans of a call that is refused, or whose client leaves, before there is a Call."""
    try:
        yield
    except BaseException as error:
        if span is not None:
            span.ended(Outcome(error, None, overdue=False), error)
        raise


def trace_of(span: RequestSpan | None, carrier: Mapping[str, str]) -> dict[str, str]:
    """The W3C headers that go on with a request: of its span, else the client's, else a new id for the log lines."""
    if span is not None:
        return span.carrier
    if int(trace_id_of(carrier), 16):
        return {name: carrier[name] for name in ("traceparent", "tracestate") if name in carrier}
    return {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"}
