"""The life of an engine as a pure state machine: how it forms, who is suspected, how it ends."""
