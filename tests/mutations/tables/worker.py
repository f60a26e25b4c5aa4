"""The worker: forks, relays."""

from mutations.changes import Text, drop, gives, instead, never, sets, swap, unbound, without
from mutations.mutation import Mutation

KEEP = "self._keep(purpose, group)"
MEET = 'self._backend.meet(group, rank, size, sums=purpose == "tensor")'
MUTATIONS = [
    Mutation(
        "the last key of a pattern counts that fits a module",
        "services/worker/orca_worker/models/adapters.py",
        "_by_name",
        Text("return min(found", "return max(found"),
        "tests/worker/test_adapters.py::test_a_pattern_for_each_of_many_modules",
    ),
    Mutation(
        "a fork server at rest loses what was relocated",
        "services/worker/orca_worker/processes/process.py",
        "unwritten",
        Text('{"Anonymous:", "Swap:"}', '{"Swap:"}'),
        "tests/worker/test_unmapping.py::test_pages_of_files_are_unmapped_unless_they_are_its_own",
    ),
    Mutation(
        "a fork server never rests",
        "services/worker/orca_worker/processes/fork_server.py",
        "serve",
        drop("unmap_files"),
        "tests/e2e/test_fork_servers.py::test_fork_servers_at_rest_map_little_of_libraries",
    ),
    Mutation(
        "a block with other keys and values is used",
        "services/worker/orca_worker/iteration/kv.py",
        "KVManager.check",
        never("keyed"),
        "tests/worker/test_tags.py::test_a_block_that_is_not_what_a_rows_tokens_say",
    ),
    Mutation(
        "a rank that keeps keys and values in dtype, whatever kv_dtype is",
        "services/worker/orca_worker/rank/app.py",
        "RankApp.start",
        instead("settings.kv_dtype", "None"),
        "tests/e2e/test_fork_servers.py::test_a_forked_rank_keeps_keys_and_values_as_the_setting_says",
    ),
    Mutation(
        "a row that begins in front of or behind its blocks with keys",
        "services/worker/orca_worker/stage/stage.py",
        "Stage._run",
        drop("check_start"),
        "tests/worker/test_tags.py::test_a_row_begins_right_behind_the_keys_and_values_that_it_has",
    ),
    Mutation(
        "a block of other tokens is filled in",
        "services/worker/orca_worker/iteration/handing.py",
        "Filling.run",
        never("got"),
        "tests/worker/test_handing.py::test_what_is_not_there_is_refused",
    ),
    Mutation(
        "a row runs before its blocks are there",
        "services/worker/orca_worker/stage/stage.py",
        "Stage._run",
        drop("_check_filled"),
        "tests/worker/test_handing.py::test_a_row_does_not_run_before_its_blocks_are_there",
    ),
    Mutation(
        "blocks of a row that was freed are written",
        "services/worker/orca_worker/iteration/handing.py",
        "Filling.run",
        never("_stopped"),
        "tests/worker/test_handing.py::test_a_row_that_is_freed_gets_no_more_blocks",
    ),
    Mutation(
        "a row that changes is read on",
        "services/worker/orca_worker/iteration/handing.py",
        "_key_at",
        never("claim"),
        "tests/worker/test_handing.py::test_a_row_that_changes_under_the_reader_is_not_served",
    ),
    Mutation(
        "keys of drafts",
        "services/worker/orca_worker/iteration/tags.py",
        "Tags.ran",
        instead("start + len(token_ids) - drafts", "start + len(token_ids)"),
        "tests/worker/test_tags.py::test_keys_are_those_of_the_tokens_whatever_the_drafts_were",
    ),
    Mutation(
        "a form does not hold behind a draft",
        "services/worker/orca_worker/sampling/forms.py",
        "Masks.begin",
        drop("Behind"),
        "tests/worker/test_forms.py::test_drafts_change_no_token_of_a_form",
    ),
    Mutation(
        "an abort does not reach a group whose ranks meet",
        "services/worker/orca_worker/data_plane/process_groups.py",
        "",
        Text(
            f"{KEEP}  # before its ranks meet, so that an abort reaches it\n            {MEET}\n", f"{MEET}; {KEEP}\n"
        ),
        "tests/worker/test_garbage.py::test_a_rank_is_lost_at_a_step_of_joining",
    ),
    Mutation(
        "garbage of an aborted receive is an index",
        "services/worker/orca_worker/iteration/device_tokens.py",
        "DeviceTokens.find",
        gives("torch.where(given == HERE, self._table.index_select(0, rows), given)"),
        "tests/worker/test_garbage.py::test_a_rank_is_lost_in_the_middle",
    ),
    Mutation(
        "gloo's threads take the cores of those that wake them",
        "services/worker/orca_worker/data_plane/backends.py",
        "",
        Text("os.SCHED_BATCH, os.sched_param(0)", "os.SCHED_OTHER, os.sched_param(0)"),
        "tests/worker/test_data_plane.py::test_the_threads_of_groups_do_not_preempt",
    ),
    Mutation(
        "a fork leaks its streams",
        "services/worker/orca_worker/processes/fork_server.py",
        "serve",
        drop("os.close", "stream"),
        "tests/worker/test_supervisor.py::test_a_fork_leaves_no_descriptor",
    ),
    Mutation(
        "Ctrl-C ends the fork server",
        "services/worker/orca_worker/processes/fork_server.py",
        "run",
        drop("signal.signal"),
        "tests/worker/test_supervisor.py::test_a_fork_server_goes_on_after_ctrl_c",
    ),
    Mutation(
        "a neighbour is connected to without a bound",
        "services/worker/orca_worker/rank/epoch.py",
        "Neighbour._hold",
        unbound("_transport.connect"),
        "tests/worker/test_relay.py::test_a_neighbour_that_cannot_be_reached_is_given_up",
    ),
    Mutation(
        "a neighbour's answer is waited for without a bound",
        "services/worker/orca_worker/rank/epoch.py",
        "Neighbour._hold",
        unbound("_call.taken"),
        "tests/worker/test_relay.py::test_a_neighbour_that_does_not_answer_is_not_connected",
    ),
    *(
        Mutation(name, "services/worker/orca_worker/iteration/kv.py", where, change, f"tests/worker/test_kv.py::{test}")
        for name, where, change, test in (
            (
                "a row gets a block of another one",
                "KVManager.grow",
                never("shared", "_owners"),
                "test_blocks_that_a_row_cannot_have",
            ),
            (
                "a block that does not exist is given",
                "KVManager.grow",
                never("n_blocks"),
                "test_blocks_that_a_row_cannot_have",
            ),
            (
                "a shared block is free with its first row",
                "KVManager.free",
                never("owners"),
                "test_blocks_come_back_when_their_last_row_is_gone",
            ),
            (
                "a token is written beyond its row's blocks",
                "KVManager.slots",
                never("np.count_nonzero"),
                "test_a_token_beyond_the_blocks_of_its_row_is_refused",
            ),
            (
                "a token is written right behind its row's blocks",
                "KVManager.slots",
                swap(">=", ">", "_capacity"),
                "test_a_token_beyond_the_blocks_of_its_row_is_refused",
            ),
            ("an allocation keeps rows", "KVManager.allocate", drop("release"), "test_an_allocation_forgets_all_rows"),
        )
    ),
    Mutation(
        "a rank draws with the parameters of nobody",
        "services/worker/orca_worker/iteration/rows.py",
        "Rows.admit",
        sets("draw", "GREEDY", "asked"),
        "tests/e2e/test_tokens.py::test_a_draw_depends_on_seed_and_index_alone",
    ),
    Mutation(
        "each pod takes GPUs from the first on",
        "services/worker/orca_worker/rank/app.py",
        "RankApp.start",
        instead("settings.first_gpu + settings.local_rank", "settings.local_rank"),
        "tests/worker/test_rank.py::test_a_ranks_gpu_is_counted_from_the_pods_first",
    ),
    Mutation(
        "time for which a rank waits for others counts as its own",
        "services/worker/orca_worker/data_plane/process_groups.py",
        "ProcessGroups._receive",
        drop("self.waited"),
        "tests/worker/test_data_plane.py::test_operations",
    ),
    Mutation(
        "the last norm of GPT-2 has an epsilon of its own",
        "services/worker/orca_worker/models/gpt2/layers.py",
        "record",
        instead('r.norm("ln_f", hidden, config.epsilon)', 'r.norm("ln_f", hidden, 1e-5)'),
        "tests/worker/test_families.py::test_every_norm_has_the_epsilon_of_the_file",
    ),
    Mutation(
        "a model with an encoder runs in the loop of a GPU on a CPU",
        "services/worker/orca_worker/models/recorded.py",
        "RecordedFamily.load",
        without("has_encoder"),
        "tests/worker/test_device_loop.py::test_a_model_with_an_encoder_has_no_such_loop",
    ),
    Mutation(
        "a prompt is scored again after a recovery",
        "services/worker/orca_worker/iteration/rows.py",
        "Adjusted.__init__",
        without("len", "prompt"),
        "tests/worker/test_adjustments.py::test_a_model_that_computes_nothing_answers_too",
    ),
    Mutation(
        "processes that the kernel killed before count against a pod",
        "services/worker/orca_worker/pod/supervisor.py",
        "Supervisor.__init__",
        sets("_oom_kills", "0"),
        "tests/worker/test_supervisor.py::test_a_pod_ends_when_memory_was_too_little_from_the_beginning",
    ),
    Mutation(
        "Gemma 3's older files have their windows in other layers",
        "services/worker/orca_worker/models/gemma3/configuration.py",
        "_kinds",
        instead("(layer + 1) % each", "layer % each"),
        "tests/worker/test_families.py::test_files_of_older_transformers",
    ),
    Mutation(
        "an index counts before a whole file",
        "services/worker/orca_worker/models/weight_files.py",
        "weight_files",
        without("single.exists"),
        "tests/worker/test_families.py::test_layouts_of_checkpoints",
    ),
]
