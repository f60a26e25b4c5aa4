"""`orca serve`: its processes, its Redis, its start."""

from mutations.changes import always, drop, instead, never, passes, sets
from mutations.mutation import Mutation

LOCAL = "local/orca_local"

MUTATIONS = [
    Mutation(
        "the embedded Redis is on disk every second",
        f"{LOCAL}/embedded_pool.py",
        "command",
        instead('"always"', '"everysec"'),
        "tests/local/test_embedded_pool.py::test_what_is_acknowledged_is_on_disk",
    ),
    Mutation(
        "threads are not divided by the engines",
        f"{LOCAL}/stack.py",
        "Stack._threads",
        instead("settings.tp * settings.pp * settings.engines", "settings.tp * settings.pp"),
        "tests/local/test_shares.py::test_ranks_share_the_cores",
    ),
    Mutation(
        "every process knows every setting",
        f"{LOCAL}/stack.py",
        "Stack._environment",
        sets("known", "SERVICES['endpoint'].model_fields"),
        "tests/local/test_shares.py::test_secrets_go_to_those_that_need_them",
    ),
    Mutation(
        "a refusal ends the start at once",
        f"{LOCAL}/waiting.py",
        "_check_refusals",
        instead("time.monotonic() - self._refused[1] > SURE", "True"),
        "tests/local/test_waiting.py",
    ),
    Mutation(
        "a refusal that was taken back ends the start",
        f"{LOCAL}/waiting.py",
        "_check_refusals",
        instead("refusal is None", "False"),
        "tests/local/test_waiting.py::test_a_refusal_that_is_taken_back_ends_nothing",
    ),
    Mutation(
        "an earlier process is quoted",
        f"{LOCAL}/child.py",
        "_log_lines",
        drop("log.seek"),
        "tests/local/test_child.py::test_an_earlier_process_is_not_quoted",
    ),
    Mutation(
        "too long a socket's path has no sentence",
        f"{LOCAL}/child.py",
        "place_of_socket",
        always("folder"),
        "tests/local/test_child.py::test_a_folder_with_too_long_a_path_for_a_socket",
    ),
    Mutation(
        "a TMPDIR that is too long for a socket has no sentence",
        f"{LOCAL}/child.py",
        "place_of_socket",
        never("short"),
        "tests/local/test_child.py::test_a_folder_with_too_long_a_path_for_a_socket",
    ),
    Mutation(
        "deaths are counted over the whole run",
        f"{LOCAL}/keeping.py",
        "keep",
        sets("deaths", "deaths + 1", "lived"),
        "tests/local/test_keeping.py::test_deaths_far_apart_are_told_one_by_one",
    ),
    Mutation(
        "a rank's deaths are counted over the whole run",
        f"{LOCAL}/rank_ends.py",
        "RankEnds._tell",
        sets("count", "count + 1", "QUIET"),
        "tests/local/test_keeping.py::test_ends_of_a_rank_far_apart_are_told_one_by_one",
    ),
    Mutation(
        "a pod's engine is counted by tensor ranks",
        "local/orca_local/process_table.py",
        "ProcessTable._rows",
        instead("divmod(ordinal, pp)", "divmod(ordinal, tp)"),
        "tests/local/test_process_table.py::test_ranks_are_numbered_in_their_engine",
    ),
    Mutation(
        "Ctrl-C at a terminal reaches all processes at once",
        "local/orca_local/child.py",
        "Child._make",
        passes("create_subprocess_exec", "start_new_session", "False"),
        "tests/local/test_child.py::test_a_batch_process_takes_no_core_from_others",
    ),
    Mutation(
        "the first run of a second has a number",
        f"{LOCAL}/run_folder.py",
        "new_run",
        instead("moment if number == 1 else f'{moment}.{number}'", "f'{moment}.{number}'"),
        "tests/local/test_run_folder.py::test_a_run_is_named_after_the_time",
    ),
]
