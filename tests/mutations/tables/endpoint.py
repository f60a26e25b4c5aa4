"""The endpoint: delivery, calls, the transcript, both doors."""

from mutations.changes import Text, always, drop, gives, instead, never, passes, sets, swap, unbound, without
from mutations.mutation import Mutation

SERVICE = "services/endpoint/orca_endpoint"
DELIVERY = f"{SERVICE}/calls/delivery.py"
CALL = f"{SERVICE}/calls/call.py"
TRANSCRIPT = f"{SERVICE}/calls/transcript.py"

FAULTS = "tests/endpoint/test_faults.py"
GRPC_TESTS = "tests/endpoint/test_grpc.py"
TRANSCRIPT_TESTS = "tests/endpoint/test_transcript.py"

MUTATIONS = [
    # The delivery.
    Mutation(
        "a late endpoint is not at fault",
        DELIVERY,
        "own_fault",
        gives("self.leaving"),
        f"{FAULTS}::test_a_call_that_ends_while_the_endpoint_is_late_has_a_longer_grace",
    ),
    Mutation(
        "the cursor stays at a new incarnation",
        DELIVERY,
        "Delivery._renew",
        sets("_cursor", "0, self._cursor"),
        f"{FAULTS}::test_declared_dead",
    ),
    Mutation(
        "a detach does not wait for its attach",
        DELIVERY,
        "_detach",
        drop("asyncio.wait"),
        f"{FAULTS}::test_a_call_that_leaves_during_its_attach_detaches_after_the_answer",
    ),
    Mutation(
        "entries of an old incarnation count",
        DELIVERY,
        "Delivery.read",
        never("incarnation"),
        f"{FAULTS}::test_what_is_read_of_an_old_incarnation_does_not_count",
    ),
    Mutation(
        "the stream of an old incarnation is read on",
        DELIVERY,
        "Delivery._renew",
        drop("_reading.reschedule"),
        f"{FAULTS}::test_the_stream_of_an_old_incarnation_is_left_at_once",
    ),
    Mutation(
        "a missed entry is not noticed",
        DELIVERY,
        "Delivery.read",
        never("entry.number"),
        f"{FAULTS}::test_a_missed_packet",
    ),
    Mutation(
        "packets of another attempt are shown",
        DELIVERY,
        "Delivery.read",
        always("packet.attempt"),
        f"{FAULTS}::test_packets_of_another_attempt",
    ),
    Mutation(
        "a reconnect keeps the incarnation",
        DELIVERY,
        "Delivery._renew",
        without("_generation"),
        f"{FAULTS}::test_redis_dies_in_the_middle",
    ),
    Mutation(
        "a refused attach is detached",
        DELIVERY,
        "_detach",
        never("NEVER_ATTACHED"),
        f"{FAULTS}::test_a_call_that_leaves_during_its_attach_detaches_after_the_answer",
    ),
    Mutation(
        "a detach is tried for ever",
        DELIVERY,
        "_detach",
        unbound("_pool.detach"),
        f"{FAULTS}::test_a_detach_is_given_up",
    ),
    Mutation(
        "an old registration stays",
        DELIVERY,
        "Delivery._renew",
        passes("renew_endpoint", "replaces", None),
        f"{FAULTS}::test_redis_dies_in_the_middle",
    ),
    Mutation(
        "entries that were read stay in Redis",
        DELIVERY,
        "Delivery._renew",
        passes("renew_endpoint", "read", None),
        f"{FAULTS}::test_what_was_read_is_deleted",
    ),
    Mutation(
        "an endpoint that was declared dead goes on",
        DELIVERY,
        "Delivery._renew",
        sets("known", "True"),
        f"{FAULTS}::test_declared_dead",
    ),
    # The call.
    Mutation(
        "packets that come during an attach are dropped",
        CALL,
        "Call._attach",
        sets("_submission", "self._drop_inbox()"),
        f"{FAULTS}::test_packets_that_overtake_the_answer_of_an_attach_are_kept",
    ),
    Mutation(
        "a call that breaks at its stop string is not detached",
        CALL,
        "Call.__aexit__",
        instead('self._transcript.next == "end"', 'self._transcript.next in ("end", "stop")'),
        f"{FAULTS}::test_a_call_that_breaks_while_its_stop_is_recorded_detaches",
    ),
    Mutation(
        "an attach is cancelled with its call",
        CALL,
        "_attach_once",
        gives("await self._operation", "asyncio.shield"),
        f"{FAULTS}::test_a_call_that_leaves_during_its_attach_detaches_after_the_answer",
    ),
    Mutation(
        "a slow client has no bound",
        CALL,
        "Call.put",
        never("_limits.buffer"),
        f"{GRPC_TESTS}::test_a_client_that_does_not_read",
    ),
    Mutation(
        "healing is counted over the call",
        CALL,
        "pieces",
        drop("_healing"),
        f"{FAULTS}::test_tokens_that_redis_lost",
    ),
    Mutation(
        "healing has no bound",
        CALL,
        "_wait_for_healing",
        never("_healing", "HEALING"),
        f"{FAULTS}::test_tokens_that_stay_lost",
    ),
    Mutation(
        "an endpoint cannot leave at a stop string",
        CALL,
        "_record_stop",
        never("_leaving"),
        f"{FAULTS}::test_an_endpoint_leaves_while_a_stop_waits_for_tokens_that_redis_lost",
    ),
    Mutation(
        "a call that lost tokens lives on",
        CALL,
        "Call._grace",
        never("DataLoss"),
        f"{FAULTS}::test_tokens_that_stay_lost",
    ),
    Mutation(
        "a missed packet is not asked for",
        CALL,
        "Call.resync",
        drop("_must_attach"),
        f"{FAULTS}::test_a_missed_packet",
    ),
    # Requests and answers.
    Mutation(
        "a request that fills the context is refused",
        f"{SERVICE}/requests/validation.py",
        "Validator._fits",
        swap(">", ">=", "new"),
        "tests/endpoint/test_validation.py::test_a_request_may_fill_the_context",
    ),
    Mutation(
        "a cancelled stream ends as a whole one",
        f"{SERVICE}/openai/stream.py",
        "chunked",
        drop("check_whole"),
        "tests/endpoint/test_http.py::test_a_stream_that_is_cancelled_elsewhere",
    ),
    Mutation(
        "half a message is waited for without a bound",
        f"{SERVICE}/grpc/turns.py",
        "Turns.turn",
        unbound("_take"),
        "tests/endpoint/test_limits.py::test_half_a_message_is_given_up",
    ),
    # The transcript.
    Mutation(
        "stop strings are looked for from from_index on",
        TRANSCRIPT,
        "Transcript._add",
        instead("push(token_id)", 'push(token_id) if index >= self._from_index else ("", False)'),
        f"{TRANSCRIPT_TESTS}::test_from_an_index",
    ),
    Mutation(
        "a call that attaches in the middle shows other tokens' tops",
        TRANSCRIPT,
        "Transcript.answer",
        instead("(begin - known) * top_size", "begin * top_size"),
        f"{TRANSCRIPT_TESTS}::test_any_arrivals",
    ),
    Mutation(
        "a changed token is shown",
        TRANSCRIPT,
        "Transcript._add",
        never("known", "any"),
        f"{TRANSCRIPT_TESTS}::test_a_changed_token",
    ),
    Mutation(
        "fewer tokens than from_index are taken",
        TRANSCRIPT,
        "Transcript.answer",
        instead("max(len(self._ids), self._from_index)", "len(self._ids)"),
        f"{TRANSCRIPT_TESTS}::test_a_from_index_beyond_the_pool",
    ),
    Mutation(
        "a gap is shown",
        TRANSCRIPT,
        "Transcript._add",
        never("first", "ids", "len"),
        f"{TRANSCRIPT_TESTS}::test_nothing_is_shown_after_a_gap",
    ),
    # What a body may have.
    Mutation(
        "false is 0",
        f"{SERVICE}/openai/request.py",
        "check_fixed",
        without("type"),
        "tests/endpoint/test_http.py::test_bad_input",
    ),
    Mutation(
        "a schema has no description",
        f"{SERVICE}/openai/response_format.py",
        "",
        sets("MEMBERS", '{"name", "schema", "strict"}'),
        "tests/endpoint/test_forms.py::test_all_members_of_a_json_schema",
    ),
    # Forms.
    Mutation(
        "a caller has all compilers",
        f"{SERVICE}/requests/turns.py",
        "Turns.turn",
        always("_having"),
        "tests/endpoint/test_forms.py::test_callers_have_turns_in_rotation",
    ),
    Mutation(
        "an exclusive bound is allowed",
        f"{SERVICE}/requests/schemas/kept.py",
        "inward",
        never("strict", "found"),
        "tests/endpoint/test_schemas.py::test_what_is_kept_by_another_spelling",
    ),
    Mutation(
        "a pattern's classes are those of Rust",
        f"{SERVICE}/requests/schemas/kept.py",
        "pattern",
        gives("value"),
        "tests/endpoint/test_schemas.py::test_what_is_kept_by_another_spelling",
    ),
    Mutation(
        "a part of a message may have anything",
        f"{SERVICE}/openai/content.py",
        "part_of",
        drop("check_names"),
        "tests/endpoint/test_chat.py",
    ),
    Mutation(
        "a full server is asked again after no second",
        f"{SERVICE}/http/errors.py",
        "failure",
        instead("max(1, round(error.retry_after))", "round(error.retry_after)"),
        "tests/endpoint/test_validation.py::test_a_full_server_is_not_asked_again_at_once",
    ),
    Mutation(
        "short calls find no room beside the streams of all",
        f"{SERVICE}/requests/limits.py",
        "Limits.enter",
        instead("self._open >= room * self._all_calls", "self._open >= self._all_calls"),
        "tests/endpoint/test_limits.py::test_calls_that_must_be_possible_find_room_beside_streams",
    ),
    Mutation(
        "a client that reads nothing keeps its connection",
        f"{SERVICE}/http/connection.py",
        "GuardedConnection._look",
        swap(">=", ">", "_unwritten"),
        "tests/endpoint/test_limits.py::test_an_http_client_that_does_not_read_is_cut_off",
    ),
    Mutation(
        "a stream that outlasts the bound of bodies is cut",
        f"{SERVICE}/http/connection.py",
        "GuardedConnection.on_message_complete",
        drop("_reading.cancel"),
        "tests/endpoint/test_limits.py::test_half_a_body_is_given_up",
    ),
    Mutation(
        "a host gets the turns that others give back",
        f"{SERVICE}/grpc/turns.py",
        "Turns._give_back",
        without("_of_host"),
        "tests/endpoint/test_turns.py::test_a_peer_has_a_share_of_the_turns",
    ),
    Mutation(
        "the HTTP door takes a port for itself that `orca serve` keeps",
        f"{SERVICE}/http/door.py",
        "start",
        passes("listen", "shared", None),
        "tests/e2e/test_bad_input.py",
    ),
    Mutation(
        "a minimum of 0 is named among the fields that are not followed",
        f"{SERVICE}/requests/defaults.py",
        "",
        Text('"min_new_tokens", "penalty_alpha"), (0,))', '"min_new_tokens", "penalty_alpha"), (1,))'),
        "tests/endpoint/test_chat.py::test_values_that_change_nothing_are_not_named",
    ),
]
