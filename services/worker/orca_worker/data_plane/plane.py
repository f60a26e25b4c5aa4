"""The data plane carries the tensors between the ranks of an engine, and nothing else. Tensors take no other way.

Every rank issues the same operations in the same order and knows all shapes from the control message (paper section
4.1), so no shape is ever sent. This module imports no torch: an engine of one rank has no process groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orca_common.errors import Unavailable

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class PeerLost(Unavailable):
    """The data plane no longer works: a neighbour is gone, or the epoch was left.

    This rank is not at fault. It keeps its weights and waits for a new formation.
    """


class DataPlane(Protocol):
    """The data plane of one epoch, as one rank uses it. One thread calls it; only `abort` may come from any thread."""

    sent_bytes: int  # by this rank, so far
    waited: int  # ns that this rank has waited so far for hidden states or tokens of others
    returns_tokens: bool  # sampled tokens also go back to the first stage, for a scheduler that runs ahead

    @property
    def left(self) -> bool:
        """Whether an abort has come to its end on the device, so that nothing of this epoch is there. Any thread."""
        ...

    def join(self) -> None:
        """Returns when the ranks that this rank exchanges tensors with have joined too. Raises PeerLost."""

    def check(self) -> None:
        """Raises PeerLost when the plane no longer works."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the stage's tensor ranks; x itself may be overwritten."""
        ...

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """x [n, widths[r]] of each tensor rank r -> [n, sum of widths] on tensor rank 0, None on the others.

        x may have more columns, on all ranks the same number. They go nowhere.
        """
        ...

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Begins a later `receive`, so that its tensor can arrive while this rank computes.

        Called in the order of the iterations. Does nothing at the first stage.
        """

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """The next tensor from the same tensor rank of the stage before; None at the first stage."""
        ...

    def send(self, x: Tensor) -> None:
        """Sends x to the same tensor rank of the next stage, without waiting for its arrival."""

    def send_tokens(self, token_ids: list[int] | Tensor) -> None:
        """Sends sampled tokens [B] to all ranks of the first stage. Called by the rank that samples."""

    def expect_tokens(self, count: int) -> None:
        """Begins to receive the tokens of an iteration of `count` requests."""

    def receive_tokens(self) -> Tensor:
        """The tokens [B] int32 of the oldest iteration that was expected and not received, on the rank's device.

        On a GPU the host does not wait for them.
        """
        ...

    def return_encoded(self, x: Tensor) -> None:
        """Sends x to the same tensor rank of the first stage, as `send` does. Called at the last of several stages."""

    def receive_encoded(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor that the last stage returns to the first."""
        ...

    def abort(self, reason: str) -> None:
        """Leaves the epoch. Callers that wait wake at once with PeerLost, and later calls raise it."""


class Loopback:
    """`DataPlane` of an engine of one rank, which has no other ranks to exchange tensors with."""

    sent_bytes = waited = 0
    returns_tokens = False
    left = True

    def join(self) -> None:
        pass

    def check(self) -> None:
        pass

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        return x[:, : widths[0]]

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        pass

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return None

    def send(self, x: Tensor) -> None:
        raise AssertionError("a single stage sends nothing")

    def send_tokens(self, token_ids: list[int] | Tensor) -> None:
        raise AssertionError("a single rank has its tokens")

    def expect_tokens(self, count: int) -> None:
        raise AssertionError("a single rank has its tokens")

    def receive_tokens(self) -> Tensor:
        raise AssertionError("a single rank has its tokens")

    def return_encoded(self, x: Tensor) -> None:
        raise AssertionError("a single stage returns nothing")

    def receive_encoded(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise AssertionError("a single stage returns nothing")

    def abort(self, reason: str) -> None:
        pass
