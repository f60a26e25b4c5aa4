"""What schedulers and ranks agree on, beyond the messages of `worker.proto`."""

PROTOCOL = 3  # raised when a message changes its meaning; an engine forms only from ranks with the same number
TERM_METADATA = "orca-term"  # key in a Run call's metadata; with the term, a rank refuses the stream of an old master
