#!/bin/sh
# opentelemetry-sdk 1.45.2: the span of a request that was cancelled looks like that of one which went well.
#
# Guess before: an exception that leaves the block of `start_as_current_span` makes the span an error, whichever it
# is. It does so for what derives from Exception, and since Python 3.8 asyncio's CancelledError does not. So where a
# client hangs up, or a server stops, the span ends early with no event and the status UNSET. A limit of time is an
# error only in a span around `asyncio.timeout`; those inside it, where the time went, have none. Counts of errors by
# span do not see any of this.
#
# Seen with: opentelemetry-sdk 1.45.2, Python 3.11. Prints status and events of the spans, and fails when that
# changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check opentelemetry-sdk==1.45.2 opentelemetry-api==1.45.2
"$folder/env/bin/python" - <<'PYTHON'
import asyncio

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
tracer = provider.get_tracer("requests")


async def request(name, end):
    with tracer.start_as_current_span(name):
        await end


async def fail():
    raise ValueError("a bad request")


async def limited():
    async with asyncio.timeout(0.01):
        await request("inside the limit", asyncio.Event().wait())


async def main():
    await request("well", asyncio.sleep(0))
    cancelled = asyncio.create_task(request("cancelled", asyncio.Event().wait()))
    await asyncio.sleep(0)
    cancelled.cancel()
    failed, limit = request("failed", fail()), request("around the limit", limited())
    return [type(end).__name__ for end in await asyncio.gather(cancelled, failed, limit, return_exceptions=True)]


assert asyncio.run(main()) == ["CancelledError", "ValueError", "TimeoutError"]
found = {}
for span in exporter.get_finished_spans():
    found[span.name] = span.status.status_code.name, [event.name for event in span.events]
    print(f"{span.name}: {found[span.name][0]}, {len(span.events)} events")
for name in ("well", "cancelled", "inside the limit"):
    assert found[name] == ("UNSET", [])
for name in ("failed", "around the limit"):
    assert found[name] == ("ERROR", ["exception"])
PYTHON
