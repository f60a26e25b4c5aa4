"""Ids of spans: random ones, and those that another process can name, too."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator


class SpanIds(RandomIdGenerator):
    """Random ids, but for the span that begins within `next_is`. Only one thread of a process may use that."""

    def __init__(self) -> None:
        self._next: int | None = None

    @contextmanager
    def next_is(self, *numbers: int) -> Iterator[None]:
        """numbers: together they belong to one span alone."""
        self._next = int.from_bytes(blake2b(repr(numbers).encode(), digest_size=8).digest())
        try:
            yield
        finally:
            self._next = None

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self._next is None else self._next
