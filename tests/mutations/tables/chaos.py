"""`orca chaos`: what is left in a pool, the record of a run."""

from mutations.changes import never
from mutations.mutation import Mutation

CHAOS = "chaos/orca_chaos"

MUTATIONS = [
    Mutation(
        "what is kept for ever is not noticed",
        f"{CHAOS}/pool_check.py",
        "_look",
        never("state", "of", "ended"),
        "tests/chaos/test_pool_check.py",
    ),
    Mutation(
        "half a line of a record is read",
        f"{CHAOS}/record.py",
        "Record.__init__",
        never("whole", "written"),
        "tests/chaos/test_record.py",
    ),
    Mutation(
        "a record of another stack goes on",
        f"{CHAOS}/record.py",
        "Record.has",
        never("known.faults"),
        "tests/chaos/test_record.py",
    ),
]
