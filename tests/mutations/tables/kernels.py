"""The kernels."""

from mutations.changes import drop, never
from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "stale memory beyond a request's last token is read",
        "kernels/orca_kernels/reference.py",
        "SplitAttention.__call__",
        drop("v", "masked_fill_"),
        "tests/kernels/test_reference.py",
    ),
    Mutation(
        "more query heads than the kernels hold are taken",
        "kernels/orca_kernels/cpu/program.py",
        "Program.attend",
        never("MAX_GROUP"),
        "tests/kernels/test_cpu.py::test_more_query_heads_a_key_head_than_the_kernels_hold_are_refused",
    ),
]
