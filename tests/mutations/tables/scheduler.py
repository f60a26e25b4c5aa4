"""The scheduler: the ledger, what is held, the master, the core, the lifecycle, ranks, shares."""

from mutations.changes import Text, always, drop, gives, instead, lacks, never, passes, sets, without
from mutations.mutation import Mutation

SERVICE = "services/scheduler/orca_scheduler"
LEDGER = f"{SERVICE}/master/ledger.py"
OUTPUT = f"{SERVICE}/master/output.py"
MASTER = f"{SERVICE}/master/master.py"
CORE = f"{SERVICE}/core/core.py"
MEMORY = f"{SERVICE}/core/memory.py"
FILLS = f"{SERVICE}/core/fills.py"
ON_DEMAND = f"{SERVICE}/core/on_demand.py"
DRAFTING = f"{SERVICE}/core/drafting.py"
PREFIX = f"{SERVICE}/core/prefix.py"
LIFECYCLE = f"{SERVICE}/lifecycle/lifecycle.py"
SCHEDULER = f"{SERVICE}/scheduler.py"
SHARE = f"{SERVICE}/share.py"
RANKS = f"{SERVICE}/ranks/ranks.py"
RANK = f"{SERVICE}/ranks/rank.py"
SCALING = f"{SERVICE}/scaling.py"
STATEFULSET = f"{SERVICE}/discovery/statefulset.py"

CLAIMS = "tests/scheduler/test_ledger_claims.py"
LEDGER_TESTS = "tests/scheduler/test_ledger.py"
OUTPUT_TESTS = "tests/scheduler/test_output.py"
MASTER_TESTS = "tests/scheduler/test_master.py"
CORE_TESTS = "tests/scheduler/test_algorithm1.py"
PREFIX_TESTS = "tests/scheduler/test_prefix.py"
POLICIES_TESTS = "tests/scheduler/test_policies.py"
ROLES_TESTS = "tests/scheduler/test_roles.py"
MEMORY_TESTS = "tests/scheduler/test_memory.py"
STORIES = "tests/scheduler/test_transcripts.py"
SCHEDULER_TESTS = "tests/scheduler/test_scheduler.py"
SHARE_TESTS = "tests/scheduler/test_share.py"
RANKS_TESTS = "tests/scheduler/test_ranks.py"
SCALING_TESTS = "tests/scheduler/test_scaling.py"
SIZE_TESTS = "tests/scheduler/discovery/test_size.py"

