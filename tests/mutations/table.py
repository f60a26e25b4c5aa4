"""One-line changes of the code that talks to the pool. Each of them breaks a rule, and names the test that defends it.

A mutation replaces a text that occurs once in its file by another one. The first ones were named when the pool was
read line by line; the others are what could lose a request, repeat a token, or wait for ever. A change that changes
nothing that anybody can see is no mutation: then the rule has a second guard, and one of them can go.
"""

from dataclasses import dataclass

LEDGER = "scheduler/orca_scheduler/ledger.py"
OUTPUT = "scheduler/orca_scheduler/output.py"
MASTER = "scheduler/orca_scheduler/master.py"
CORE = "scheduler/orca_scheduler/core.py"
LIFECYCLE = "scheduler/orca_scheduler/lifecycle.py"
SCHEDULER = "scheduler/orca_scheduler/scheduler.py"
SHARE = "scheduler/orca_scheduler/share.py"
RANKS = "scheduler/orca_scheduler/ranks.py"
RANK = "scheduler/orca_scheduler/rank.py"
DELIVERY = "endpoint/orca_endpoint/delivery.py"
CALL = "endpoint/orca_endpoint/call.py"
TRANSCRIPT = "endpoint/orca_endpoint/transcript.py"
LINK = "pool/orca_pool/link.py"
GATHERING = "pool/orca_pool/gathering.py"

