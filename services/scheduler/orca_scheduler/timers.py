"""Every duration and bound of a scheduler, in seconds, in one table. The leases' own are in `orca_pool.leases`."""

# Reaching pods and ranks
DIAL = 5.0  # one call to a supervisor, or to a rank that listens
REDIAL = 0.2  # between attempts to reach a supervisor
REACH = 10.0  # until a supervisor that was not reached is tried with a new channel, and a newer certificate
POLL = 0.05  # between looks whether a starting rank listens
START = 120.0  # for all ranks of a life to say Hello: importing torch from a cold disk takes its time
LOAD = 600.0  # one step of a formation: a rank reads its slice of the model in one

# Judging ranks
HEARTBEAT = 0.5
SILENCE = 2.0  # of a member that answers no heartbeat, until it is suspected
GREETING = SILENCE - HEARTBEAT  # the same of a process that is greeted again: as long as a heartbeat has no answer
FORMING_SILENCE = 15.0  # the same while ranks load, when Python's lock is not always free
LOOK = 0.1  # between looks at the silence of all ranks, at least
SELDOM = 1.0  # and at most, while each rank has been heard of lately: less than any silence that counts
STUCK = 30.0  # without progress, at least, until a device is suspected
STUCK_TIMES = 10  # and this many times what the iteration takes by those that were seen
STUCK_POSITION = 0.05  # that a position takes of the first iteration, before any was seen
STUCK_MOST = 7200.0  # at most: a rank waits no longer for the data of its neighbour
DOUBT = SILENCE + 1.0  # how long a doubtful suspicion waits for a sure one: peers complain before a silence is found
CUT = 0.5  # the same where a connection broke: the rank's supervisor tells within it that the process has ended
CUTS = 3  # connections to one process that may break until it is fenced; its successor may do better
LINGER = 0.1  # after a sure suspicion, so that ranks that were lost together are named together

# Forming again
KEEP_CLAIMS = 2.0  # how long a greeting keeps the requests of an earlier master
REFORM = 0.2  # between the end of one life and the next
LONGEST_REFORM = 5.0  # the same after refusals, which double it

# Requests that change engines
KEEP = 45.0  # for a row that was handed over: longer than it may be claimed (KEEP_SECONDS), and a pull
PULL = 30.0  # for a pull whose turn it is on a rank, until the rank is suspected: it ends one within 12 s by itself

# Changing the model
FINISH = 300.0  # for what was begun on the old one; `finish_seconds` is the setting

# Scaling engines by the load: defaults of the settings
QUEUE_OLD = 10.0  # age of the queue's first request, above which there are too few engines
UP_AGAIN = 60.0  # after a change, for an engine to come up and take its share
DOWN = 300.0  # with room for all requests in one engine less

# Giving an engine up to another scheduler
UNREACHED = 20.0  # without an answer of its supervisors
WITHDRAWN = 60.0  # for so long the one that gave it up takes nothing, and is not counted

# Iterating
VAIN = 0.1  # at most, before an iteration of rows that all wait for their forms runs again
TICK = 0.05  # between looks at requests whose deadlines are over
