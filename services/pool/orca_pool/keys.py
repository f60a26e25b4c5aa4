"""Every Redis key of the project. One release, one pool; the hash tag `{POOL}` keeps its keys on one node of a cluster.

| `orca:{POOL}:...`     | type       | meaning                                                   | life                |
| --------------------- | ---------- | --------------------------------------------------------- | ------------------- |
| pool                  | hash       | model identity, slots of the largest engine, last numbers | the release         |
| waiting               | sorted set | ids in the queue by arrival number: position = rank       | until claimed       |
| claimed:ENGINE        | sorted set | ids that an engine holds, by arrival number               | until given back    |
| request:ID            | hash       | one request: record, state, numbers, listener, times      | retention after end |
| tokens:ID             | string     | 16 bytes a committed token (wire.TOKEN), append only      | with its request    |
| due                   | sorted set | ids by the moment of a deadline or a grace's end          | with its request    |
| delivery:ENDPOINT     | stream     | n: number, e: engine, p: packets (wire.PACKET)            | the incarnation     |
| control:ENGINE        | stream     | hints h: '' (requests wait) or the id of an early end     | until retired       |
| engine:ID             | hash       | lease, epoch, reserved iterations, last claim, sizes      | until retired       |
| engines               | set        | ids of all engines: keys cannot be listed in a cluster    | the release         |
| endpoint:ID           | hash       | registration number, number of the last delivery entry    | until swept         |
| endpoints, schedulers | sorted set | living processes by the moment of their last renewal      | until swept         |

Moments are Redis's TIME in microseconds. The scripts (lua/prelude.lua) compute the same names from the first key.
"""


class Keys:
    """Names of the keys that Python itself reads or writes. `pool` is the release's name."""

    def __init__(self, pool: str) -> None:
        if not pool or set(pool) & set("{}"):
            raise ValueError(f"pool: a name without braces is needed, it is {pool!r}")
        self.prefix = f"orca:{{{pool}}}:"
        self.pool = f"{self.prefix}pool"

    def delivery(self, endpoint: str) -> str:
        return f"{self.prefix}delivery:{endpoint}"

    def control(self, engine: str) -> str:
        return f"{self.prefix}control:{engine}"
