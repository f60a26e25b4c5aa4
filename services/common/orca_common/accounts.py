"""Accounts of a request's time, as the schedulers' `/explain` gives them: JSON objects."""

from collections.abc import Iterable
from typing import Any


def clearest(accounts: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the account that leaves the least of the request's time unseen; None: there is no account."""
    return min(accounts, key=unseen, default=None)


def unseen(account: dict[str, Any]) -> float:
    """Returns the seconds of the request's time that the account does not explain."""
    return account["unseen"]
