"""The pool's refusals and its reasons for an end, as the errors that a client gets."""

from orca_common.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    ErrorReason,
    FailedPrecondition,
    Internal,
    NotFound,
    OrcaError,
    ResourceExhausted,
    Unavailable,
    echo,
)
from orca_pool.records import Busy, Reason, Refusal

from ..requests.limits import RETRY_AFTER

RETRY_AT_LEAST = 0.1  # seconds


def refusal_error(refusal: Refusal, request_id: str, max_tokens: int, largest_engine: int) -> OrcaError:
    """The error of a submit or an attach that the pool refused.

    max_tokens: slots that the request needs. largest_engine: slots of the largest engine. Only NEVER_FITS needs them.
    UNREGISTERED never reaches a client: the endpoint registers again. The transcript has the errors of the other two.
    """
    match refusal:
        case Refusal.STALE:
            return taken_over(request_id)
        case Refusal.UNKNOWN:
            return NotFound(f"request {request_id} is not known; it may have ended long ago")
        case Refusal.OTHER_BODY:
            return AlreadyExists(f"request_id: {request_id} is in use by a request with another body")
        case Refusal.NEVER_FITS:
            return FailedPrecondition(
                f"request {request_id} needs {max_tokens} slots (input tokens + max_new_tokens); "
                f"the largest engine has {largest_engine}",
                reason=ErrorReason.TOO_LARGE,
            )
        case Refusal.NO_ENGINE:
            return Unavailable("no engine has formed yet; try again later", reason=ErrorReason.NO_ENGINE)
        case Refusal.NO_ADAPTER:
            why = "the adapter that it names was unloaded or replaced, or no engine has it; try again"
            return NotFound(f"request {request_id}: {why}", reason=ErrorReason.UNKNOWN_MODEL)
        case Refusal.MEMORY:
            return ResourceExhausted("the request pool has no memory left; try again later", RETRY_AFTER)
        case Refusal.UNREGISTERED | Refusal.FEWER_TOKENS | Refusal.OTHER_TOKENS:
            raise AssertionError("the call answers these itself")
        case Refusal.FULL | Refusal.TENANT_FULL | Refusal.SHARE_FULL | Refusal.LATE:
            raise AssertionError("these come as Busy")


def busy_error(busy: Busy, tenant: str, payer: str = "") -> ResourceExhausted:
    """The error of a submit that the pool refused because of what waits already. It says when to try again.

    payer: against whose limits the request counts: the tenant, or a host without keys.
    """
    after = RETRY_AFTER if busy.due is None else max(busy.due, RETRY_AT_LEAST)
    again = f"try again in {after:.1f} s"
    who = f"tenant {tenant!r}" if tenant else f"host {payer}" if payer else "every caller without a key"
    long = "" if busy.wait is None else f" and {busy.wait:.1f} s long"
    match busy.why:
        case Refusal.TENANT_FULL:
            sentence = f"{who} has all that it may: {busy.limit} {busy.things}; {again}"
            return ResourceExhausted(sentence, after, reason=ErrorReason.TENANT_FULL)
        case Refusal.SHARE_FULL:
            share = f"at most {busy.limit} {busy.things} now, as many as are free for all"
            return ResourceExhausted(f"{who} has its share of the queue, {share}; {again}", after)
        case Refusal.LATE:
            sentence = (
                f"the queue is {busy.wait or 0:.1f} s long: the request could not end before its deadline; {again}"
            )
            return ResourceExhausted(sentence, after, reason=ErrorReason.QUEUE_LONG)
        case _:
            return ResourceExhausted(f"the queue is full{long}; {again}", after)


def end_error(reason: Reason, request_id: str, trace_id: str, has_form: bool) -> OrcaError:
    """The error of a stream whose request ended for a reason that `Finished` cannot tell.

    has_form: whether its answer has a form. Without one a STUCK request has asked for what its rank does not know.
    """
    match reason:
        case Reason.ABORTED:
            return taken_over(request_id)
        case Reason.DEADLINE:
            late = "the deadline that its caller set has passed, or could no longer be met"
            return DeadlineExceeded(f"request {request_id}: {late}")
        case Reason.DETACHED:
            sentence = f"request {request_id} was ended: its client had left, and its detach grace is over"
            return Cancelled(sentence, reason=ErrorReason.CLIENT_LEFT)
        case Reason.NEVER_FITS:
            return FailedPrecondition(
                f"request {request_id} needs more slots than any engine has", reason=ErrorReason.TOO_LARGE
            )
        case Reason.MODEL_CHANGED:
            sentence = (
                f"request {request_id}: no engine has the weights that made its first tokens, or its adapter, any more"
            )
            return Aborted(sentence, reason=ErrorReason.MODEL_CHANGED)
        case Reason.INTERNAL:
            sentence = f"request {request_id}: engines were lost with it again and again"
            return Internal(sentence, trace_id, reason=ErrorReason.ENGINES_LOST)
        case Reason.NOT_FINITE:
            sentence = f"request {request_id}: the model's logits for its next token are NaN or infinite"
            return Internal(sentence, trace_id, reason=ErrorReason.LOGITS_NOT_FINITE)
        case Reason.STUCK if not has_form:
            problem = (
                "it asks for a sampling parameter or an adapter that its engine, of another release, does not have"
            )
            return FailedPrecondition(f"request {request_id}: {problem}", reason=ErrorReason.UNKNOWN_PARAMETER)
        case Reason.STUCK:
            sentence = (
                f"request {request_id}: no token can follow: its form is too hard to follow further, or the model "
            )
            sentence += "finds nothing that fits"
            return FailedPrecondition(sentence, reason=ErrorReason.FORM_STUCK)
        case _:
            raise AssertionError(f"{reason.name} is an end that Finished tells")


def ambiguous_call(request_id: str, name: str) -> FailedPrecondition:
    """The error of an answer in whose calls an object has a name twice."""
    problem = f"the arguments of a call have the name {echo(name, 64)!r} twice, and parsers take one of the values"
    advice = "allow no members that the schema does not name, or ask again"
    return FailedPrecondition(f"request {request_id}: {problem}; {advice}", reason=ErrorReason.AMBIGUOUS_CALL)


def taken_over(request_id: str) -> Aborted:
    return Aborted(f"request {request_id}: a newer call has taken over")
