"""The master of one engine: batches out, tokens to the pool, a journal of what happened."""
