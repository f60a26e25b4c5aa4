"""Every Redis key of the project. One release has one pool, and two releases never share one.

The keys of a pool share the hash tag `{POOL}`, so a Redis Cluster keeps them on one node. docs/hooks/keys.py writes the
tables into docs/pool.md, "Keys".

| `orca:{POOL}:...`     | type       | meaning                                                    | life               |
| --------------------- | ---------- | ---------------------------------------------------------- | ------------------ |
| pool                  | hash       | schema; digest of the model that all services share, its   | the release        |
|                       |            | max positions and vocabulary; slots of the largest engine, |                    |
|                       |            | slots of a block, whether output is reserved; last numbers |                    |
|                       |            | given; how far sweeps have come; since when clients can    |                    |
|                       |            | come back, after an outage, and after a long one; whose    |                    |
|                       |            | keys and values requests begin with. A service with        |                    |
|                       |            | another schema or model refuses to start                   |                    |
| load                  | hash       | sums over what waits: new tokens, slots, bytes; by tenant  | the release        |
|                       |            | (a host, where there are no keys) its slots, requests and  |                    |
|                       |            | bytes that wait, and its requests that live                |                    |
| waiting               | sorted set | ids in the queue by their order: position = rank           | until claimed or   |
|                       |            |                                                            | ended              |
| handed                | sorted set | ids that an engine of the role prefill has handed over, by | until claimed,     |
|                       |            | their order                                                | ended or queued    |
|                       |            |                                                            | again              |
| tags                  | sorted set | where shares are fair: tenants by the order of their next  | until all that     |
|                       |            | request, at most 65,536                                    | runs is behind it  |
| claimed:ENGINE        | sorted set | ids that an engine has claimed, by their order             | until finished or  |
|                       |            |                                                            | given back         |
| listeners:ENGINE      | hash       | by claim number: the first bytes of all packets to the     | until given back   |
|                       |            | call (wire.ADDRESS, id) and its endpoint. A commit reads   |                    |
|                       |            | nothing else of its rows                                   |                    |
| asking                | sorted set | engines that found nothing to claim, by free slots         | until hinted, or a |
|                       |            |                                                            | claim              |
| yielding              | sorted set | engines of which requests may give way, by the lowest      | until a renewal    |
|                       |            | class of those; 5 where shares are fair                    | without any        |
| prefixes              | hash       | by the last block's key of a prompt (8 bytes of it): `1`   | with its request   |
|                       |            | and the id of the request that has it, `+` and the last    |                    |
|                       |            | one's where there are several                              |                    |
| request:ID            | hash       | one request, in the fields below                           | retention after    |
|                       |            |                                                            | end                |
| tokens:ID             | string     | the committed tokens, append only: 16 bytes each           | with its request   |
|                       |            | (wire.TOKEN), id u32, logprob f32, iteration u64           |                    |
| tops:ID               | string     | the most probable tokens at the place of each token,       | with its request   |
|                       |            | append only: 8 bytes each (orca_common.scores), where      |                    |
|                       |            | a request asks for them                                    |                    |
| prompt:ID             | string     | logprobs of the prompt, where a request asks for           | with its request   |
|                       |            | them; written with token 0                                 |                    |
| due                   | sorted set | ids by the moment of a deadline, or of a detach grace's    | with its request   |
|                       |            | end                                                        |                    |
| ended                 | sorted set | ids of ended requests by the moment of their end: the      | with its request   |
|                       |            | oldest is forgotten first                                  |                    |
| delivery:ENDPOINT     | stream     | packets for one endpoint incarnation (wire.ADDRESS, then   | until read; at     |
|                       |            | first index, tokens, end). Entry 0-N is number N; e:       | most 65,536        |
|                       |            | engine, p: packets                                         |                    |
| read                  | string     | the last reader, with `redis_replicas`: WAITAOF waits for  | the release        |
|                       |            | it, and so for all that was read                           |                    |
| control:ENGINE        | stream     | hints for a master, at most 256; h: '' (requests wait),    | until retired      |
|                       |            | the id of one that ended early, or /CLAIM: no engine needs |                    |
|                       |            | what was handed over. The answer to the next commit is     |                    |
|                       |            | the truth                                                  |                    |
| engine:ID             | hash       | epoch, reserved iterations, last claim, number of its      | until retired      |
|                       |            | listeners, tp, pp, weights, policy, role, load, finishing  |                    |
| adapters              | hash       | adapters beside the model by id: name, folder, state,      | until retired and  |
|                       |            | source, fingerprint (change_adapters.lua)                  | unused             |
| uses:ADAPTER          | set        | ids of live requests that have this adapter                | while there are    |
|                       |            |                                                            | some               |
| has:ENGINE            | hash       | by an adapter's id: `+` and its fingerprint where all      | until formed anew  |
|                       |            | ranks have it, or `-` and why they do not                  |                    |
| leases                | hash       | `COUNTER TERM OWNER` of all engines                        | the release        |
| engines               | sorted set | all engines by their slots; 0: never formed                | the release        |
| expected              | sorted set | weights that an engine has lost before it had finished, by | until that moment  |
|                       |            | the moment until which their requests wait for them        |                    |
| endpoint:ID           | hash       | registration number, whether it is leaving                 | until swept        |
| calls:ENDPOINT        | set        | ids of live requests whose call is there: those to detach  | with its requests  |
|                       |            | when it dies                                               |                    |
| orphans               | set        | dead endpoints whose calls are not all detached yet        | until they are     |
| endpoints, schedulers | sorted set | living processes by the moment of their last renewal       | until swept        |

The fields of `request:ID`, '' where a field has no value:

| fields                                         | meaning                                                             |
| ---------------------------------------------- | ------------------------------------------------------------------- |
| record, digest, max_tokens, new, grace, tenant | the request as submitted: PoolRequest, digest of its body, slots    |
|                                                | that it fills at the end, its new tokens among them, detach grace   |
|                                                | in microseconds, the tenant who pays                                |
| upfront, order, class                          | slots that must be free for it to begin; its sort key in the queue; |
|                                                | its class, 0 where shares are fair                                  |
| state                                          | waiting, claimed, handed or ended                                   |
| claim, engine                                  | claim number and engine while claimed                               |
| engines                                        | lines `INDEX ENGINE`, one for each claim: the first token's index   |
| weights                                        | of the engine that claimed it last: with tokens, no other weights   |
|                                                | go on with it. Behind a slash the id of its adapter                 |
| mark, place                                    | where requests begin with others' keys and values: the last key of  |
|                                                | its prompt; term, epoch and name of the engine that claimed it last |
| prefix_at, overtaken                           | there, too: the `place` of the request whose prompt is the longest  |
|                                                | beginning of its own; how many were taken before it as it waited    |
|                                                | for that engine                                                     |
| handed_at, handed_claim, handed                | of one that was handed over, until its keys and values are pulled:  |
|                                                | term, epoch and name of the engine that has them, its claim number  |
|                                                | there, and where they are (Handed of worker.proto)                  |
| endpoint, attempt, closed                      | the listening call; closed: 1 when this attempt detached            |
| losses, loss_at                                | losses since the last token; tokens at the last loss                |
| deadline, detach_at                            | moments at which the request ends                                   |
| lives                                          | the grace that ends at detach_at, in microseconds: after an outage  |
|                                                | it begins anew                                                      |
| reason, final                                  | why it ended (0: not yet), and its number of tokens                 |
| submitted, claimed_at, first_token, finished   | moments of its life (0: not yet)                                    |
| queued_at, taken_at                            | moments at which it was queued, or handed over, and claimed last    |

Moments are Redis's TIME in microseconds. The scripts (lua/prelude.lua) make the same names from the first key.
"""


def scoped(tenant: str, request_id: str) -> str:
    """A request's id in the pool: two tenants may use the same id, and know nothing of each other's requests.

    A request id holds no slash, so no tenant can spell another one's. Without tenants ('') the id is the client's own.
    """
    return f"{tenant}/{request_id}" if tenant else request_id


def tenant_of(request_id: str) -> str:
    """Whose request has this id in the pool; '' without tenants."""
    return request_id.rpartition("/")[0]


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
