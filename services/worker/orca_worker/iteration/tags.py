"""Tags of blocks: which tokens' keys and values are in each block, and which ones each row needs there.

A row that begins behind the wrong blocks, or whose table was damaged, would attend to another text, and its answer
would look as any other. So a rank makes the key of each full block from the tokens that it has run itself, and compares
the tags of all blocks of a row with the row's own tokens before each of its iterations.
"""

from collections.abc import Sequence

import numpy as np

from orca_common.block_keys import BYTES, key_of, keys_of
from orca_common.errors import FailedPrecondition

PRIVATE = 1 << 63  # in the first half of a tag: a row's own block, which is not full; the other half is a number
NEVER = 1 << 62  # no row has this number of positions


class Text:
    """The keys of a row's full blocks of known tokens. `Tags` has the tokens behind those."""

    __slots__ = ("filled", "keys")

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = list(keys)  # a root, and one for each block
        self.filled = 0  # blocks whose keys and values are there


class Tags:
    """Tags, of two halves of 64 bits each: of `n_blocks` blocks, and of the rows that have them."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._of = np.zeros((n_blocks, 2), np.uint64)  # [block, 2]: what is in it
        self._wanted = np.zeros((0, 0, 2), np.uint64)  # [row, i, 2]: what must be in the row's block i
        self.texts: dict[int, Text] = {}  # by row
        self._private = 0  # tags of blocks that are not full: none comes twice
        self._tails = np.zeros((0, 0), np.int64)  # [row, i]: known tokens, from position `start` on
        self._start = np.zeros(0, np.int64)  # [row]: the positions of a text's full blocks, and of all its known tokens
        self._end = np.zeros(0, np.int64)  # -1: the row has no text
        self._due = np.zeros(0, np.int64)  # [row]: known and computed to this position, a further block has its key
        self._held = np.zeros(0, np.int64)  # [row]: blocks; 0 of a row without a text

    def begin(self, row: int, root: str, token_ids: Sequence[int]) -> None:
        """A row gets a request with these known tokens, before it gets blocks. root: of whose keys and values it may
        begin with. Raises FailedPrecondition."""
        if len(root) != 2 * BYTES:
            raise FailedPrecondition(f"row {row}: a root of {len(root) // 2} bytes, not {BYTES}")
        keys = keys_of(root, token_ids, self._block_size)
        start = (len(keys) - 1) * self._block_size
        self.texts[row] = Text(keys)
        self._reach(row)
        self._start[row], self._due[row], self._held[row] = start, self._block_size, 0
        self._put(row, start, token_ids[start:])

    def _reach(self, row: int) -> None:
        """Makes room for rows up to this one."""
        rows = len(self._end)
        if row >= rows:
            more = max(64, 2 * row) - rows
            self._start = np.append(self._start, np.zeros(more, np.int64))
            self._end = np.append(self._end, np.full(more, -1))
            self._due = np.append(self._due, np.full(more, NEVER))
            self._held = np.append(self._held, np.zeros(more, np.int64))

    def _put(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        """The last known tokens of a row, from a position behind its full blocks on."""
        at = position - int(self._start[row])
        end, (rows, width) = at + len(token_ids), self._tails.shape
        if row >= rows or end + self._block_size > width:  # `ran_one` adds less than a block to what is put here
            tails = np.zeros((len(self._end), max(width, 2 * (end + self._block_size))), np.int64)
            tails[:rows, :width] = self._tails
            self._tails = tails
        self._tails[row, at:end] = token_ids
        self._end[row] = position + len(token_ids)

    def free(self, row: int) -> None:
        """Forgets a row. Its blocks keep their tags."""
        if self.texts.pop(row, None) is not None:
            self._end[row], self._due[row], self._held[row] = -1, NEVER, 0

    def grown(self, row: int, held: int, blocks: Sequence[int], shared: int) -> None:
        """A row that had `held` blocks gets further ones. The first `shared` of them must hold what its tokens say;
        what was in the others is void. Raises FailedPrecondition where it has no tokens for them."""
        text = self.texts.get(row)
        if shared and (text is None or held or shared >= len(text.keys)):
            raise FailedPrecondition(f"row {row}: {shared} blocks with keys and values, and no tokens for them")
        self._reach(row)
        if text is None and not self._private:
            return  # no row has ever had tags here
        end, (rows, columns, _) = held + len(blocks), self._wanted.shape
        if text is not None and (row >= rows or end > columns):
            grown = np.zeros((max(64, rows, 2 * row), max(8, columns, 2 * end), 2), np.uint64)
            grown[:rows, :columns] = self._wanted
            self._wanted = grown
        for i, block in enumerate(blocks[shared:], held + shared):
            self._private += 1
            tag = self._of[block]
            tag[0], tag[1] = PRIVATE, self._private
            if text is not None:
                self._wanted[row, i] = tag
        if text is not None:
            self._held[row] = end
        if text is not None and shared:
            self._wanted[row, :shared] = _tags(text.keys[1 : 1 + shared])
            self._filled(row, text, shared)

    def _filled(self, row: int, text: Text, blocks: int) -> None:
        text.filled, self._due[row] = blocks, (blocks + 1) * self._block_size

    def check(self, rows: Sequence[int], table: np.ndarray) -> None:
        """Raises FailedPrecondition where a block of one of these rows, of which there is one at least, does not hold
        what the row's tokens say.

        table [row, i]: the row's block i.
        """
        first, last, most = min(rows), max(rows), min(len(self._wanted), len(self._held), len(table))
        if last >= most:
            rows = [row for row in rows if row < most]  # the others have no text, or `build_batch` refuses them
        # All rows of a full engine run, in any order: nothing is copied then. Rows without a text have no blocks here.
        which = slice(first, last + 1) if last - first < len(rows) else list(rows)
        held = self._held[which]
        n = int(held.max(initial=0))
        if not n:
            return
        blocks = table[which, :n]
        # `take`, and both halves as one number: 14 us for 32 rows of 128 blocks; indexing and `any` take 90.
        differ = self._of.take(blocks, 0) != self._wanted[which, :n]
        if not np.count_nonzero(differ):
            return
        other = differ.view(np.uint16)[:, :, 0] * (np.arange(n) < held[:, None])  # without what is behind their blocks
        if np.count_nonzero(other):
            member, i = np.argwhere(other)[0].tolist()
            row = member + first if isinstance(which, slice) else which[member]
            raise FailedPrecondition(
                f"row {row}: block {blocks[member, i]} has the keys and values of other tokens than the row's "
                f"from position {i * self._block_size} on"
            )

    def key_at(self, row: int, n: int, block: int, positions: int) -> bytes | None:
        """The key of the tokens whose keys and values are in a row's block n, which is `block`, as far as its first
        `positions` go; None where they are not the row's. Any thread may ask."""
        text, size = self.texts.get(row), self._block_size
        if text is None or row >= len(self._wanted) or (self._of[block] != self._wanted[row, n]).any():
            return None
        if (n + 1) * size <= positions:
            return self._of[block].tobytes() if n < text.filled else None
        start = int(self._start[row])
        is_last = n == len(text.keys) - 1 and start == n * size and positions <= self._end[row]
        return bytes.fromhex(key_of(text.keys[n], self._tails[row, : positions - start].tolist())) if is_last else None

    def ran(self, row: int, start: int, token_ids: Sequence[int], drafts: int, blocks: np.ndarray) -> None:
        """A row has run these tokens from position `start` on; the last `drafts` of them may be wrong. blocks: its own.

        A token below 0 is not known here: the blocks from there on get no keys.
        """
        behind, end = int(self._start[row]), start + len(token_ids)
        computed = end - drafts
        if behind < end and start <= self._end[row] and min(token_ids) >= 0:
            self._put(row, max(start, behind), token_ids[max(behind - start, 0) :])
        if min(computed, self._end[row]) >= self._due[row]:
            self._fill(row, computed, blocks)

    def ran_one(self, rows: np.ndarray, starts: np.ndarray, token_ids: np.ndarray, table: np.ndarray) -> None:
        """`ran` for rows [n] with one token each, at positions `starts` [n]. table [row, i]: blocks.

        A row's tokens are looked at once a block.
        """
        at, ends, known = starts - self._start.take(rows), starts + 1, self._end.take(rows)
        if np.count_nonzero((starts == known) & (token_ids >= 0)) == len(rows):  # as nearly always
            self._tails[rows, at] = token_ids
            self._end[rows] = known = ends
        else:
            new = (at >= 0) & (starts <= known) & (token_ids >= 0)
            self._tails[rows[new], at[new]] = token_ids[new]
            known = np.minimum(np.where(new, ends, known), ends)
            self._end[rows[new]] = ends[new]
        for n in np.flatnonzero(known >= self._due.take(rows)).tolist():
            row = int(rows[n])
            self._fill(row, int(ends[n]), table[row])

    def _fill(self, row: int, computed: int, blocks: np.ndarray) -> None:
        """Gives keys to a row's full blocks of tokens that are known, and tags to those that are computed."""
        text, size = self.texts[row], self._block_size
        start, end = int(self._start[row]), int(self._end[row])
        more = (min(computed, end) - start) // size
        if more > 0:
            tokens, tail = self._tails[row, : end - start].tolist(), self._tails[row]
            for at in range(0, more * size, size):
                text.keys.append(key_of(text.keys[-1], tokens[at : at + size]))
            start += more * size
            self._start[row] = start
            tail[: end - start] = tokens[more * size :]
        full = min(computed, start) // size
        made = _tags(text.keys[1 + text.filled : 1 + full])
        self._wanted[row, text.filled : full] = self._of[blocks[text.filled : full]] = made
        self._filled(row, text, full)


def _tags(keys: Sequence[str]) -> np.ndarray:
    """[n, 2]"""
    return np.frombuffer(bytes.fromhex("".join(keys)), np.uint64).reshape(-1, 2)
