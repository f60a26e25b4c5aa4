"""The slots that a request must find free before it begins: the one rule, which a request's record keeps as a number.

An engine's scheduling policy gives the numbers, and the pool passes them on. An endpoint applies them at submit, so the
queue and its claims compare numbers and know no rule.
"""

from typing import NamedTuple


class Reservation(NamedTuple):
    """The numbers by which an engine's policy reserves slots for a request at its first iteration."""

    block_size: int  # slots; reserved are whole blocks
    output: bool = True  # slots of all its new tokens too, as in the paper: then it is never preempted

    def upfront(self, input_tokens: int, max_new_tokens: int) -> int:
        """Slots that must be free for a request to begin."""
        tokens = input_tokens + max_new_tokens if self.output else input_tokens + 1
        return -(-tokens // self.block_size) * self.block_size
