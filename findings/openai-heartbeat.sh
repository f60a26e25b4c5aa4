#!/bin/sh
# openai 3.57.0 for Python: a heartbeat ends the stream with JSONDecodeError, if an event before it had an id.
#
# Guess before: a comment between two events (`: ping`, which servers send so that no proxy takes a thinking model for
# dead) is dropped, and so is all that has no data, as the standard of events says. A comment is dropped, until an
# event has an `id`. The client keeps the last id, and from then on takes each empty line that ends no data for an
# event, reads its data "" as JSON, and raises. The same ends a stream that begins with `retry: 1000` or whose
# heartbeat is an event with a name and no data. So a server that adds ids breaks its streams at the first pause.
#
# Seen with: openai 3.57.0, sseclient-py 1.9.0, Python 3.11. Prints what both read, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0 sseclient-py==1.9.0
"$folder/env/bin/python" - <<'PYTHON'
import json
import socket
import threading

import openai
import sseclient


def chunk(text):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    value = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(value)}\n\n"


def serve(listener, stream):
    client, _ = listener.accept()
    client.recv(65536)
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    client.sendall((head + stream).encode())
    client.close()


def read(stream):
    """The texts that the client gives out, and the error behind them."""
    texts = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener, stream), daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with openai.OpenAI(api_key="any", base_url=address, max_retries=0) as client:
            messages = [{"role": "user", "content": "hi"}]
            try:
                for part in client.chat.completions.create(model="m", messages=messages, stream=True):
                    texts.append(part.choices[0].delta.content)
            except json.JSONDecodeError as error:
                texts.append(type(error).__name__)
    return texts


PING, END = ": ping\n\n", "data: [DONE]\n\n"
for name, stream, expected in (
    ("a comment, no ids", chunk("a") + PING + chunk("b") + END, ["a", "b"]),
    ("ids, no comment", "id: 1\n" + chunk("a") + "id: 2\n" + chunk("b") + END, ["a", "b"]),
    ("ids and a comment", "id: 1\n" + chunk("a") + PING + "id: 2\n" + chunk("b") + END, ["a", "JSONDecodeError"]),
    ("retry at the start", "retry: 1000\n\n" + chunk("a") + chunk("b") + END, ["JSONDecodeError"]),
    ("a name without data", chunk("a") + "event: ping\n\n" + chunk("b") + END, ["a", "JSONDecodeError"]),
):
    found = read(stream)
    events = [event.data for event in sseclient.SSEClient(iter([stream.encode()])).events()]
    print(f"{name:20} openai: {found}; sseclient-py: {len(events)} events with data")
    assert found == expected
    assert len(events) == 3 and all(events)
PYTHON
