#!/bin/sh
# uvicorn 0.54.0 and granian 2.8.9: a client that has said all gets no answer, if it ends its half of the connection.
#
# Guess before: it gets one. TCP ends each direction for itself, and a client may end its own one behind the request
# and read on, as `socat` does where its input ends. uvicorn and granian take that for the end of the client: the
# application receives `http.disconnect`, what it sends goes nowhere, and the client reads an end without a byte.
# hypercorn says `http.disconnect` too, and sends the answer all the same.
#
# Seen with: uvicorn 0.54.0, httptools 0.9.0, h11 0.16.0, granian 2.8.9, hypercorn 0.18.0, Python 3.11, Linux x86-64.
# Prints the answers, and fails when they change.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check \
    uvicorn==0.54.0 httptools==0.9.0 h11==0.16.0 granian==2.8.9 hypercorn==0.18.0
cat > "$folder/slow.py" <<'PYTHON'
import asyncio


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for _ in range(2):
            await send({"type": (await receive())["type"] + ".complete"})
        return
    await receive()
    await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"four"})
PYTHON
cat > "$folder/ask.py" <<'PYTHON'
import socket
import subprocess
import sys
import time

SERVERS = {
    "uvicorn, httptools": ["uvicorn", "--http", "httptools", "--log-level", "error", "--port"],
    "uvicorn, h11": ["uvicorn", "--http", "h11", "--log-level", "error", "--port"],
    "granian": ["granian", "--interface", "asgi", "--log-level", "error", "--port"],
    "hypercorn": ["hypercorn", "--log-level", "error", "--bind"],
}


def connect(port):
    while server.poll() is None:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise SystemExit("the server has ended")


def answer(port, half):
    """The text of the answer, where the client ends its half while the application sleeps, or does not."""
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        if half:
            time.sleep(0.1)
            client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")[2]


for name, command in SERVERS.items():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = f"127.0.0.1:{port}" if name == "hypercorn" else str(port)
    server = subprocess.Popen([sys.executable, "-m", *command, place, "slow:app"])
    try:
        answers = answer(port, half=False), answer(port, half=True)
    finally:
        server.terminate()
        server.wait()
    print(f"{name}: {answers[0]}, and {answers[1]} to a client that has ended its half")
    assert answers == (b"four", b"four" if name == "hypercorn" else b"")
PYTHON
cd "$folder"
"$folder/env/bin/python" "$folder/ask.py"
