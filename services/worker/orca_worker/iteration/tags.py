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


class Text:
    """A row's known tokens: the keys of full blocks of them, and the tokens behind the last full block."""

    __slots__ = ("filled", "keys", "start", "tokens")

    def __init__(self, keys: Sequence[str], tail: Sequence[int], start: int) -> None:
        self.keys = list(keys)  # a root, and one for each block
        self.tokens, self.start = list(tail), start  # from position `start` on
        self.filled = 0  # blocks whose keys and values are there


class Tags:
    """Tags, of two halves of 64 bits each: of `n_blocks` blocks, and of the rows that have them."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._of = np.zeros((n_blocks, 2), np.uint64)  # [block, 2]: what is in it
        self._wanted = np.zeros((0, 0, 2), np.uint64)  # [row, i, 2]: what must be in the row's block i
        self.texts: dict[int, Text] = {}  # by row
        self._private = 0  # tags of blocks that are not full: none comes twice

    def begin(self, row: int, root: str, token_ids: Sequence[int]) -> None:
        """A row gets a request with these known tokens, before it gets blocks. root: of whose keys and values it may
        begin with. Raises FailedPrecondition."""
        if len(root) != 2 * BYTES:
            raise FailedPrecondition(f"row {row}: a root of {len(root) // 2} bytes, not {BYTES}")
        keys = keys_of(root, token_ids, self._block_size)
        start = (len(keys) - 1) * self._block_size
        self.texts[row] = Text(keys, token_ids[start:], start)

    def free(self, row: int) -> None:
        """Forgets a row. Its blocks keep their tags."""
        self.texts.pop(row, None)

    def grown(self, row: int, held: int, blocks: Sequence[int], shared: int) -> None:
        """A row that had `held` blocks gets further ones. The first `shared` of them must hold what its tokens say;
        what was in the others is void. Raises FailedPrecondition where it has no tokens for them."""
        text = self.texts.get(row)
        if shared and (text is None or held or shared >= len(text.keys)):
            raise FailedPrecondition(f"row {row}: {shared} blocks with keys and values, and no tokens for them")
        if text is None and not self._private:
            return  # no row has ever had tags here
        fresh = np.full((len(blocks) - shared, 2), PRIVATE, np.uint64)
        fresh[:, 1] = np.arange(self._private + 1, self._private + 1 + len(fresh))
        self._private += len(fresh)
        self._of[blocks[shared:]] = fresh
        if text is not None:
            end, (rows, columns, _) = held + len(blocks), self._wanted.shape
            if row >= rows or end > columns:
                grown = np.zeros((max(64, rows, 2 * row), max(8, columns, 2 * end), 2), np.uint64)
                grown[:rows, :columns] = self._wanted
                self._wanted = grown
            self._wanted[row, :shared] = _tags(text.keys[1 : 1 + shared])
            self._wanted[row, held + shared : end] = fresh
            text.filled = max(text.filled, shared)

    def check(self, rows: Sequence[int], table: np.ndarray, held: np.ndarray) -> None:
        """Raises FailedPrecondition where a block of one of these rows does not hold what the row's tokens say.

        table [B, n]: the rows' blocks, of which the first `held` [B] are theirs. All of them must have begun.
        """
        n = table.shape[1]
        # `take`, and both halves as one number: 14 us for 32 rows of 128 blocks; indexing and `any` take 90.
        differ = (self._of.take(table, 0) != self._wanted[rows, :n]).view(np.uint16)[:, :, 0]
        other = differ * (np.arange(n) < held[:, None])
        if np.count_nonzero(other):
            member, i = np.argwhere(other)[0].tolist()
            raise FailedPrecondition(
                f"row {rows[member]}: block {table[member, i]} has the keys and values of other tokens than the row's "
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
        tokens = text.tokens[: positions - text.start]
        is_last = n == len(text.keys) - 1 and text.start == n * size and len(tokens) == positions - text.start
        return bytes.fromhex(key_of(text.keys[n], tokens)) if is_last else None

    def ran(self, row: int, start: int, token_ids: Sequence[int], drafts: int, blocks: np.ndarray) -> None:
        """A row has run these tokens from position `start` on; the last `drafts` of them may be wrong. blocks: its own.

        A token below 0 is not known here: the blocks from there on get no keys.
        """
        text, size = self.texts[row], self._block_size
        at, final = start - text.start, start + len(token_ids) - drafts
        if -len(token_ids) < at <= len(text.tokens) and min(token_ids) >= 0:
            text.tokens[max(at, 0) :] = token_ids[max(-at, 0) :]
        while text.start + size <= min(final, text.start + len(text.tokens)):
            text.keys.append(key_of(text.keys[-1], text.tokens[:size]))
            del text.tokens[:size]
            text.start += size
        full = min(final, text.start) // size
        if full > text.filled:
            made = _tags(text.keys[1 + text.filled : 1 + full])
            self._wanted[row, text.filled : full] = self._of[blocks[text.filled : full]] = made
            text.filled = full


def _tags(keys: Sequence[str]) -> np.ndarray:
    """[n, 2]"""
    return np.frombuffer(bytes.fromhex("".join(keys)), np.uint64).reshape(-1, 2)
