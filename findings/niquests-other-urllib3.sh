#!/bin/sh
# niquests 3.21.2: installing it changes what requests does. `pip list` says urllib3 2.8.0, and `import urllib3` is
# another one.
#
# Guess before: niquests has its own engine, urllib3-future, under its own name, and requests beside it goes on with
# urllib3. A file that Python reads at each start puts urllib3-future into the folder of urllib3, and all that uses
# urllib3 (requests, the client of Kubernetes) has it from then on. It shows where a text has no chunks: `iter_lines`
# of requests reads packs of 512 bytes, and urllib3 waits until a pack is full, so lines of 10 bytes a tenth of a
# second apart arrive together at the end. Beside niquests the same call yields each line as it comes.
#
# Seen with: niquests 3.21.2, urllib3-future 2.25.904, urllib3 2.8.0, requests 2.34.2, Python 3.11. Prints the
# versions and when the lines arrive, with niquests and without, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check requests==2.34.2 urllib3==2.8.0
cat > "$folder/lines.py" <<'PYTHON'
import importlib.metadata
import socket
import sys
import threading
import time

import requests
import urllib3


def serve(listener):
    client, _ = listener.accept()
    client.recv(65536)
    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    for number in range(5):
        client.sendall(b"data: %d\n\n" % number)
        time.sleep(0.1)
    client.close()


listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
answer = requests.get(f"http://127.0.0.1:{listener.getsockname()[1]}", stream=True)
times = [time.monotonic() for line in answer.iter_lines() if line]
apart = times[-1] - times[0]
metadata = importlib.metadata.version("urllib3")
print(f"urllib3 {metadata} by its metadata, {urllib3.__version__} as imported: {len(times)} lines within {apart:.2f} s")
assert metadata == "2.8.0"
assert len(times) == 5
assert urllib3.__version__ == sys.argv[1]
assert (apart > 0.2) == (sys.argv[2] == "apart")
PYTHON
"$folder/env/bin/python" "$folder/lines.py" 2.8.0 together
"$folder/env/bin/pip" install --quiet --disable-pip-version-check niquests==3.21.2 urllib3-future==2.25.904
"$folder/env/bin/python" "$folder/lines.py" 2.25.904 apart
