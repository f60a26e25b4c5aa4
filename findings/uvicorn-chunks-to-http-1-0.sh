#!/bin/sh
# uvicorn 0.54.0: a client of HTTP/1.0 gets the lengths of chunks in its text, if httptools is installed.
#
# Guess before: an answer without a length goes to HTTP/1.0 as it is, and its end is that of the connection, since
# chunks came with HTTP/1.1 and a server must not send them to an older client. With h11 uvicorn does so. With
# httptools, which it prefers where it finds it, it sends `transfer-encoding: chunked` to any client. One that knows
# no chunks reads their lengths as text; in a stream of events they are lines that are no events.
#
# Seen with: uvicorn 0.54.0, httptools 0.9.0, h11 0.16.0, Python 3.11. Prints both answers, and fails when that
# changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check uvicorn==0.54.0 httptools==0.9.0 h11==0.16.0
"$folder/env/bin/python" - <<'PYTHON'
import socket
import threading

import uvicorn


async def words(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for word in (b"one ", b"two"):
        await send({"type": "http.response.body", "body": word, "more_body": True})
    await send({"type": "http.response.body"})


def answer(http):
    """The head and the text of the answer to a request of HTTP/1.0."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(words, http=http, lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    with socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        said = b"".join(iter(lambda: client.recv(65536), b""))
    server.should_exit = True
    thread.join()
    head, _, text = said.partition(b"\r\n\r\n")
    print(f"{http}: {text!r}{', with transfer-encoding: chunked' * (b'chunked' in head)}")
    return b"transfer-encoding: chunked" in head.lower(), text


assert answer("h11") == (False, b"one two")
assert answer("httptools") == (True, b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n")
assert answer("auto") == answer("httptools")
PYTHON
