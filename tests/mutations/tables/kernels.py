"""The kernels."""

from mutations.changes import never
from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "more query heads than the kernels hold are taken",
        "kernels/orca_kernels/cpu/program.py",
        "Program.attend",
        never("MAX_GROUP"),
        "tests/kernels/test_cpu.py::test_more_query_heads_a_key_head_than_the_kernels_hold_are_refused",
    ),
]