MUTATIONS = [
    # Policies.
    Mutation(
        "a later prompt ends its initiation first",
        FILLS,
        "_in_parts",
        instead("(behind and in_turn)", "0"),
        f"{POLICIES_TESTS}::test_of_two_prompts_the_earlier_one_ends_its_initiation_no_later",
    ),
    Mutation(
        "prompts begin behind one that may not",
        FILLS,
        "_in_parts",
        instead("not count and request.row is None", "False"),
        f"{POLICIES_TESTS}::test_of_two_prompts_the_earlier_one_ends_its_initiation_no_later",
    ),
    Mutation(
        "the batches of a pipeline differ",
        FILLS,
        "even",
        instead("limits.n_workers", "1"),
        f"{POLICIES_TESTS}::test_batches_of_a_pipeline_are_alike",
    ),
    Mutation(
        "requests begin in the last slots",
        ON_DEMAND,
        "spare",
        instead("self.n_slots * SPARE", "0"),
        f"{POLICIES_TESTS}::test_slots_are_kept_free_for_those_that_run",
    ),
    Mutation(
        "a request gives up its slots for ever",
        ON_DEMAND,
        "victims",
        instead("other.preemptions < PREEMPTIONS", "True"),
        f"{POLICIES_TESTS}::test_who_gives_up_slots",
    ),
    Mutation(
        "one that gave up its slots often comes back without all",
        ON_DEMAND,
        "size",
        instead("request.preemptions >= PREEMPTIONS", "False"),
        f"{POLICIES_TESTS}::test_storms",
    ),
    Mutation(
        "a beginning goes before what begins with it",
        PREFIX,
        "Index.let_go",
        drop("move_to_end"),
        f"{PREFIX_TESTS}::test_a_beginning_goes_last",
    ),
    Mutation(
        "a request begins behind all of its prompt",
        MEMORY,
        "Slots.match",
        instead("request.known - 1", "request.known"),
        f"{PREFIX_TESTS}::test_two_tenants_never_share",
    ),
    Mutation(
        "the most recently used blocks go first",
        PREFIX,
        "Index.evict",
        instead("False", "True"),
        f"{PREFIX_TESTS}::test_a_plain_dictionary_finds_the_same",
    ),
    Mutation(
        "a beginning that has gone is found again",
        PREFIX,
        "Index.evict",
        drop("removed"),
        f"{POLICIES_TESTS}::test_storms",
    ),
    Mutation(
        "blocks that are not finite are found",
        CORE,
        "Core._returned",
        drop("spoil"),
        f"{PREFIX_TESTS}::test_what_was_not_finite_is_not_used_again",
    ),
    Mutation(
        "blocks of a request that begins count as free",
        MEMORY,
        "Slots.gains",
        instead("owners.get(block, self._owners.get(block, 1)) + 1", "owners.get(block, self._owners.get(block, 1))"),
        f"{PREFIX_TESTS}::test_slots_of_a_request_that_begins_in_the_same_batch_do_not_become_free",
    ),
    Mutation(
        "drafts in large batches",
        DRAFTING,
        "with_drafts",
        instead("min(limits.positions or POSITIONS, POSITIONS)", "1000"),
        f"{POLICIES_TESTS}::test_no_draft_where_it_would_not_pay_or_has_no_place",
    ),
    Mutation(
        "a draft takes a block",
        DRAFTING,
        "with_drafts",
        instead("memory.need(request, count + most) > memory.need(request, count)", "False"),
        f"{POLICIES_TESTS}::test_no_draft_where_it_would_not_pay_or_has_no_place",
    ),
    Mutation(
        "keys of blocks of answers are passed over",
        CORE,
        "Core._returned",
        drop("keys.append"),
        f"{PREFIX_TESTS}::test_a_plain_dictionary_finds_the_same",
    ),
    Mutation(
        "a chain loses the tokens behind its last full block",
        "services/common/orca_common/block_keys.py",
        "Chain.extend",
        instead("len(keys) * self._size", "len(tail)"),
        f"{PREFIX_TESTS}::test_a_chain_has_the_keys_of_the_whole_text_however_it_grows",
    ),
    Mutation(
        "blocks of answers have keys that ranks do not know in time",
        MASTER,
        "_take_returned",
        without("run_ahead"),
        f"{MASTER_TESTS}::test_with_a_run_ahead_blocks_of_answers_have_no_keys",
    ),
    Mutation(
        "one that waits has its text read again",
        OUTPUT,
        "Outputs.offers",
        instead(
            "held is not None and tokens and (known := len(held.tokens) // TOKEN.size) >= held.looks",
            "held is not None and (known := len(held.tokens) // TOKEN.size) >= held.looks",
        ),
        f"{OUTPUT_TESTS}::test_one_that_waits_keeps_its_drafts",
    ),
    # The ledger.
    Mutation(
        "claims that were not heard of are reconciled",
        LEDGER,
        "_reconcile",
        instead(
            "claim <= have and claim not in before and claim not in self.outputs.held",
            "claim not in self.outputs.held",
        ),
        f"{MASTER_TESTS}::test_a_claim_whose_answer_is_under_way_is_no_orphan",
    ),
    Mutation(
        "fresh claims are dropped by reconciliation",
        LEDGER,
        "_reconcile",
        instead("before - set(claims.values())", "self.outputs.held.keys() - set(claims.values())"),
        f"{MASTER_TESTS}::test_a_claim_that_was_heard_during_a_renewal_is_kept",
    ),
    Mutation(
        "commits behind have no bound",
        LEDGER,
        "keeps_up",
        without("_uncommitted"),
        f"{MASTER_TESTS}::test_an_engine_waits_for_a_pool_that_is_far_behind",
    ),
    Mutation(
        "first tokens and ends wait for others",
        LEDGER,
        "_commit_when_due",
        instead("self.outputs.pressing or self._now >= self._commit_due", "self._now >= self._commit_due"),
        f"{LEDGER_TESTS}::test_tokens_join_and_first_tokens_and_ends_do_not_wait",
    ),
    Mutation(
        "a release does not wait for give-backs",
        LEDGER,
        "release",
        drop("_all_returned.wait"),
        f"{LEDGER_TESTS}::test_a_release_comes_after_the_give_backs",
    ),
    Mutation(
        "rows of an unanswered commit are forgotten",
        LEDGER,
        "_commit",
        drop("outputs.unanswered"),
        f"{LEDGER_TESTS}::test_rows_of_a_commit_without_an_answer_are_sent_again",
    ),
    Mutation(
        "a give-back overtakes the tokens",
        LEDGER,
        "give_back",
        drop("_flush"),
        f"{LEDGER_TESTS}::test_a_give_back_comes_after_the_tokens",
    ),
    Mutation(
        "a lost claim answer is not noticed",
        LEDGER,
        "_renewing",
        drop("_unheard"),
        f"{CLAIMS}::test_a_claim_without_an_answer_is_heard_of_without_room",
    ),
    Mutation(
        "a hint without room is forgotten",
        LEDGER,
        "_claiming",
        drop("_needs", "max"),
        f"{CLAIMS}::test_a_hint_without_room_is_remembered",
    ),
    Mutation(
        "an outage keeps the claims' version",
        LEDGER,
        "_renew",
        sets("known", "self._claims_version"),
        f"{MASTER_TESTS}::test_claims_are_told_again_after_an_outage",
    ),
    Mutation(
        "a version is known before its claims are held",
        LEDGER,
        "_renewing",
        instead("set(renewed.claims.values()) <= self.outputs.held.keys() | self._orphans.keys()", "True"),
        f"{CLAIMS}::test_claims_that_are_not_held_are_told_again",
    ),
    Mutation(
        "an orphan is given back once in a term",
        LEDGER,
        "give_back",
        drop("_orphans.pop"),
        f"{CLAIMS}::test_a_claim_that_comes_back_is_given_back_again",
    ),
    Mutation(
        "a new master has heard of no claim",
        LEDGER,
        "_open",
        drop("_last_claim"),
        f"{CLAIMS}::test_a_new_master_claims_nothing_that_it_holds",
    ),
    Mutation(
        "iterations begin below the reserve",
        LEDGER,
        "_open",
        sets("iteration", "0"),
        f"{CLAIMS}::test_iterations_of_a_new_master_begin_above_all_that_were_reserved",
    ),
    Mutation(
        "an epoch need not be above the ranks'",
        LEDGER,
        "new_epoch.number",
        sets("epoch", "await self._pool.number(self.epoch)"),
        f"{MASTER_TESTS}::test_a_new_epoch_is_above_all_that_the_ranks_have_seen",
    ),
    Mutation(
        "ranks hear of an epoch first",
        LEDGER,
        "new_epoch",
        drop("_renew"),
        f"{CLAIMS}::test_a_new_epoch_is_in_the_books_before_ranks_hear_of_it",
    ),
    Mutation(
        "a claim is asked whatever room there is",
        LEDGER,
        "claimable",
        instead("room.requests and room.slots >= self._needs", "True"),
        f"{CLAIMS}::test_nothing_is_asked_for_that_does_not_fit",
    ),
    Mutation(
        "a flush does not wait for the commit under way",
        LEDGER,
        "_flush",
        instead("self._uncommitted or self.outputs.dirty or self._commit_sent", "self.outputs.dirty"),
        f"{MASTER_TESTS}::test_flush_waits_for_a_commit_under_way",
    ),
    Mutation(
        "claims go on before the core knows",
        LEDGER,
        "_claiming",
        drop("_admitted.wait"),
        f"{MASTER_TESTS}::test_the_next_claim_waits_for_the_last_one_and_for_no_empty_inbox",
    ),
    Mutation(
        "an idle engine claims after each read of the hints",
        LEDGER,
        "_reading_hints",
        never("hints"),
        f"{MASTER_TESTS}::test_an_idle_engine_claims_nothing",
    ),
    Mutation(
        "a corrected row waits for the next iteration",
        LEDGER,
        "_commit",
        drop("_commit_when_due"),
        f"{LEDGER_TESTS}::test_tokens_that_redis_lost_are_sent_again_at_once",
    ),
    Mutation(
        "tokens that come during a commit go at once",
        LEDGER,
        "_commit",
        instead("self._commit_when_due()", "self._committer.set()"),
        f"{LEDGER_TESTS}::test_tokens_that_come_during_a_commit_wait_for_others_too",
    ),
    Mutation(
        "a wake without rows counts as a commit",
        LEDGER,
        "_committing",
        Text(
            "            if rows:\n                self._commit_due",
            "            if True:\n                self._commit_due",
        ),
        f"{LEDGER_TESTS}::test_a_wake_without_rows_is_no_commit",
    ),
    Mutation(
        "a hand-over waits for others",
        LEDGER,
        "hand_over",
        drop("_commit_when_due"),
        f"{LEDGER_TESTS}::test_a_request_that_is_handed_over_waits_for_no_other",
    ),
    Mutation(
        "a corrected row waits for others",
        OUTPUT,
        "answered",
        instead("(held, True)", "(held, self.pressing)"),
        f"{LEDGER_TESTS}::test_tokens_that_redis_lost_are_sent_again_at_once",
    ),
    Mutation(
        "an answered claim is taken again",
        LEDGER,
        "_claiming",
        sets("new", "list(answer.requests)"),
        f"{CLAIMS}::test_a_claim_without_an_answer_is_heard_of_without_room",
    ),
    Mutation(
        "the reserve never shrinks",
        LEDGER,
        "_renew",
        sets("_reserved", "max(self._reserved, renewed.reserved)"),
        f"{MASTER_TESTS}::test_a_forgotten_reserve_is_asked_for_again",
    ),
    # What is held.
    Mutation(
        "a row with another base is not sent again",
        OUTPUT,
        "answered",
        drop("dirty"),
        f"{OUTPUT_TESTS}::test_scores_go_with_their_tokens",
    ),
    Mutation(
        "a dropped row is committed",
        OUTPUT,
        "drop",
        drop("dirty.pop"),
        f"{OUTPUT_TESTS}::test_nothing_is_sent_of_a_request_that_is_gone",
    ),
    Mutation(
        "tokens made meanwhile count as committed",
        OUTPUT,
        "answered",
        sets("acked", "len(held.tokens) // TOKEN.size", "row.base"),
        f"{OUTPUT_TESTS}::test_only_what_was_sent_counts_as_committed",
    ),
    # The master.
    Mutation(
        "stale rows are never freed",
        MASTER,
        "_control_message",
        drop("free_rows.extend", "_stale_rows"),
        f"{MASTER_TESTS}::test_rows_of_an_earlier_master_are_freed_in_a_kept_epoch",
    ),
    Mutation(
        "claims that ended before they ran are admitted",
        MASTER,
        "_end_elsewhere",
        drop("_step_life", "Gone"),
        f"{MASTER_TESTS}::test_a_request_that_ends_before_its_engine_forms_is_forgotten",
    ),
    Mutation(
        "used iteration numbers are not told",
        MASTER,
        "_schedule",
        drop("_ledger.used"),
        f"{MASTER_TESTS}::test_a_rank_that_is_lost_is_fenced_and_forms_again",
    ),
    Mutation(
        "a request begins without its tokens",
        MASTER,
        "_admission",
        passes("pb.Admission", "token_ids", "record.prompt_ids"),
        f"{MASTER_TESTS}::test_a_rank_that_is_lost_is_fenced_and_forms_again",
    ),
    Mutation(
        "the claimer never hears of an admission",
        MASTER,
        "_serve_inbox",
        drop("_ledger.admitted"),
        f"{MASTER_TESTS}::test_what_waits_for_room_is_claimed_when_there_is_room",
    ),
    Mutation(
        "the claimer never hears of room",
        MASTER,
        "_stepped",
        drop("_ledger.claimable"),
        f"{MASTER_TESTS}::test_the_claimer_hears_of_room_at_once",
    ),
    Mutation(
        "the core runs ahead of the pool",
        MASTER,
        "_take_returned",
        without("_ledger.keeps_up"),
        f"{MASTER_TESTS}::test_the_core_waits_for_a_pool_that_is_far_behind",
    ),
    Mutation(
        "an outage counts for the pace",
        MASTER,
        "_take_returned",
        drop("_pace.held"),
        f"{MASTER_TESTS}::test_the_core_waits_for_a_pool_that_is_far_behind",
    ),
    Mutation(
        "an iteration of a lost engine counts",
        MASTER,
        "_take_returned",
        never("_in_flight"),
        f"{MASTER_TESTS}::test_tokens_of_an_engine_that_was_lost_are_not_taken",
    ),
    Mutation(
        "iterations of a lost engine stay in flight",
        MASTER,
        "_tell_core",
        drop("_in_flight.clear"),
        f"{MASTER_TESTS}::test_tokens_of_an_engine_that_was_lost_are_not_taken",
    ),
    Mutation(
        "the master forgets the sampling message",
        MASTER,
        "_admission",
        passes("pb.Admission", "sampling", "None"),
        "tests/e2e/test_tokens.py::test_a_draw_depends_on_seed_and_index_alone",
    ),
    # The core.
    Mutation(
        "a lost engine claims on",
        CORE,
        "Core.room",
        without("_formed"),
        f"{CORE_TESTS}::test_only_an_engine_that_takes_requests_has_room",
    ),
    Mutation(
        "a draining engine claims on",
        CORE,
        "Core.room",
        without("_draining"),
        f"{CORE_TESTS}::test_only_an_engine_that_takes_requests_has_room",
    ),
    Mutation(
        "a place is taken until its request has ended",
        CORE,
        "Core._staying",
        instead("r.known < r.arrived.max_tokens", "True"),
        f"{CORE_TESTS}::test_room_counts_what_ends_with_the_oldest_batch",
    ),
    Mutation(
        "slots of a later batch are free in the next one",
        CORE,
        "Core._leaving",
        instead("r.in_flight == 1", "True"),
        f"{CORE_TESTS}::test_room_counts_no_slots_that_the_next_batch_may_not_have",
    ),
    Mutation(
        "an end that drafts alone would make frees a place",
        CORE,
        "Core._staying",
        instead("r in drafted", "False"),
        f"{CORE_TESTS}::test_room_counts_no_end_that_drafts_alone_would_make",
    ),
    Mutation(
        "blocks behind which others begin are room",
        MEMORY,
        "Slots.room",
        instead("self.gains(leaving, waiting)", "self.gains(leaving)"),
        f"{PREFIX_TESTS}::test_room_is_the_same_before_a_row_is_released_and_after",
    ),
    Mutation(
        "one that ends keeps its place among increments",
        FILLS,
        "_in_parts",
        instead("r.known < r.arrived.max_tokens", "True"),
        f"{POLICIES_TESTS}::test_a_prompt_that_has_the_place_of_one_that_ends_holds_up_no_increment",
    ),
    Mutation(
        "a pull is an initiation",
        FILLS,
        "_in_parts",
        Text(" and not r.elsewhere", ""),
        f"{ROLES_TESTS}::test_a_pull_holds_up_no_prompt_that_is_computed_beside_it",
    ),
    # The memory.
    Mutation(
        "what waits takes no room",
        MEMORY,
        "Slots.room",
        gives("self.free"),
        f"{MEMORY_TESTS}::test_what_waits_has_its_slots_already",
    ),
    Mutation(
        "a shared block comes back with its first row",
        MEMORY,
        "Slots.release",
        instead("not others", "True"),
        f"{MEMORY_TESTS}::test_a_shared_block_comes_back_with_its_last_row",
    ),
    Mutation(
        "slots are reserved at each iteration",
        MEMORY,
        "Slots.need",
        never("row"),
        f"{MEMORY_TESTS}::test_a_request_needs_slots_for_all_its_tokens_at_first_and_none_later",
    ),
    Mutation(
        "a request reserves tokens, not blocks",
        "services/common/orca_common/reservation.py",
        "Reservation.upfront",
        gives("tokens"),
        f"{MEMORY_TESTS}::test_a_request_needs_slots_for_all_its_tokens_at_first_and_none_later",
    ),
    # The lifecycle.
    Mutation("ranks' iteration numbers are ignored", LIFECYCLE, "_record", sets("above", "0"), STORIES),
    Mutation("a takeover counts no loss", LIFECYCLE, "_opened", instead("event.taken_over", "False"), STORIES),
    Mutation("a life begins before its fences", LIFECYCLE, "_when_fenced", never("fencing"), STORIES),
    Mutation("claims are kept for a new epoch", LIFECYCLE, "_hello", drop("_give_back"), STORIES),
    Mutation("an epoch is given below the ranks'", LIFECYCLE, "_identified", sets("above", "0"), STORIES),
    Mutation("a claim that ended is given back", LIFECYCLE, "step", drop("unadmitted.pop"), STORIES),
    Mutation("a greeting keeps claims without a bound", LIFECYCLE, "_greeting_bounds", never("unadmitted"), STORIES),
    Mutation("a retired engine keeps its claims", LIFECYCLE, "_close", lacks("_give_back"), STORIES),
    Mutation("a verdict outlives its life", LIFECYCLE, "_next_life", drop("verdict_at"), STORIES),
    Mutation("an engine finishes while the pool is away", LIFECYCLE, "_counted", always("away_since"), STORIES),
    Mutation("an outage counts for an engine that finishes", LIFECYCLE, "step", drop("finish_by"), STORIES),
    # The scheduler.
    Mutation(
        "holes between looks do not count",
        SCHEDULER,
        "_count",
        never("LEASE_SECONDS"),
        f"{SCHEDULER_TESTS}::test_a_lease_that_could_not_be_read_is_not_taken",
    ),
    Mutation(
        "a failed read does not start the count again",
        SCHEDULER,
        "run",
        drop("_sights.clear"),
        f"{SCHEDULER_TESTS}::test_a_lease_that_could_not_be_read_is_not_taken",
    ),
    Mutation(
        "an outage that no read has seen does not start the count again",
        SCHEDULER,
        "Scheduler._look",
        drop("_sights.clear"),
        f"{SCHEDULER_TESTS}::test_a_lease_that_could_not_be_read_is_not_taken",
    ),
    Mutation(
        "a lease that moves is not seen",
        SCHEDULER,
        "_free",
        without("sight.state"),
        f"{SCHEDULER_TESTS}::test_a_lease_that_is_renewed_is_not_taken",
    ),
    Mutation(
        "several engines are released at a time",
        SCHEDULER,
        "_release_one",
        without("_releasing"),
        f"{SCHEDULER_TESTS}::test_engines_go_to_another_scheduler_one_after_the_other",
    ),
    Mutation(
        "a lone scheduler gives its engines up",
        SCHEDULER,
        "_give_up_unreached",
        never("living"),
        f"{SCHEDULER_TESTS}::test_an_engine_out_of_reach_is_given_up_to_another_scheduler",
    ),
    Mutation(
        "one engine is released in a life",
        SCHEDULER,
        "run",
        drop("_releasing"),
        f"{SCHEDULER_TESTS}::test_engines_go_to_another_scheduler_one_after_the_other",
    ),
    Mutation(
        "a retired engine's requests count a loss",
        SCHEDULER,
        "_take",
        without("candidate"),
        f"{SCHEDULER_TESTS}::test_a_takeover_counts_a_loss_and_a_hand_over_none",
    ),
    # The share of a scheduler.
    Mutation("a scheduler's share is floored", SHARE, "may_take", gives("mine < each"), SHARE_TESTS),
    # The ranks.
    Mutation(
        "a late master judges silence",
        RANKS,
        "_listen",
        without("_pulse.on_time", "rank.silence"),
        f"{RANKS_TESTS}::test_a_master_that_was_late_itself_judges_nobody",
    ),
    Mutation(
        "an answer of an earlier life counts",
        RANKS,
        "_tokens_came",
        never("_progress.oldest"),
        f"{RANKS_TESTS}::test_a_report_of_an_iteration_from_before",
    ),
    Mutation(
        "the ranks furthest ahead are suspected as stuck",
        RANKS,
        "_stuck",
        instead("min(rank.last_iteration for rank in late)", "max(rank.last_iteration for rank in late)"),
        f"{RANKS_TESTS}::test_of_ranks_that_are_stuck_the_last_ones_are_suspected",
    ),
    Mutation(
        "an abandoned iteration condemns",
        RANK,
        "_reported",
        never("peer_lost", "_asked_for"),
        f"{RANKS_TESTS}::test_an_abandoned_iteration_of_an_older_epoch_is_no_complaint",
    ),
    # Engines by load.
    Mutation(
        "an engine goes before it knows that it is to begin nothing",
        SCALING,
        "_finish",
        without("load.places"),
        f"{SCALING_TESTS}::test_an_engine_goes_when_one_less_has_had_room_for_long_and_it_has_finished",
    ),
    Mutation(
        "an engine goes that has requests",
        SCALING,
        "_finish",
        without("load.requests"),
        f"{SCALING_TESTS}::test_another_scheduler_goes_on_with_engines_that_finish",
    ),
    Mutation(
        "a moment without room is forgotten",
        SCALING,
        "step",
        sets("self._fits", "seen.now if self._fits is None else self._fits", "old"),
        f"{SCALING_TESTS}::test_one_moment_without_room_begins_the_time_anew",
    ),
    Mutation(
        "engines that are not up are room",
        SCALING,
        "_fits_into",
        instead("sum(load.slots for load in stay)", "sum(load.slots for load in seen.load(range(engines)))"),
        f"{SCALING_TESTS}::test_engines_that_are_not_up_are_no_room",
    ),
    Mutation(
        "engines are added while none is up",
        SCALING,
        "_more",
        instead(
            "engines == self._bounds.most or not up or seen.now - self._changed < self._bounds.up_seconds",
            "engines == self._bounds.most or seen.now - self._changed < self._bounds.up_seconds",
        ),
        f"{SCALING_TESTS}::test_no_engine_is_added_while_none_is_up",
    ),
    Mutation(
        "the number is changed that stands, not the one that was seen",
        STATEFULSET,
        "resize",
        passes("scale_set", 2, "workers.replicas"),
        f"{SIZE_TESTS}::test_a_number_that_was_changed_meanwhile_stays",
    ),
    Mutation(
        "engines go on to finish where nothing is scaled",
        STATEFULSET,
        "_look",
        instead(
            "size_of(view.workers, self._pods_per_engine).beginning if self._scales else len(view.engines)",
            "size_of(view.workers, self._pods_per_engine).beginning",
        ),
        f"{SIZE_TESTS}::test_schedulers_that_do_not_scale_ignore_what_is_written",
    ),
    Mutation(
        "an event is longer than Kubernetes takes it",
        f"{SERVICE}/discovery/telling.py",
        "event_manifest",
        instead("event.message[:1024]", "event.message"),
        "tests/scheduler/discovery/test_rollout.py::test_an_events_message_is_as_long_as_kubernetes_takes_it",
    ),
    Mutation(
        "a story names an engine twice",
        f"{SERVICE}/explain/telling.py",
        "title",
        instead("dict.fromkeys(story.engines)", "story.engines"),
        "tests/scheduler/test_explain.py",
    ),
    Mutation(
        "the end of the first outage is not told",
        f"{SERVICE}/app.py",
        "_check_pool",
        drop("back"),
        "tests/scheduler/test_app.py",
    ),
    Mutation(
        "scores of a prompt are lost with an engine",
        f"{SERVICE}/master/output.py",
        "Outputs.admitted",
        always("held.tokens"),
        "tests/scheduler/test_output.py::test_a_prompt_has_its_scores_once",
    ),
    Mutation(
        "scores of a prompt come twice after a loss",
        f"{SERVICE}/master/output.py",
        "Outputs.admitted",
        drop("held.prompt.clear"),
        "tests/scheduler/test_output.py::test_a_prompt_has_its_scores_once",
    ),
    Mutation(
        "a scheduler that decided once goes on from there",
        f"{SERVICE}/scaler.py",
        "",
        Text("            self._scaling = None\n            return\n", "            return\n"),
        "tests/scheduler/test_scaler.py::test_another_scheduler_decides",
    ),
    Mutation(
        "a story begins with the first heading since it came",
        f"{SERVICE}/master/recent.py",
        "EngineRecent.lines",
        instead("max(begun - 1, 0)", "begun"),
        "tests/scheduler/test_recent.py::test_a_reader_gets_all_that_may_have_come_since_a_moment",
    ),
    Mutation(
        "a request is in the queue that was claimed since",
        f"{SERVICE}/explain/explanation.py",
        "_Story.__init__",
        never("stay.claimed", "standing.now"),
        "tests/scheduler/test_explain.py::test_a_request_that_was_claimed_since_the_pool_was_asked",
    ),
    Mutation(
        "tops that the pool has lost hide later ones",
        f"{SERVICE}/master/output.py",
        "Held.unacked",
        instead("max(mine, 0)", "mine"),
        "tests/scheduler/test_output.py::test_tokens_that_the_pool_lost_have_lost_their_scores",
    ),
    Mutation(
        "a rank was silent before its engine ran",
        f"{SERVICE}/ranks/rank.py",
        "Rank.run",
        drop("last_heard", "_now"),
        "tests/scheduler/test_ranks.py::test_a_master_that_was_late_itself_judges_nobody",
    ),
    Mutation(
        "rows are kept for pulls that were in vain",
        f"{SERVICE}/master/master.py",
        "EngineMaster._begin_here",
        drop("pulled"),
        f"{MASTER_TESTS}::test_who_had_begun_a_request_hears_that_it_begins_here",
    ),
    Mutation(
        "pulls that were not tried are not counted",
        f"{SERVICE}/master/master.py",
        "EngineMaster._begin_here",
        drop("not_pulled"),
        f"{MASTER_TESTS}::test_who_had_begun_a_request_hears_that_it_begins_here",
    ),
    Mutation(
        "each failure of a pause is a warning",
        f"{SERVICE}/master/master.py",
        "EngineMaster._begin_here",
        drop("_pull_at"),
        f"{MASTER_TESTS}::test_who_had_begun_a_request_hears_that_it_begins_here",
    ),
    Mutation(
        "a rank owes a pull for each iteration",
        "services/scheduler/orca_scheduler/ranks/ranks.py",
        "Ranks.send",
        always("iteration.HasField"),
        "tests/scheduler/test_ranks.py::test_a_pull_that_is_never_reported",
    ),
]
