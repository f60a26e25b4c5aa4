"""Which blocks have keys and values that further requests may begin with: an index of them by key.

Sources: Kwon et al., "PagedAttention" (SOSP 2023) and vLLM's "Automatic Prefix Caching" for blocks by digests; Zheng et
al., "SGLang" (2312.07104) for what goes first where there is no room: the least recently used leaf.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any


class Index:
    """Full blocks by key. Those that no row has are `unused`: they stay until their room is needed.

    A row has a block together with all those before it, and lets go of the last ones first. So of the unused ones, in
    the order in which they became so, none comes before those that begin with it.
    """

    def __init__(self) -> None:
        self.blocks: dict[str, int] = {}
        self.keys: dict[int, str] = {}
        self.unused = OrderedDict[int, None]()

    def longest(self, keys: Sequence[str]) -> list[int]:
        """The blocks of these keys, the first of which is a root, up to the first key that no block has."""
        found, blocks = list[int](), self.blocks
        for key in keys[1:]:
            block = blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def put(self, keys: Sequence[str], row: Sequence[int], begin: int, end: int) -> list[int]:
        """A row's blocks from `begin` on, up to `end`, are full. Returns unused ones that they replace.

        Where another row has a block of the same key, that block stays, and what follows here is not taken in: a row
        that has a block of the index has all blocks before it from there, too.
        """
        replaced = list[int]()
        for n in range(begin, end):
            if n and self.blocks.get(keys[n]) != row[n - 1]:
                break
            block = self.blocks.get(keys[n + 1], row[n])
            if block != row[n]:
                if block not in self.unused:
                    break
                del self.unused[block], self.keys[block]
                replaced.append(block)
            self.blocks[keys[n + 1]], self.keys[row[n]] = row[n], keys[n + 1]
        return replaced

    def evict(self) -> int:
        """Forgets the least recently used leaf. Returns its block."""
        block, _ = self.unused.popitem(last=False)
        del self.blocks[self.keys.pop(block)]
        return block

    def forget(self, blocks: Iterable[int]) -> None:
        """Blocks of a row whose keys and values are not to be used again."""
        for block in blocks:
            if (key := self.keys.pop(block, None)) is not None:
                del self.blocks[key]

    def state(self) -> dict[str, Any]:
        return {"keys": list(self.keys.items()), "unused": list(self.unused)}

    def restore(self, state: dict[str, Any]) -> None:
        self.keys = dict(state["keys"])
        self.blocks = {key: block for block, key in self.keys.items()}
        self.unused = OrderedDict.fromkeys(state["unused"])
