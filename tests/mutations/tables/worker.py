"""The worker: forks, relays."""

from mutations.changes import drop, unbound
from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "a fork leaks its streams",
        "services/worker/orca_worker/fork_server.py",
        "serve",
        drop("os.close", "stream"),
        "tests/worker/test_supervisor.py::test_a_fork_leaves_no_descriptor",
    ),
    Mutation(
        "Ctrl-C ends the fork server",
        "services/worker/orca_worker/fork_server.py",
        "run",
        drop("signal.signal"),
        "tests/worker/test_supervisor.py::test_a_fork_server_goes_on_after_ctrl_c",
    ),
    Mutation(
        "a neighbour is connected to without a bound",
        "services/worker/orca_worker/relay.py",
        "Neighbour._hold",
        unbound("_transport.connect"),
        "tests/worker/test_relay.py::test_a_neighbour_that_cannot_be_reached_is_given_up",
    ),
    Mutation(
        "a neighbour's answer is waited for without a bound",
        "services/worker/orca_worker/relay.py",
        "Neighbour._hold",
        unbound("_call.taken"),
        "tests/worker/test_relay.py::test_a_neighbour_that_does_not_answer_is_not_connected",
    ),
]
