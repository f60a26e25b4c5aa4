"""The agreement of schedulers and ranks, beyond the messages of `worker.proto`.

A release can be updated in any order, because schedulers and ranks of neighbouring numbers work together: a scheduler
drives ranks of its own number and of the one before, and a rank obeys a master of its own number and of the next one.
All ranks of an engine have the same number.

Raise PROTOCOL when an older process would misunderstand a message, by one for each release. A new sampling parameter
does not count: a rank that does not know it ends the request. A scheduler of the new number must still say to ranks of
the number before what they understand, and understand what they say. So keep those messages, and let the master choose
by the number in the ranks' Hello. What only older numbers have needed may go.
"""

PROTOCOL = 1

# What a policy may need, and a rank of a model can, beyond the paper's iterations: parts of prompts; several outputs of
# one member, one for each of its drafts and one more; rows that begin behind blocks whose keys a rank checks; rows that
# get blocks for each position as it comes. An engine with a role needs ranks that give and take the keys and values of
# requests that change engines.
PARTS, OUTPUTS, SHARED, GROWN, HANDED = "parts", "outputs", "keyed", "grown", "handed"
NO_TOKEN = (1 << 32) - 1  # in an iteration's `tokens`, where the admission has the token
CONTROLLER = "orca.v1.Controller"  # the service of a rank
TERM_METADATA = "orca-term"  # key in a Run call's metadata; with the term, a rank refuses the stream of an old master


def drives(rank: int) -> bool:
    """Whether a scheduler of this release drives ranks of this protocol number."""
    return rank in (PROTOCOL, PROTOCOL - 1)


def obeys(master: int) -> bool:
    """Whether a rank of this release obeys a master of this protocol number."""
    return master in (PROTOCOL, PROTOCOL + 1)
