#!/bin/sh
# sglang-router 0.3.2: after four requests to busy workers it answers 503 to all for a minute, busy or not.
#
# Guess before: a worker that is full answers 429 and says in `Retry-After` when to come back; the router tries another
# worker or hands the answer on. It asks up to five times within half a second, whatever `Retry-After` says: a client's
# request is five to workers that have too many. And each 429 counts as a failure of the worker. After ten its circuit
# opens for 60 seconds: then clients get 503 "No available workers", though both would answer, and their health checks
# do. So a load a little above what workers take becomes an outage. `--disable-retries` and
# `--disable-circuit-breaker` turn these off.
#
# Seen with: sglang-router 0.3.2, Python 3.11, Linux x86-64. Prints the answers and how often workers were asked, and
# fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check sglang-router==0.3.2
cat > "$folder/router.py" <<'PYTHON'
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

busy = True
asked = 0


class Worker(http.server.BaseHTTPRequestHandler):
    def answer(self, status):
        body = b"{}"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "7")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200)

    def do_POST(self):
        global asked
        asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(429 if busy else 200)

    def log_message(self, *_):
        pass


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def status(path, value=None):
    body = None if value is None else json.dumps(value).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return None


workers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Worker) for _ in range(2)]
for worker in workers:
    threading.Thread(target=worker.serve_forever, daemon=True).start()
port = free_port()
command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port]
command += ["--prometheus-port", free_port(), "--policy", "round_robin", "--worker-urls"]
command += [f"http://127.0.0.1:{worker.server_port}" for worker in workers]
router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    while status("/health") != 200:
        assert router.poll() is None
        time.sleep(0.2)
    message = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    answers = [status("/v1/chat/completions", message) for _ in range(6)]
    print(f"both workers busy: the clients got {answers}, the workers were asked {asked} times")
    assert answers == [429] * 4 + [503] * 2 and asked == 20
    busy, asked = False, 0
    answers = [status("/v1/chat/completions", message) for _ in range(3)]
    print(f"both workers free: the clients got {answers}, the workers were asked {asked} times")
    assert answers == [503] * 3 and asked == 0
finally:
    router.terminate()
    router.wait()
PYTHON
"$folder/env/bin/python" "$folder/router.py"
