"""The command line: its output, its suggestions, the doctor."""

from mutations.changes import gives, instead, lacks, passes, sets
from mutations.mutation import Mutation

DOCTOR = "cli/orca_cli/doctor"
CHECKS = "tests/cli/test_doctor_checks.py"

MUTATIONS = [
    Mutation(
        "a lost terminal ends a server",
        "cli/orca_cli/stdout.py",
        "Lossy.write",
        instead("suppress(OSError)", "suppress()"),
        "tests/cli/test_commands.py::test_a_server_goes_on_when_its_terminal_is_away",
    ),
    Mutation(
        "percentages of a budget are rounded down",
        f"{DOCTOR}/engines.py",
        "share",
        instead('ceil(int(text.removesuffix("%")) * pods / 100)', 'int(text.removesuffix("%")) * pods // 100'),
        CHECKS,
    ),
    Mutation(
        "only the beginning of an option is suggested",
        "cli/orca_cli/suggestions.py",
        "alike",
        gives("known.startswith(given)"),
        "tests/cli/test_commands.py",
    ),
    Mutation(
        "an exception is shown among the fields, too",
        "cli/orca_cli/runs.py",
        "readable",
        instead('fields.pop("exception", None)', 'fields.get("exception", None)'),
        "tests/cli/test_commands.py::test_logs",
    ),
    Mutation(
        "a conversation draws without its seed",
        "cli/orca_cli/chat.py",
        "chat",
        lacks("seed"),
        "tests/client/test_chat_command.py::test_a_conversation",
    ),
    Mutation(
        "chaos begins with the number of its rounds",
        "cli/orca_cli/main.py",
        "chaos",
        passes("command.Plan", 2, "rounds"),
        "tests/cli/test_chaos_command.py::test_the_plan_of_a_command",
    ),
    Mutation(
        "ranks are numbered by stages",
        "cli/orca_cli/topology.py",
        "pod_table",
        sets("ranks", "range(stage + first, stage + first + len(pod.places))"),
        "tests/helm/test_topology.py::test_the_command_shows_the_same_map",
    ),
]
