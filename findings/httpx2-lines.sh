#!/bin/sh
# httpx2 2.16.2: `iter_lines` ends a line at U+2028, U+2029 and U+0085, too, which JSON holds unescaped.
#
# It cuts as `str.splitlines` does. A stream with one JSON text a line, or with events, comes in pieces wherever a model
# writes such a character: `json.loads` raises, or the rest of an event is lost. The module's own `EventSource` cuts at CR
# and LF alone, as the standard says, and so does `iter_lines` of requests.
#
# Seen with: httpx2 2.16.2, requests 2.34.2, Python 3.11. Prints the lines, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check httpx2==2.16.2 requests==2.34.2
"$folder/env/bin/python" - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx2
import requests

TEXT = "a\u2028b\u2029c\x85d"
BODY = f"data: {json.dumps(TEXT, ensure_ascii=False)}\n\n".encode()


class Events(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Events)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/"
with httpx2.Client(trust_env=False) as client:
    with client.stream("GET", url) as answer:
        lines = list(answer.iter_lines())
    with client.stream("GET", url) as answer:
        events = [event.data for event in httpx2.EventSource(answer)]
with requests.get(url, stream=True, timeout=60) as answer:
    theirs = list(answer.iter_lines())
server.shutdown()
print("httpx2, iter_lines:", lines)
print("httpx2, EventSource:", events)
print("requests, iter_lines:", theirs)
assert lines == ['data: "a', "b", "c", 'd"', ""]
assert [json.loads(event) for event in events] == [TEXT]
assert theirs == BODY.splitlines()
assert len(theirs) == 2
PYTHON
