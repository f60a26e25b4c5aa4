"""The supervisor of a pod's ranks."""
