"""The times of the pool's leases, in seconds. Each is stated here alone; the Lua scripts get them from `scripts.py`.

A lease is a promise that its holder repeats. An endpoint and a scheduler each hold one on their own registration; the
master of an engine holds one on the engine. See docs/design.md, "The request pool".

| name                 | value | used by                      | why this value                                        |
| -------------------- | ----- | ---------------------------- | ----------------------------------------------------- |
| RENEW_SECONDS        | 0.4   | endpoints, schedulers and    | Three renewals fit into one lease, so that one lost   |
|                      |       | masters, to renew            | or late answer costs nobody a lease.                  |
| LEASE_SECONDS        | 1.5   | the sweep, for endpoints and | Short, because clients wait for it when a process     |
|                      |       | schedulers; candidates, for  | dies; long enough for a loop that stood still for a   |
|                      |       | an engine's lease            | second.                                               |
| GAP_SECONDS          | 0.75  | the sweep, candidates,       | Half a lease: who is judged dead was silent over two  |
|                      |       | endpoints                    | earlier looks at least, so the pool was there to be   |
|                      |       |                              | reached.                                              |
| DETACH_FLOOR_SECONDS | 30    | the sweep, endpoints         | A client that loses its endpoint needs some seconds   |
|                      |       |                              | to notice and to find another one.                    |
"""

# Time from one renewal of a lease to the next.
RENEW_SECONDS = 0.4

# A lease that was not renewed for so long has expired. The sweep removes an endpoint or a scheduler then; a candidate
# may take an engine when its own reads saw the lease unchanged for so long.
LEASE_SECONDS = 1.5

# Whoever looked last at the leases longer ago than this cannot tell a death from an outage of its own or of the pool. A
# sweep then only renews all leases, a candidate counts from the start, and an endpoint takes ended calls for its fault.
GAP_SECONDS = 0.75

# A request lives on at least so long when its endpoint ended the call (it died, drained, or its own loop was late).
DETACH_FLOOR_SECONDS = 30.0
