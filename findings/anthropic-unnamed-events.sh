#!/bin/sh
# anthropic 2.14.0: a stream of right events is empty, without an error, where no event has a name beside its data.
#
# Guess before: the client reads the `type` that the data of each event has, and the line `event:` before it only says
# it again. It does: where each line is `event: message`, the stream is whole. But where there are no such lines, and
# the events are by the standard of the type `message` all the same, each one is dropped.
# `messages.create(stream=True)` has no events, the text of `messages.stream` is "", and only a call for its final
# message raises, an AssertionError without words.
#
# Seen with: anthropic 2.14.0, Python 3.11. Prints the types of events that arrive, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check anthropic==2.14.0
"$folder/env/bin/python" - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic

MESSAGE = {"id": "a", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
EVENTS = (
    {"type": "message_start", "message": MESSAGE | {"usage": {"input_tokens": 1, "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "four"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
    {"type": "message_stop"},
)
NAMES = {
    "the type": lambda event: f"event: {event['type']}\n",
    "message": lambda event: "event: message\n",
    "no name": lambda event: "",
}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in EVENTS:
            self.wfile.write(f"{NAMES[names](event)}data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(api_key="none", base_url=f"http://127.0.0.1:{server.server_port}", max_retries=0)
request = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "2 + 2"}]}
for names, whole in (("the type", True), ("message", True), ("no name", False)):
    types = [event.type for event in client.messages.create(stream=True, **request)]
    with client.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
    print(f"named by {names}: {len(types)} events, text {text!r}")
    assert types == ([event["type"] for event in EVENTS] if whole else [])
    assert text == ("four" if whole else "")
try:
    with client.messages.stream(**request) as stream:
        stream.get_final_message()
except AssertionError as error:
    print("the final message:", repr(error))
else:
    raise AssertionError("there is a final message")
PYTHON
