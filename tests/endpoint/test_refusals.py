"""Every refusal of the pool, and every end that Finished cannot tell, has its status."""

import grpc
import pytest

from orca_common.errors import ErrorReason, ResourceExhausted
from orca_endpoint.calls.refusals import busy_error, end_error, refusal_error
from orca_pool.records import Busy, Reason, Refusal

CODE = grpc.StatusCode
OF_THE_CALL = (Refusal.UNREGISTERED, Refusal.FEWER_TOKENS, Refusal.OTHER_TOKENS)
BUSY = {
    Refusal.FULL: "QUEUE_FULL",
    Refusal.SHARE_FULL: "QUEUE_FULL",
    Refusal.TENANT_FULL: "TENANT_FULL",
    Refusal.LATE: "QUEUE_LONG",
}


@pytest.mark.parametrize("refusal", [r for r in Refusal if r not in (*OF_THE_CALL, *BUSY)])
def test_refusals(refusal: Refusal) -> None:
    codes = {
        Refusal.STALE: CODE.ABORTED,
        Refusal.UNKNOWN: CODE.NOT_FOUND,
        Refusal.OTHER_BODY: CODE.ALREADY_EXISTS,
        Refusal.NEVER_FITS: CODE.FAILED_PRECONDITION,
        Refusal.NO_ENGINE: CODE.UNAVAILABLE,
        Refusal.NO_ADAPTER: CODE.NOT_FOUND,
        Refusal.MEMORY: CODE.RESOURCE_EXHAUSTED,
    }
    assert refusal_error(refusal, "one", 300, 200).code == codes[refusal].name


@pytest.mark.parametrize("why", BUSY)
@pytest.mark.parametrize(("due", "after"), [(None, 1.0), (0.0, 0.1), (6.4, 6.4)])
def test_a_busy_queue_says_when_to_try_again(why: Refusal, due: float | None, after: float) -> None:
    error = busy_error(Busy(why, None if due is None else 16.4, due), "acme")
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.retry_after) == (BUSY[why], after)
    assert f"{after} s" in str(error)


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason > Reason.CANCELLED])
def test_ends(reason: Reason) -> None:
    codes = {
        Reason.DEADLINE: CODE.DEADLINE_EXCEEDED,
        Reason.DETACHED: CODE.CANCELLED,
        Reason.INTERNAL: CODE.INTERNAL,
        Reason.NOT_FINITE: CODE.INTERNAL,
        Reason.NEVER_FITS: CODE.FAILED_PRECONDITION,
        Reason.ABORTED: CODE.ABORTED,
        Reason.MODEL_CHANGED: CODE.ABORTED,
        Reason.STUCK: CODE.FAILED_PRECONDITION,
    }
    error = end_error(reason, "one", "0af7", has_form=True)
    assert error.code == codes[reason].name
    assert "one" in str(error)


@pytest.mark.parametrize(("has_form", "word"), [(True, ErrorReason.FORM_STUCK), (False, ErrorReason.UNKNOWN_PARAMETER)])
def test_what_is_stuck_without_a_form_asks_for_something_newer(has_form: bool, word: ErrorReason) -> None:
    assert end_error(Reason.STUCK, "one", "0af7", has_form).reason is word
