"""The benchmarks and the lab: what their numbers mean."""

from mutations.changes import gives, instead, never, sets
from mutations.mutation import Mutation

MEASURES = "bench/orca_bench/measures.py"

MUTATIONS = [
    Mutation(
        "a client that is late makes a server fast",
        MEASURES,
        "Answer.latency",
        gives("self.ended - self.sent"),
        "tests/bench/test_measures.py",
    ),
    Mutation(
        "requests that failed count in the rates",
        MEASURES,
        "summary",
        sets("good", "list(answers)"),
        "tests/bench/test_measures.py",
    ),
    Mutation(
        "a peer that failed has numbers",
        "bench/orca_bench/compare.py",
        "lines_of",
        never("process.returncode"),
        "tests/bench/test_compare.py",
    ),
    Mutation(
        "new keys and values are written for nothing",
        "lab/orca_lab/roofline.py",
        "work",
        instead(
            "tokens + sum(seen(before, new, a.window) for before, new in requests)",
            "sum(seen(before, new, a.window) for before, new in requests)",
        ),
        "tests/bench/test_engine.py::test_the_floor_of_a_case_is_that_of_its_iterations",
    ),
]
