"""The control plane between schedulers and ranks, beyond what `worker.proto` can state."""

PROTOCOL = 3  # raised when the messages change their meaning; ranks of different numbers never form an engine
TERM_METADATA = "orca-term"  # of a Run call: a master of an old term must not end its successor's stream
