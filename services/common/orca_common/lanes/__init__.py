"""gRPC over the library h2, for the control lanes between an engine's master and its ranks. See README.md."""
