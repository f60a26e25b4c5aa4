"""The client: a request over many calls, patience, channels."""

from mutations.changes import drop, instead, lacks, never, passes, sets, without
from mutations.mutation import Mutation

RESUMPTION = "client/orca_client/resumption.py"
CHANNELS = "client/orca_client/channels.py"
PURE = "tests/client/test_resumption.py"

MUTATIONS = [
    Mutation(
        "a request that is known again is sent again at each break",
        RESUMPTION,
        "take",
        drop("_forgotten"),
        f"{PURE}::test_a_request_that_the_server_has_lost",
    ),
    Mutation(
        "a request is begun again after a token was shown",
        RESUMPTION,
        "_may_begin_again",
        instead("not shown", "True"),
        f"{PURE}::test_a_request_that_the_server_has_lost",
    ),
    Mutation(
        "a lost request is begun again without end",
        RESUMPTION,
        "_may_begin_again",
        without("_forgotten"),
        f"{PURE}::test_a_request_that_is_lost_again_before_it_was_accepted",
    ),
    Mutation(
        "what was seen before has no digest",
        RESUMPTION,
        "_digest",
        instead("self._seen or ()", "()"),
        f"{PURE}::test_a_resume_has_the_digest_of_what_was_seen",
    ),
    Mutation(
        "a token that has changed is shown",
        RESUMPTION,
        "_token",
        never("place", "message.token_id"),
        f"{PURE}::test_the_end_stays",
    ),
    Mutation(
        "waiting for a named moment is an outage",
        "client/orca_client/patience.py",
        "refused",
        drop("working"),
        f"{PURE}::test_a_named_delay_is_no_outage",
    ),
    Mutation(
        "time in a queue is an outage",
        "client/orca_client/patience.py",
        "working",
        sets("_down_since", "self._down_since"),
        f"{PURE}::test_the_bound_counts_only_outages",
    ),
    Mutation(
        "an address that failed is called again at once",
        CHANNELS,
        "Channels.error",
        drop("_addresses.failed"),
        f"{PURE}::test_an_address_that_failed_is_avoided",
    ),
    Mutation(
        "a message has 4 MiB at most",
        CHANNELS,
        "channel_options",
        lacks("grpc.max_receive_message_length"),
        "tests/client/test_client.py::test_a_long_message",
    ),
    Mutation(
        "a resumed request names no model",
        "client/orca_client/base.py",
        "resume",
        passes("Trace", 3, "metadata"),
        "tests/client/test_client.py::test_a_resumed_request_goes_to_its_model",
    ),
    Mutation(
        "waits go on growing after progress",
        "client/orca_client/patience.py",
        "Patience.progress",
        instead("(0, 0.0, None, None)", "(self._failures, 0.0, None, None)"),
        "tests/client/test_resumption.py::test_waits_grow_and_are_jittered",
    ),
]
