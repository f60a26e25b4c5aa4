"""The two passes of an iteration through the stages, where a model with an encoder has several.

first    the encoder's rows of the members that begin, from stage to stage; the last stage returns the encoder's output
         to the first one
second   that output, from which each stage takes the keys and values of its layers, and behind it the decoder's rows of
         all members

A stage ends both passes of an iteration before it begins the next iteration. So all sends and receives of an engine
have one order, by iteration, pass and stage, and each waits only for earlier ones: however many iterations are in
flight, no circle of waiting stages can arise. An iteration in which no request begins has the second pass alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..data_plane.plane import DataPlane
from ..partition import Place

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Passes(NamedTuple):
    """The passes at one place. Hidden states travel as [tokens, hidden] of `dtype`."""

    place: Place
    hidden: int
    dtype: torch.dtype

    def first(self, plane: DataPlane, tokens: int) -> Tensor | None:
        """Receives the encoder's states of the stage before; None at the first stage."""
        return plane.receive((tokens, self.hidden), self.dtype)

    def second(
        self, plane: DataPlane, states: Tensor | None, of_encoder: int, of_decoder: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sends this stage's states of the encoder and receives the second pass, with these numbers of tokens.

        -> the encoder's output, None without tokens of it; the decoder's states of the stage before, None at the first.
        """
        if self.place.pipeline_parallel == 1:
            return states, None
        if states is not None:
            (plane.return_encoded if self.place.is_last else plane.send)(states)
        if self.place.is_first:
            shape = of_encoder, self.hidden
            return (plane.receive_encoded(shape, self.dtype) if of_encoder else None), None
        x = plane.receive((of_encoder + of_decoder, self.hidden), self.dtype)
        assert x is not None, "only a first stage receives nothing"
        return (x[:of_encoder] if of_encoder else None), x[of_encoder:]
