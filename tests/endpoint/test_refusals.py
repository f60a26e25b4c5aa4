"""Every refusal of the pool, and every end that Finished cannot tell, has its status."""

import grpc
import pytest

from orca_common.errors import ResourceExhausted
from orca_endpoint.refusals import end_error, refusal_error
from orca_pool.records import Reason, Refusal

CODE = grpc.StatusCode


@pytest.mark.parametrize("refusal", [refusal for refusal in Refusal if refusal is not Refusal.UNREGISTERED])
def test_refusals(refusal: Refusal) -> None:
    codes = {
        Refusal.STALE: CODE.ABORTED,
        Refusal.UNKNOWN: CODE.NOT_FOUND,
        Refusal.OTHER_BODY: CODE.ALREADY_EXISTS,
        Refusal.FULL: CODE.RESOURCE_EXHAUSTED,
        Refusal.NEVER_FITS: CODE.FAILED_PRECONDITION,
        Refusal.NO_ENGINE: CODE.UNAVAILABLE,
    }
    error = refusal_error(refusal, "one", 300, 200)
    assert error.code is codes[refusal]
    if isinstance(error, ResourceExhausted):
        assert error.retry_after > 0


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason > Reason.CANCELLED])
def test_ends(reason: Reason) -> None:
    codes = {
        Reason.DEADLINE: CODE.DEADLINE_EXCEEDED,
        Reason.DETACHED: CODE.CANCELLED,
        Reason.INTERNAL: CODE.INTERNAL,
        Reason.NEVER_FITS: CODE.FAILED_PRECONDITION,
        Reason.ABORTED: CODE.ABORTED,
    }
    error = end_error(reason, "one", "0af7")
    assert error.code is codes[reason]
    assert "one" in str(error)
