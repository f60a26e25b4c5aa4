"""The data plane: the way of tensors between the ranks of an engine. Control never goes here, tensors nowhere else.

Every rank issues the same operations in the same order, and all shapes are known from the control message (paper
section 4.1), so nothing about them crosses. Without torch: an engine of one rank has no process groups at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orca_common.errors import Unavailable

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class PeerLost(Unavailable):
    """The data plane does not work any more: a neighbour is gone, or the epoch was left. It is no fault of this rank,
    which keeps its weights and waits for a new formation."""


class DataPlane(Protocol):
    """One epoch's. One thread calls it, but for `abort`, which any thread may call."""

    sent_bytes: int  # by this rank, so far
    waited: int  # by this rank, so far, for hidden states or tokens of others: ns
    returns_tokens: bool  # the tokens go back to the first stage, for a scheduler that runs ahead

    def join(self) -> None:
        """Finds the other ranks; returns when those that this rank speaks with are there. Raises PeerLost."""

    def check(self) -> None:
        """Raises PeerLost when the plane does not work any more."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the stage's tensor ranks; x itself may be overwritten."""
        ...

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """x [n, widths[r]] of each tensor rank r -> [n, sum of widths] on tensor rank 0, None on the others."""
        ...

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Begins a `receive` that is still to be called, so that what it returns can come while this rank computes. In
        the order of the iterations; nothing at the first stage."""

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """What the same tensor rank of the stage before sends next; None at the first stage."""
        ...

    def send(self, x: Tensor) -> None:
        """Sends x to the same tensor rank of the next stage; does not wait until it is there."""

    def send_tokens(self, token_ids: list[int]) -> None:
        """From the rank that samples to all ranks of the first stage."""

    def expect_tokens(self, count: int) -> None:
        """Begins to receive what the sampling rank will make of an iteration of `count` requests."""

    def receive_tokens(self) -> list[int]:
        """The tokens that were expected first."""
        ...

    def abort(self, reason: str) -> None:
        """Leaves: whoever waits in one of these calls wakes at once with PeerLost, and so do all later calls."""


class Loopback:
    """An engine of one rank: there is nobody to speak with."""

    sent_bytes = waited = 0
    returns_tokens = False

    def join(self) -> None:
        pass

    def check(self) -> None:
        pass

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        return x

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        pass

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return None

    def send(self, x: Tensor) -> None:
        raise AssertionError("a single stage sends nothing")

    def send_tokens(self, token_ids: list[int]) -> None:
        raise AssertionError("a single rank has its tokens")

    def expect_tokens(self, count: int) -> None:
        raise AssertionError("a single rank has its tokens")

    def receive_tokens(self) -> list[int]:
        raise AssertionError("a single rank has its tokens")

    def abort(self, reason: str) -> None:
        pass
