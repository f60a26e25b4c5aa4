"""A rank's part of the engine, and the thread that drives its GPU."""
