#!/bin/sh
# uvloop 0.23.0: a connection that is cancelled while its name is looked up leaves an error that nobody retrieves.
#
# Guess before: whoever cancels create_connection (a timeout does) has ended all of it, as with asyncio's own loop.
# uvloop waits for its lookups by asyncio.wait, which leaves them running where it is cancelled. The lookup fails later,
# and no task takes its error: the loop's exception handler is called with "Future exception was never retrieved" and a
# gaierror. So a service that tries again and again while DNS is away writes an ERROR line for each try that it gave up.
#
# Seen with: uvloop 0.23.0, Python 3.11: the handler is called once, and not at all with asyncio's loop. Prints what the
# handlers were called with, and fails when that changes. The name is in the domain that no server knows (RFC 6761).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check uvloop==0.23.0
cat > "$folder/connect.py" <<'PYTHON'
import asyncio
import gc
import socket
import sys
from contextlib import suppress

import uvloop

HOST, PORT = "no-such-host.invalid", 80


async def main() -> list[str]:
    loop, messages = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: messages.append(context["message"]))
    connecting = asyncio.create_task(loop.create_connection(asyncio.Protocol, HOST, PORT))
    await asyncio.sleep(0)
    connecting.cancel()
    with suppress(asyncio.CancelledError):
        await connecting
    for _ in range(8):  # lookups that begin later, and end later
        with suppress(socket.gaierror):
            await loop.getaddrinfo(HOST, PORT)
    gc.collect()
    return messages


messages = (uvloop.run if sys.argv[1] == "uvloop" else asyncio.run)(main())
print(sys.argv[1], messages)
sys.exit(messages != (["Future exception was never retrieved"] if sys.argv[1] == "uvloop" else []))
PYTHON
"$folder/env/bin/python" "$folder/connect.py" uvloop
"$folder/env/bin/python" "$folder/connect.py" asyncio
