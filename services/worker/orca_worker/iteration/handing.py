"""Keys and values of a request on their way to another engine (docs/roles.md): read on one side, written on the other.

A wrong block would be an answer to another text, with no error. So each block travels behind its key, which the reading
side makes of what its memory says, and the filling side takes it only if its own tokens have the same key there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from orca_common.block_keys import key_of, keys_of
from orca_common.errors import FailedPrecondition, OrcaError, Unavailable, reason_of

from ..data_plane.blocks import Asked, Block
from .kv import KVManager
from .rows import Rows

log = logging.getLogger(__name__)


def wanted_keys(root: str, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The key of each block of these tokens, that of the last one too where it is not full."""
    keys = list(keys_of(root, token_ids, block_size))
    if rest := token_ids[(len(keys) - 1) * block_size :]:
        keys.append(key_of(keys[-1], rest))
    return [bytes.fromhex(key) for key in keys[1:]]


def blocks_of(kv: KVManager, rows: Rows, asked: Asked, layout: str) -> Iterator[Block]:
    """Reads the blocks of a row, each with its key. Any thread may ask, while iterations of other rows run.

    The row belongs to a request that was handed over, so nothing writes to it. It may be given to another request at
    any moment: a block that another row got while it was read is not served. Raises FailedPrecondition.
    """
    if asked.layout != layout:
        raise FailedPrecondition(f"blocks of {layout!r} are no blocks of {asked.layout!r}")
    for n in range(-(-asked.positions // kv.block_size)):
        key = _key_at(kv, rows, asked, n)
        payload = kv.read(kv.block_of(asked.row, n))
        if key != _key_at(kv, rows, asked, n):
            raise FailedPrecondition(f"row {asked.row} has changed")
        yield Block(key, payload)


def _key_at(kv: KVManager, rows: Rows, asked: Asked, n: int) -> bytes:
    """The key of the row's block n, by its tag. Raises FailedPrecondition where the row is another request's."""
    table, row = rows.table, asked.row
    if row >= len(table) or table["claim"][row] != asked.claim or table["length"][row] != asked.positions:
        raise FailedPrecondition(f"row {row} has not {asked.positions} positions of claim {asked.claim}")
    key = kv.tags.key_at(row, n, kv.block_of(row, n), asked.positions)
    if key is None:
        raise FailedPrecondition(f"row {row}: block {n} has no keys and values of its tokens")
    return key


class Filling:
    """Fills the first blocks of a row with what `ask` brings, in any thread. `done` is called at the end, with the
    bytes that were taken and, unless all is there, why not."""

    def __init__(
        self,
        kv: KVManager,
        blocks: Sequence[int],
        keys: Sequence[bytes],
        ask: Callable[[], Iterator[Block]],
        done: Callable[[int, str], None],
    ) -> None:
        """keys: of the row's own tokens, for each of the `blocks`."""
        self._kv, self._blocks, self._keys, self._ask, self._done = kv, blocks, keys, ask, done
        self._lock = threading.Lock()  # held while a block is written
        self._stopped = False
        self.filled = False  # all blocks are there

    def run(self) -> None:
        taken, error = 0, ""
        try:
            for n, (block, key, (got, payload)) in enumerate(zip(self._blocks, self._keys, self._ask(), strict=True)):
                if got != key:
                    raise Unavailable(f"block {n} has the keys and values of other tokens")
                with self._lock:
                    if self._stopped:
                        raise Unavailable("the row was freed meanwhile")
                    self._kv.write(block, payload)
                taken += len(payload)
            self.filled = True
        except Exception as failed:  # the scheduler keeps the request until it knows
            if not isinstance(failed, (OrcaError, OSError)):
                log.exception("blocks were not filled")
            error = reason_of(failed)
        self._done(taken, error)

    def stop(self) -> None:
        """Writes nothing more: the blocks may be another row's from now on."""
        with self._lock:
            self._stopped = True
