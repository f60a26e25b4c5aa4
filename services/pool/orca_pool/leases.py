"""The times of the pool's leases, in seconds. Each is stated here alone; the Lua scripts get them from `scripts.py`.

A lease is a promise that its holder repeats. An endpoint and a scheduler each hold one on their own registration; the
master of an engine holds one on the engine. See docs/design.md, "The request pool".

| name                 | used by                               | why this value                                       |
| -------------------- | ------------------------------------- | ---------------------------------------------------- |
| RENEW_SECONDS        | endpoints, schedulers and masters, to | Three renewals fit into a lease, so one answer may   |
|                      | renew                                 | be lost or late.                                     |
| LEASE_SECONDS        | the sweep, for endpoints and          | Short, because clients wait for it when a process    |
|                      | schedulers; candidates, for an engine | dies; but a loop may stand still for a second.       |
| GAP_SECONDS          | the sweep, candidates, endpoints,     | Half a lease. So at least two earlier looks fell     |
|                      | hand-overs (who stays?)               | into the silence of a process that is judged dead,   |
|                      |                                       | and the pool answered them.                          |
| DETACH_FLOOR_SECONDS | the sweep, endpoints                  | A client needs some seconds to notice that its       |
|                      |                                       | endpoint is gone, and to find another one.           |
| KEEP_SECONDS         | `claim` and the sweep, for requests   | Longer than an engine that decodes is full, as a     |
|                      | that were handed over                 | rule: computing a prompt again is dear.              |
"""

# Time from one renewal of a lease to the next.
RENEW_SECONDS = 0.4

# A lease that was not renewed for so long has expired. The sweep removes an endpoint or a scheduler then; a candidate
# may take an engine when its own reads saw the lease unchanged for so long.
LEASE_SECONDS = 1.5

# After a longer pause between two looks at the leases, nobody can tell a death from an outage of the pool or of the one
# who looks. A sweep and a candidate then count the pause as one renewal; when it was longer than a lease, every count
# starts again. An endpoint whose own renewal paused so long counts the calls that end as ended by itself.
GAP_SECONDS = 0.75

# A request lives on at least so long when its endpoint ended the call (it died, drained, or its own loop was late).
DETACH_FLOOR_SECONDS = 30.0

# So long a request that was handed over waits for an engine that decodes, and its keys and values are kept. Then it
# begins again.
KEEP_SECONDS = 30.0
