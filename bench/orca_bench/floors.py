"""The shortest possible time of an iteration and of a case on a machine whose ceilings are known.

An iteration reads each weight, and each key and value of its requests, at least once, and computes at least two FLOP
for each weight and token. Its floor is the longer of the two times (roofline.py of orca_lab). The floor of a case is
the sum over the iterations that Algorithm 1 makes of it.
"""

from collections.abc import Iterable

from orca_common.checkpoint import Checkpoint
from orca_lab.roofline import Accelerator, Work, work
from orca_worker.models.families import family_of
from orca_worker.models.recorded import RecordedFamily
from orca_worker.models.recording import Recording
from orca_worker.partition import ITEM_BYTES, SINGLE

from .cases import Case
from .schedule import shapes, slots_for


def recorded(checkpoint: Checkpoint) -> Recording | None:
    """The whole model's recording; None for a family that records nothing."""
    family = family_of(checkpoint)
    if not isinstance(family, RecordedFamily):
        return None
    return family.record(family.read(checkpoint), SINGLE)


def iteration_work(checkpoint: Checkpoint, dtype: str, requests: Iterable[tuple[int, int]]) -> Work | None:
    """The work of one iteration of the whole model; None for a family whose work is not known.

    `requests`: (tokens before this iteration, tokens in it) of each request.
    """
    whole = recorded(checkpoint)
    return None if whole is None else work(whole, ITEM_BYTES[dtype], requests)


def case_floor(
    checkpoint: Checkpoint, dtype: str, case: Case, max_batch_size: int, on: Accelerator | None
) -> float | None:
    """Seconds; None where the model's work or the device's ceilings are not known."""
    if on is None:
        return None
    floor = 0.0
    for shape in shapes(case, slots_for(case, max_batch_size), max_batch_size):
        needed = iteration_work(checkpoint, dtype, shape.tokens)
        if needed is None:
            return None
        floor += needed.floor(on, dtype)
    return floor
