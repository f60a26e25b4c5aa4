"""Select of Algorithm 1 (paper section 4.2). The numbers are the paper's lines."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from .request import INITIATION, Request
from .slots import Slots


class Stop(StrEnum):
    """Why a selection holds no more requests."""

    BATCH_FULL = "max_bs requests are selected"
    SLOTS = "the next request does not fit in the free slots"
    POOL = "no other request is waiting for an iteration"


@dataclass(frozen=True, slots=True)
class Selection:
    batch: tuple[Request, ...]
    stop: Stop


def select(pool: Iterable[Request], max_bs: int, slots: Slots) -> Selection:
    """The next batch from `pool`: requests that are not RUNNING (line 17), in order of arrival (line 18).

    Changes nothing: the caller reserves for what was selected. A failed reservation stops the scan for requests in
    their initiation phase (line 25), which keeps the order FCFS; it never keeps an INCREMENT request out, because its
    slots are reserved already.
    """
    batch: list[Request] = []  # line 16
    free, blocked = slots.free, False  # n_slots - n_rsrv
    for request in pool:  # line 19
        if len(batch) == max_bs:  # line 20
            return Selection(tuple(batch), Stop.BATCH_FULL)
        if request.phase is INITIATION:  # line 21
            need = slots.size(request.arrived.max_tokens)  # line 22
            if blocked or need > free:  # line 23
                blocked = True  # line 24
                continue
            free -= need  # line 25
        batch.append(request)  # line 26: for both phases
    return Selection(tuple(batch), Stop.SLOTS if blocked else Stop.POOL)  # line 27
