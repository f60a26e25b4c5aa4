"""The pool's Python: connections, outages, turns. The rules of its Lua are in tests/pool/test_rules.py.

The connection of a cancelled exchange is not used again in any case, so its close is no mutation.
"""

from mutations.changes import always, drop, instead, never, passes, unbound, without
from mutations.mutation import Mutation

SERVICE = "services/pool/orca_pool"
LINK = f"{SERVICE}/link.py"
PRIMARY = f"{SERVICE}/primary.py"
GATHERING = f"{SERVICE}/gathering.py"

LINK_TESTS = "tests/pool/test_link.py"
REDIS_TESTS = "tests/pool/test_any_redis.py"
GATHERING_TESTS = "tests/pool/test_gathering.py"

MUTATIONS = [
    Mutation(
        "a connection is kept after close",
        LINK,
        "Link._keep",
        without("_closed"),
        f"{LINK_TESTS}::test_an_exchange_that_ends_after_close_leaves_no_connection",
    ),
    Mutation(
        "an outage is not counted",
        LINK,
        "Link._lose",
        drop("_away"),
        f"{LINK_TESTS}::test_a_frozen_redis_is_unavailable_in_time",
    ),
    Mutation(
        "another server goes unnoticed",
        LINK,
        "_on_connect",
        without("_server"),
        f"{LINK_TESTS}::test_another_dataset_in_the_same_process_is_an_outage",
    ),
    Mutation(
        "an exchange has no bound",
        LINK,
        "Link._exchange",
        passes("asyncio.timeout_at", 0, "due + 3600"),
        f"{LINK_TESTS}::test_a_frozen_redis_is_unavailable_in_time",
    ),
    Mutation(
        "renewals wait for a turn",
        LINK,
        "Link.run",
        never("renewal"),
        f"{LINK_TESTS}::test_a_renewal_waits_for_no_turn",
    ),
    Mutation(
        "a turn is waited for without a bound",
        LINK,
        "_take_turn",
        unbound("_turns.acquire"),
        f"{LINK_TESTS}::test_a_wait_for_a_turn_has_a_bound",
    ),
    Mutation(
        "a replica that lags is enough",
        LINK,
        "_copied",
        without("there"),
        f"{REDIS_TESTS}::test_a_replica_that_is_slow_is_asked_again",
    ),
    Mutation(
        "a cluster's old node is asked on",
        LINK,
        "Link._lose",
        drop("_primary.forget"),
        f"{LINK_TESTS}::test_a_node_that_went_away_is_forgotten",
    ),
    Mutation(
        "exchanges with a server that was replaced wait on",
        LINK,
        "_look_out",
        drop("bound.reschedule"),
        f"{REDIS_TESTS}::test_a_read_goes_on_at_the_next_primary",
    ),
    Mutation(
        "any Sentinel is believed",
        PRIMARY,
        "Primary.find",
        instead("max((one.epoch for one in answers), default=0)", "min((one.epoch for one in answers), default=0)"),
        f"{REDIS_TESTS}::test_the_sentinel_that_knows_of_the_last_failover_is_believed",
    ),
    Mutation(
        "a Sentinel that replaces the primary is believed",
        PRIMARY,
        "Primary._ask",
        without("failover_in_progress"),
        f"{REDIS_TESTS}::test_a_sentinel_that_replaces_the_primary_does_not_name_it",
    ),
    Mutation(
        "each exchange that waits for the next primary asks for itself",
        LINK,
        "Link._line",
        always("_finds"),
        f"{REDIS_TESTS}::test_those_that_wait_together_ask_once",
    ),
    Mutation(
        "a server that is away is dialed without a pause",
        LINK,
        "Link._look",
        drop("asyncio.sleep"),
        f"{LINK_TESTS}::test_one_exchange_looks_for_a_server_that_is_away",
    ),
    Mutation(
        "a look waits for a server that says nothing",
        LINK,
        "Link._look",
        unbound("_primary.find"),
        f"{LINK_TESTS}::test_a_look_that_gets_no_answer_begins_again",
    ),
    Mutation(
        "a server that reads its file is taken",
        LINK,
        "_on_connect",
        instead('said.get(b"loading") == b"1"', "False"),
        f"{REDIS_TESTS}::test_a_redis_that_still_reads_its_file_is_not_refused",
    ),
    Mutation(
        "a replica is taken",
        LINK,
        "_on_connect",
        instead('said.get(b"role") == b"slave"', "False"),
        f"{LINK_TESTS}::test_an_exchange_with_a_demoted_server_waits_for_the_primary",
    ),
    Mutation(
        "why there is no turn is not said",
        LINK,
        "_take_turn",
        never("_unreached"),
        f"{LINK_TESTS}::test_one_exchange_looks_for_a_server_that_is_away",
    ),
    Mutation(
        "a new connection to a server that is busy raises an error of redis-py",
        LINK,
        "Link._exchange",
        never("NOT_NOW"),
        f"{LINK_TESTS}::test_a_busy_server_is_away_for_a_new_connection_too",
    ),
    # Attaches that go together.
    Mutation(
        "a cancelled exchange leaves its callers waiting",
        GATHERING,
        "_ended",
        instead("error is not None", "error is not None and not sending.cancelled()"),
        f"{GATHERING_TESTS}::test_a_cancelled_exchange_leaves_nobody_waiting",
    ),
    Mutation(
        "who asks as an exchange ends waits for ever",
        GATHERING,
        "_ended",
        drop("_start"),
        f"{GATHERING_TESTS}::test_what_comes_during_an_exchange_goes_together",
    ),
    Mutation(
        "listeners of ended requests are kept",
        f"{SERVICE}/listeners.py",
        "answered",
        without("row.finish"),
        "tests/pool/test_scripts.py::test_the_listener_of_a_request_that_has_ended_is_forgotten",
    ),
    Mutation(
        "a commit that saw a change of the listeners keeps what others knew",
        f"{SERVICE}/listeners.py",
        "answered",
        never("before"),
        "tests/pool/test_pool.py::test_a_change_of_a_listener_that_another_commit_saw",
    ),
]
