"""Keys of a request's first blocks, by which requests that begin alike find each other's keys and values."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BYTES = 16  # of a key: two beginnings that differ have one key with a probability of 2^-128


def keys_of(token_ids: Sequence[int], block_size: int) -> tuple[str, ...]:
    """Returns a key for each full block of these tokens: it stands for all tokens up to the block's end."""
    tokens, state, keys = array("Q", token_ids), blake2b(digest_size=BYTES), list[str]()
    for end in range(block_size, len(tokens) + 1, block_size):
        state.update(tokens[end - block_size : end].tobytes())
        keys.append(state.hexdigest())
    return tuple(keys)
