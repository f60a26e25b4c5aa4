"""One rank: its process, its controller, its membership in an engine."""
