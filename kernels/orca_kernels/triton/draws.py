"""The draws of rows of logits, laid out for kernels."""

from typing import NamedTuple

from torch import Tensor


class Draws(NamedTuple):
    """Of B rows, all on one device, [B] each. A part that is 0 asks for nothing."""

    temperatures: Tensor  # float64; 0: the likeliest token, whatever else is asked for
    top_k: Tensor  # int64
    top_p: Tensor  # float64
    min_p: Tensor  # float64
    seeds: Tensor  # int64, read as bits
    indexes: Tensor  # int64, read as bits: of each row's random draw
