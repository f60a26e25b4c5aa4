"""The paper's memory: slots are reserved once, in whole blocks, and come back once."""

import pytest

from orca_scheduler.core.memory import Slots
from orca_scheduler.core.request import Arrival, Request


def request_of(claim: int, input_tokens: int, max_new_tokens: int) -> Request:
    arrived = Arrival(claim=claim, arrival=claim, input_tokens=input_tokens, max_new_tokens=max_new_tokens)
    return Request.of(arrived, True)


def test_only_whole_blocks_count() -> None:
    memory = Slots(30, 4)
    assert (memory.n_slots, memory.free, memory.reserved) == (28, 28, 0)


@pytest.mark.parametrize(("inputs", "new", "slots"), [(1, 1, 4), (3, 1, 4), (3, 2, 8), (8, 8, 16)])
def test_a_request_needs_slots_for_all_its_tokens_at_first_and_none_later(inputs: int, new: int, slots: int) -> None:
    memory, request = Slots(40, 4), request_of(1, inputs, new)
    assert memory.need(request, inputs) == slots
    ((request.row, blocks, shared),) = memory.admit([request])
    assert (len(blocks) * 4, shared) == (slots, 0)
    assert memory.need(request, 1) == 0


def test_what_waits_has_its_slots_already() -> None:
    """Otherwise a claim would take requests that could not begin."""
    memory = Slots(40, 4)
    memory.grow(memory.new_row(), 10)  # three blocks
    assert memory.free == 28
    assert memory.room([]) == 28
    assert memory.room([request_of(1, 3, 2), request_of(2, 1, 1)]) == 28 - 8 - 4
    assert memory.room([request_of(1, 20, 20)]) < 0


def test_blocks_and_rows_come_back_once() -> None:
    memory = Slots(16, 4)
    first, second = memory.new_row(), memory.new_row()
    assert memory.grow(first, 5) == (0, 1)
    assert memory.grow(second, 4) == (2,)
    assert memory.rows() == {first: (0, 1), second: (2,)}
    memory.release(first)
    assert (memory.free, memory.reserved) == (12, 4)
    with pytest.raises(KeyError):
        memory.release(first)
    assert memory.new_row() == first, "the smallest free row"
    assert memory.grow(first, 8) == (0, 1)


def test_a_shared_block_comes_back_with_its_last_row() -> None:
    memory = Slots(16, 4)
    rows = [memory.new_row() for _ in range(3)]
    blocks = memory.grow(rows[0], 8)
    for row in rows[1:]:
        memory.share(row, blocks[:1])
    memory.release(rows[0])
    assert memory.free == 12, "the block that it had alone"
    memory.release(rows[2])
    assert memory.free == 12
    memory.release(rows[1])
    assert memory.free == 16
