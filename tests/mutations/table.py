"""All mutations, a table for each package.

The first ones were named when the pool was read line by line; others are one-line changes that the tests once did not
find. A change that changes nothing that anybody can see is no mutation: then the rule has a second guard, and one of
them can go.
"""

from importlib import import_module

from .mutation import Mutation

TABLES = (
    *("pool", "scheduler", "endpoint", "worker", "common"),
    *("client", "local", "cli", "kernels", "chart", "chaos", "bench"),
)
MUTATIONS: list[Mutation] = [one for name in TABLES for one in import_module(f"mutations.tables.{name}").MUTATIONS]
