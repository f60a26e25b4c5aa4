"""Every Redis key of the project. One release has one pool, and two releases never share one.

The keys of a pool share the hash tag `{POOL}`, so a Redis Cluster keeps them on one node.

| `orca:{POOL}:...`     | type       | meaning                                               | life                |
| --------------------- | ---------- | ----------------------------------------------------- | ------------------- |
| pool                  | hash       | schema, the model, slots of the largest engine, slots | the release         |
|                       |            | of a block and whether output is reserved, last       |                     |
|                       |            | numbers, how far sweeps have come                     |                     |
| load                  | hash       | what waits: new tokens, slots, bytes; by tenant: its  | the release         |
|                       |            | slots that wait, its requests that live               |                     |
| waiting               | sorted set | ids in the queue by their order: position = rank      | until claimed       |
| claimed:ENGINE        | sorted set | ids that an engine has claimed, by their order        | until given back    |
| listeners:ENGINE      | hash       | wire.ADDRESS, id and endpoint of each claim number    | until given back    |
| asking                | sorted set | engines that found nothing to claim, by free slots    | until hinted        |
| request:ID            | hash       | one request: record, state, numbers, listener, times  | retention after end |
| tokens:ID             | string     | the committed tokens (wire.TOKEN), append only        | with its request    |
| tops:ID               | string     | the most probable tokens at the place of each token   | with its request    |
|                       |            | (orca_common.scores), where asked for; append only    |                     |
| prompt:ID             | string     | the logprobs of the prompt, where asked for           | with its request    |
| due                   | sorted set | ids by the moment of a deadline or a grace's end      | with its request    |
| ended                 | sorted set | ids of ended requests by the moment of their end      | with its request    |
| delivery:ENDPOINT     | stream     | id 0-NUMBER, e: engine, p: packets (wire.ADDRESS ...) | until read          |
| read                  | string     | who read last, with `redis_replicas`: WAITAOF waits   | the release         |
|                       |            | for it, and for all that was read                     |                     |
| control:ENGINE        | stream     | h: '' (requests wait), or the id of one that ended    | until retired       |
| engine:ID             | hash       | epoch, reserved iterations, last claim, number of its | until retired       |
|                       |            | listeners, tp, pp, weights, policy, load, finishing   |                     |
| leases                | hash       | '<counter> <term> <owner>' of all engines             | the release         |
| engines               | sorted set | all engines by their slots; 0: never formed           | the release         |
| endpoint:ID           | hash       | registration number, whether it is leaving            | until swept         |
| calls:ENDPOINT        | set        | ids of live requests that listen there                | with its requests   |
| orphans               | set        | dead endpoints whose calls are not all detached yet   | until they are      |
| endpoints, schedulers | sorted set | living processes by the moment of their last renewal  | until swept         |

The fields of `request:ID`, '' where there is none:

| fields                                                | meaning                                                     |
| ----------------------------------------------------- | ----------------------------------------------------------- |
| record, digest, max_tokens, new, grace, tenant        | the request as submitted: PoolRequest, digest of its body,  |
|                                                       | slots that it fills at the end, its new tokens among them,  |
|                                                       | detach grace in microseconds, who pays                      |
| upfront, order                                        | slots that must be free for it to begin; its place in the   |
|                                                       | queue, the smallest first                                   |
| state                                                 | waiting, claimed or ended                                   |
| arrival, claim, engine                                | arrival number; claim number and engine while claimed       |
| engines                                               | lines '<index of the first token> <engine>', a line a claim |
| weights                                               | of the engine that claimed it last: with tokens, no other   |
|                                                       | ones go on with it                                          |
| endpoint, attempt, closed                             | the listening call; closed: 1 when this attempt detached    |
| losses, loss_at                                       | losses since the last token; tokens at the last loss        |
| deadline, detach_at                                   | moments at which the request ends                           |
| reason, final                                         | why it ended (0: not yet), and its number of tokens         |
| submitted, claimed_at, first_token, finished          | moments of its life (0: not yet)                            |

Moments are Redis's TIME in microseconds. The scripts (lua/prelude.lua) make the same names from the first key.
"""


def scoped(tenant: str, request_id: str) -> str:
    """A request's id in the pool: two tenants may use the same id, and know nothing of each other's requests.

    A request id holds no slash, so no tenant can spell another one's. Without tenants ('') the id is the client's own.
    """
    return f"{tenant}/{request_id}" if tenant else request_id


class Keys:
    """The names of the keys that Python itself reads. `pool` is the release's name."""

    def __init__(self, pool: str) -> None:
        if not pool or set(pool) & set("{}"):
            raise ValueError(f"pool: a name without braces is needed, it is {pool!r}")
        self.prefix = f"orca:{{{pool}}}:"
        self.pool = f"{self.prefix}pool"
        self.read = f"{self.prefix}read"
        self.tokens = f"{self.prefix}tokens:".encode()

    def delivery(self, endpoint: str) -> str:
        """The delivery stream of an endpoint's incarnation."""
        return f"{self.prefix}delivery:{endpoint}"

    def control(self, engine: str) -> str:
        """The hints for an engine's master."""
        return f"{self.prefix}control:{engine}"