CLAIMS = "tests/scheduler/test_ledger_claims.py"
LEDGER_TESTS = "tests/scheduler/test_ledger.py"
OUTPUT_TESTS = "tests/scheduler/test_output.py"
MASTER_TESTS = "tests/scheduler/test_master.py"
CORE_TESTS = "tests/scheduler/test_algorithm1.py"
STORIES = "tests/scheduler/test_transcripts.py"
SCHEDULER_TESTS = "tests/scheduler/test_scheduler.py"
SHARE_TESTS = "tests/scheduler/test_share.py"
RANKS_TESTS = "tests/scheduler/test_ranks.py"
FAULTS = "tests/endpoint/test_faults.py"
GRPC_TESTS = "tests/endpoint/test_grpc.py"
TRANSCRIPT_TESTS = "tests/endpoint/test_transcript.py"
LINK_TESTS = "tests/pool/test_link.py"
REDIS_TESTS = "tests/pool/test_any_redis.py"
GATHERING_TESTS = "tests/pool/test_gathering.py"


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in the file, becomes `new`."""

    name: str
    file: str  # below services/
    old: str
    new: str
    found_by: str  # the test that fails then: the quickest one that does, as pytest takes it


M = Mutation
MUTATIONS = [
    # The ledger.
    M(
        "claims that were not heard of are reconciled",
        LEDGER,
        "if claim <= have and claim not in before",
        "if True",
        f"{MASTER_TESTS}::test_a_claim_whose_answer_is_under_way_is_no_orphan",
    ),
    M(
        "fresh claims are dropped by reconciliation",
        LEDGER,
        "self._forget(before - set(claims.values()))",
        "self._forget(self.outputs.held.keys() - set(claims.values()))",
        f"{MASTER_TESTS}::test_a_claim_that_was_heard_during_a_renewal_is_kept",
    ),
    M(
        "commits behind have no bound",
        LEDGER,
        "self._uncommitted <= MAX_BEHIND and iteration",
        "iteration",
        f"{MASTER_TESTS}::test_an_engine_waits_for_a_pool_that_is_far_behind",
    ),
    M(
        "a release does not wait for give-backs",
        LEDGER,
        "        await self._all_returned.wait()\n",
        "",
        f"{LEDGER_TESTS}::test_a_release_comes_after_the_give_backs",
    ),
    M(
        "rows of an unanswered commit are forgotten",
        LEDGER,
        "            self.outputs.unanswered(rows)\n",
        "",
        f"{LEDGER_TESTS}::test_rows_of_a_commit_without_an_answer_are_sent_again",
    ),
    M(
        "a give-back overtakes the tokens",
        LEDGER,
        "        try:\n            await self._flush()\n",
        "        try:\n",
        f"{LEDGER_TESTS}::test_a_give_back_comes_after_the_tokens",
    ),
    M(
        "a lost claim answer is not noticed",
        LEDGER,
        "self._unheard = True  #",
        "self._unheard = False  #",
        f"{CLAIMS}::test_a_claim_without_an_answer_is_heard_of_without_room",
    ),
    M(
        "a hint without room is forgotten",
        LEDGER,
        "self._needs = max(self._needs, 1)",
        "pass",
        f"{CLAIMS}::test_a_hint_without_room_is_remembered",
    ),
    M(
        "an outage keeps the claims' version",
        LEDGER,
        'self._claims_version if self._claims_generation == self._pool.generation else ""',
        "self._claims_version",
        f"{MASTER_TESTS}::test_claims_are_told_again_after_an_outage",
    ),
    M(
        "a version is known before its claims are held",
        LEDGER,
        "if set(renewed.claims.values()) <= self.outputs.held.keys() | self._orphans.keys():",
        "if True:",
        f"{CLAIMS}::test_claims_that_are_not_held_are_told_again",
    ),
    M(
        "an orphan is given back once in a term",
        LEDGER,
        "                self._orphans.pop(claim, None)\n",
        "",
        f"{CLAIMS}::test_a_claim_that_comes_back_is_given_back_again",
    ),
    M(
        "a new master has heard of no claim",
        LEDGER,
        "        self._last_claim = held.last_claim\n",
        "",
        f"{CLAIMS}::test_a_new_master_claims_nothing_that_it_holds",
    ),
    M(
        "iterations begin below the reserve",
        LEDGER,
        "self.iteration = self._reserved  #",
        "self.iteration = 0  #",
        f"{CLAIMS}::test_iterations_of_a_new_master_begin_above_all_that_were_reserved",
    ),
    M(
        "an epoch need not be above the ranks'",
        LEDGER,
        "max(await self._pool.number(self.epoch), above + 1)",
        "await self._pool.number(self.epoch)",
        f"{MASTER_TESTS}::test_a_new_epoch_is_above_all_that_the_ranks_have_seen",
    ),
    M(
        "ranks hear of an epoch first",
        LEDGER,
        "            await self._renew(epoch=epoch)\n",
        "",
        f"{CLAIMS}::test_a_new_epoch_is_in_the_books_before_ranks_hear_of_it",
    ),
    M(
        "a claim is asked whatever room there is",
        LEDGER,
        "room.requests and room.slots >= self._needs",
        "True",
        f"{CLAIMS}::test_nothing_is_asked_for_that_does_not_fit",
    ),
    M(
        "a flush does not wait for the commit under way",
        LEDGER,
        "self._uncommitted or self.outputs.dirty or self._commit_sent",
        "self.outputs.dirty",
        f"{MASTER_TESTS}::test_flush_waits_for_a_commit_under_way",
    ),
    M(
        "claims go on before the core knows",
        LEDGER,
        "                await self._admitted.wait()\n",
        "",
        f"{MASTER_TESTS}::test_the_next_claim_waits_for_the_last_one_and_for_no_empty_inbox",
    ),
    M(
        "a corrected row waits for the next iteration",
        LEDGER,
        "        if self.outputs.dirty:\n            self._committer.set()\n        return True",
        "        return True",
        f"{LEDGER_TESTS}::test_tokens_that_redis_lost_are_sent_again_at_once",
    ),
    M(
        "an answered claim is taken again",
        LEDGER,
        "[claimed for claimed in answer.requests if claimed.claim > self._last_claim]",
        "list(answer.requests)",
        f"{CLAIMS}::test_a_claim_without_an_answer_is_heard_of_without_room",
    ),
    M(
        "the reserve never shrinks",
        LEDGER,
        "= renewed.reserved  #",
        "= max(self._reserved, renewed.reserved)  #",
        f"{MASTER_TESTS}::test_a_forgotten_reserve_is_asked_for_again",
    ),
    # What is held.
    M(
        "a row with another base is not sent again",
        OUTPUT,
        "                held.acked = answer\n                self.dirty[row.claim] = held\n",
        "                held.acked = answer\n",
        f"{OUTPUT_TESTS}::test_scores_go_with_their_tokens",
    ),
    M(
        "a dropped row is committed",
        OUTPUT,
        "        self.dirty.pop(claim, None)\n",
        "",
        f"{OUTPUT_TESTS}::test_nothing_is_sent_of_a_request_that_is_gone",
    ),
    M(
        "tokens made meanwhile count as committed",
        OUTPUT,
        "held.acked = row.base + len(row.tokens) // TOKEN.size",
        "held.acked = len(held.tokens) // TOKEN.size",
        f"{OUTPUT_TESTS}::test_only_what_was_sent_counts_as_committed",
    ),
    # The master.
    M(
        "stale rows are never freed",
        MASTER,
        "        message.free_rows.extend(self._stale_rows)\n",
        "",
        f"{MASTER_TESTS}::test_rows_of_an_earlier_master_are_freed_in_a_kept_epoch",
    ),
    M(
        "claims that ended before they ran are admitted",
        MASTER,
        "            self._step_life(Gone(self._now, claims))",
        "            pass",
        f"{MASTER_TESTS}::test_a_request_that_ends_before_its_engine_forms_is_forgotten",
    ),
    M(
        "used iteration numbers are not told",
        MASTER,
        "        self._ledger.used(action.iteration)\n",
        "",
        f"{MASTER_TESTS}::test_a_rank_that_is_lost_is_fenced_and_forms_again",
    ),
    M(
        "a request begins without its tokens",
        MASTER,
        "[*record.prompt_ids, *generated]",
        "[*record.prompt_ids]",
        f"{MASTER_TESTS}::test_a_rank_that_is_lost_is_fenced_and_forms_again",
    ),
    M(
        "the claimer never hears of an admission",
        MASTER,
        "                    self._ledger.admitted()\n",
        "",
        f"{MASTER_TESTS}::test_what_waits_for_room_is_claimed_when_there_is_room",
    ),
    M(
        "the claimer never hears of room",
        MASTER,
        "        self._ledger.claimable()\n        if not",
        "        if not",
        f"{MASTER_TESTS}::test_the_claimer_hears_of_room_at_once",
    ),
    M(
        "the core runs ahead of the pool",
        MASTER,
        "while self._returned and self._ledger.keeps_up(self._returned[0].report.number):",
        "while self._returned:",
        f"{MASTER_TESTS}::test_the_core_waits_for_a_pool_that_is_far_behind",
    ),
    M(
        "an iteration of a lost engine counts",
        MASTER,
        "if report.number not in self._in_flight:",
        "if False:",
        f"{MASTER_TESTS}::test_tokens_of_an_engine_that_was_lost_are_not_taken",
    ),
    M(
        "iterations of a lost engine stay in flight",
        MASTER,
        "                self._in_flight.clear()\n",
        "",
        f"{MASTER_TESTS}::test_tokens_of_an_engine_that_was_lost_are_not_taken",
    ),
    # The core.
    M(
        "a lost engine claims on",
        CORE,
        "if not self._formed or self._draining:\n            return Room",
        "if self._draining:\n            return Room",
        f"{CORE_TESTS}::test_only_an_engine_that_takes_requests_has_room",
    ),
    M(
        "a draining engine claims on",
        CORE,
        "if not self._formed or self._draining:\n            return Room",
        "if not self._formed:\n            return Room",
        f"{CORE_TESTS}::test_only_an_engine_that_takes_requests_has_room",
    ),
    # The lifecycle.
    M(
        "ranks' iteration numbers are ignored",
        LIFECYCLE,
        "above = max(greeted.standing.iteration for greeted in self.greeted.values())",
        "above = 0",
        STORIES,
    ),
    M("a takeover counts no loss", LIFECYCLE, "(event.claims, event.taken_over)", "(event.claims, False)", STORIES),
    M("a life begins before its fences", LIFECYCLE, "        if lost.fencing:\n            return []\n", "", STORIES),
    M(
        "claims are kept for a new epoch",
        LIFECYCLE,
        "            actions += self._give_back()  # there",
        "            pass  # there",
        STORIES,
    ),
    M(
        "an epoch is given below the ranks'",
        LIFECYCLE,
        "above = max(greeted.standing.epoch for greeted in self.greeted.values())",
        "above = 0",
        STORIES,
    ),
    M(
        "a claim that ended is given back",
        LIFECYCLE,
        "                    self.unadmitted.pop(claim, None)",
        "                    pass",
        STORIES,
    ),
    M(
        "a greeting keeps claims without a bound",
        LIFECYCLE,
        "if self.unadmitted and len(self.greeted) < self.shape.ranks:",
        "if False:",
        STORIES,
    ),
    M("a retired engine keeps its claims", LIFECYCLE, "*self._give_back(), Retire()]", "Retire()]", STORIES),
    M(
        "a verdict outlives its life",
        LIFECYCLE,
        "        self.verdict_at = None\n        return [Dial",
        "        return [Dial",
        STORIES,
    ),
    # The scheduler.
    M(
        "holes between looks do not count",
        SCHEDULER,
        "        if seconds > LEASE_SECONDS:\n            self._sights.clear()\n",
        "",
        f"{SCHEDULER_TESTS}::test_a_lease_that_could_not_be_read_is_not_taken",
    ),
    M(
        "a failed read does not start the count again",
        SCHEDULER,
        "self._sights.clear()  # a failed",
        "pass  # a failed",
        f"{SCHEDULER_TESTS}::test_a_lease_that_could_not_be_read_is_not_taken",
    ),
    M(
        "a lease that moves is not seen",
        SCHEDULER,
        "if sight is None or sight.state != state:",
        "if sight is None:",
        f"{SCHEDULER_TESTS}::test_a_lease_that_is_renewed_is_not_taken",
    ),
    M(
        "several engines are released at a time",
        SCHEDULER,
        "self._releasing is not None or now",
        "now",
        f"{SCHEDULER_TESTS}::test_engines_go_to_another_scheduler_one_after_the_other",
    ),
    M(
        "a lone scheduler gives its engines up",
        SCHEDULER,
        "        if living < 2:\n            return\n",
        "",
        f"{SCHEDULER_TESTS}::test_an_engine_out_of_reach_is_given_up_to_another_scheduler",
    ),
    M(
        "one engine is released in a life",
        SCHEDULER,
        "                        self._releasing = None\n",
        "                        pass\n",
        f"{SCHEDULER_TESTS}::test_engines_go_to_another_scheduler_one_after_the_other",
    ),
    M(
        "a retired engine's requests count a loss",
        SCHEDULER,
        "candidate is not None and held_by_another",
        "held_by_another",
        f"{SCHEDULER_TESTS}::test_a_takeover_counts_a_loss_and_a_hand_over_none",
    ),
    # The share of a scheduler.
    M("a scheduler's share is floored", SHARE, " or (mine == each and with_more < more)", "", SHARE_TESTS),
    # The ranks.
    M(
        "a late master judges silence",
        RANKS,
        "silent > self._silence and self._pulse.on_time(self._silence)",
        "silent > self._silence",
        f"{RANKS_TESTS}::test_a_master_that_was_late_itself_judges_nobody",
    ),
    M(
        "an answer of an earlier life counts",
        RANKS,
        "if report.number != self._progress.oldest:",
        "if False:",
        f"{RANKS_TESTS}::test_a_report_of_an_iteration_from_before",
    ),
    M(
        "an abandoned iteration condemns",
        RANK,
        "if report.peer_lost and report.epoch < self._asked_for:",
        "if False:",
        f"{RANKS_TESTS}::test_an_abandoned_iteration_of_an_older_epoch_is_no_complaint",
    ),
    # The delivery.
    M(
        "a late endpoint is not at fault",
        DELIVERY,
        "return self.leaving or now < self._late_until or now - self._renewed > GAP_SECONDS",
        "return self.leaving",
        f"{FAULTS}::test_a_call_that_ends_while_the_endpoint_is_late_has_a_longer_grace",
    ),
    M(
        "the cursor stays at a new incarnation",
        DELIVERY,
        "self._last, self._cursor = 0, None",
        "self._last = 0",
        f"{FAULTS}::test_declared_dead",
    ),
    M(
        "a detach does not wait for its attach",
        DELIVERY,
        "        await asyncio.wait([after])\n        if not",
        "        if after.done() and not",
        f"{FAULTS}::test_a_call_that_leaves_during_its_attach_detaches_after_the_answer",
    ),
    M(
        "entries of an old incarnation count",
        DELIVERY,
        "if incarnation != self.incarnation:\n                continue",
        "if False:\n                continue",
        f"{FAULTS}::test_what_is_read_of_an_old_incarnation_does_not_count",
    ),
    M(
        "a missed entry is not noticed",
        DELIVERY,
        "if entry.number != self._last + 1:",
        "if False:",
        f"{FAULTS}::test_a_missed_packet",
    ),
    M(
        "packets of another attempt are shown",
        DELIVERY,
        "if call.attempt == packet.attempt:",
        "if True:",
        f"{FAULTS}::test_packets_of_another_attempt",
    ),
    M(
        "a reconnect keeps the incarnation",
        DELIVERY,
        "if known and generation == self._generation:",
        "if known:",
        f"{FAULTS}::test_redis_dies_in_the_middle",
    ),
    M(
        "a refused attach is detached",
        DELIVERY,
        "after.exception() is None and after.result() in NEVER_ATTACHED",
        "False",
        f"{FAULTS}::test_a_call_that_leaves_during_its_attach_detaches_after_the_answer",
    ),
    M(
        "a detach is tried for ever",
        DELIVERY,
        "asyncio.timeout(DETACH_PATIENCE)",
        "asyncio.timeout(None)",
        f"{FAULTS}::test_a_detach_is_given_up",
    ),
    M(
        "an old registration stays",
        DELIVERY,
        "register=True, replaces=old",
        "register=True",
        f"{FAULTS}::test_redis_dies_in_the_middle",
    ),
    M(
        "entries that were read stay in Redis",
        DELIVERY,
        "(self.incarnation, read=self._last)",
        "(self.incarnation)",
        f"{FAULTS}::test_what_was_read_is_deleted",
    ),
    # The call.
    M(
        "a call that breaks at its stop string is not detached",
        CALL,
        'self._refused or self._transcript.next == "end"',
        'self._refused or self._transcript.next in ("end", "stop")',
        f"{FAULTS}::test_a_call_that_breaks_while_its_stop_is_recorded_detaches",
    ),
    M(
        "an attach is cancelled with its call",
        CALL,
        "asyncio.shield(self._operation)",
        "self._operation",
        f"{FAULTS}::test_a_call_that_leaves_during_its_attach_detaches_after_the_answer",
    ),
    M(
        "a slow client has no bound",
        CALL,
        "if self.buffered > max(self._limits.buffer, self._transcript.count):",
        "if False:",
        f"{GRPC_TESTS}::test_a_client_that_does_not_read",
    ),
    M(
        "healing is counted over the call",
        CALL,
        "                    self._healing_until = None",
        "                    pass",
        f"{FAULTS}::test_tokens_that_redis_lost",
    ),
    M(
        "healing has no bound",
        CALL,
        "if now > self._healing_until:",
        "if False:",
        f"{FAULTS}::test_tokens_that_stay_lost",
    ),
    M(
        "an endpoint cannot leave at a stop string",
        CALL,
        "        while True:\n            if self._leaving():\n                raise leaving_error()\n            said",
        "        while True:\n            said",
        f"{FAULTS}::test_an_endpoint_leaves_while_a_stop_waits_for_tokens_that_redis_lost",
    ),
    M(
        "a call that lost tokens lives on",
        CALL,
        "            return Grace(0.0)\n",
        "            pass\n",
        f"{FAULTS}::test_tokens_that_stay_lost",
    ),
    M(
        "a missed packet is not asked for",
        CALL,
        "        self._must_attach = True\n        self._drop_inbox()\n        self.wake()",
        "        self._drop_inbox()\n        self.wake()",
        f"{FAULTS}::test_a_missed_packet",
    ),
    # The transcript.
    M(
        "a changed token is shown",
        TRANSCRIPT,
        "if known and any(",
        "if False and any(",
        f"{TRANSCRIPT_TESTS}::test_a_changed_token",
    ),
    M(
        "fewer tokens than from_index are taken",
        TRANSCRIPT,
        "max(len(self._ids), self._from_index)",
        "len(self._ids)",
        f"{TRANSCRIPT_TESTS}::test_a_from_index_beyond_the_pool",
    ),
    M(
        "a gap is shown",
        TRANSCRIPT,
        "        if first > len(ids):",
        "        if False:",
        f"{TRANSCRIPT_TESTS}::test_nothing_is_shown_after_a_gap",
    ),
    # The link. (The connection of a cancelled exchange is not used again in any case, so its close is no mutation.)
    M(
        "a connection is kept after close",
        LINK,
        "if self._closed or line.losses",
        "if line.losses",
        f"{LINK_TESTS}::test_an_exchange_that_ends_after_close_leaves_no_connection",
    ),
    M(
        "an outage is not counted",
        LINK,
        '"""Notes that Redis is away."""\n        self._away = True',
        '"""Notes that."""',
        f"{LINK_TESTS}::test_a_frozen_redis_is_unavailable_in_time",
    ),
    M(
        "another server goes unnoticed",
        LINK,
        "if self._away or self._server not in (None, server):",
        "if self._away:",
        f"{LINK_TESTS}::test_another_dataset_in_the_same_process_is_an_outage",
    ),
    M(
        "an exchange has no bound",
        LINK,
        ".time() + limit\n        line",
        ".time() + 3600\n        line",
        f"{LINK_TESTS}::test_a_frozen_redis_is_unavailable_in_time",
    ),
    M(
        "renewals wait for a turn",
        LINK,
        "        if renewal:",
        "        if False:",
        f"{LINK_TESTS}::test_a_renewal_waits_for_no_turn",
    ),
    M(
        "a turn is waited for without a bound",
        LINK,
        "asyncio.timeout(self._patience)",
        "asyncio.timeout(None)",
        f"{LINK_TESTS}::test_a_wait_for_a_turn_has_a_bound",
    ),
    M(
        "a replica that lags is enough",
        LINK,
        "if here >= 1 and there >= replicas:",
        "if here >= 1:",
        f"{REDIS_TESTS}::test_a_replica_that_is_slow_is_asked_again",
    ),
    M(
        "a cluster's old node is asked on",
        LINK,
        "        self._primary.forget()\n",
        "",
        f"{LINK_TESTS}::test_a_node_that_went_away_is_forgotten",
    ),
    # Attaches that go together.
    M(
        "a cancelled exchange leaves its callers waiting",
        GATHERING,
        "if error is not None:",
        "if error is not None and not sending.cancelled():",
        f"{GATHERING_TESTS}::test_a_cancelled_exchange_leaves_nobody_waiting",
    ),
    M(
        "who asks as an exchange ends waits for ever",
        GATHERING,
        "        elif self._waiting:\n",
        "        elif False:\n",
        f"{GATHERING_TESTS}::test_what_comes_during_an_exchange_goes_together",
    ),
]
