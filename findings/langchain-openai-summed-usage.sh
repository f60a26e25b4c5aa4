#!/bin/sh
# langchain-openai 1.7.4: with the usage so far in each chunk, a prompt of 7 tokens counts 35.
#
# Guess before: the last usage of a stream counts. Servers that have `continuous_usage_stats` (vLLM, Orca) send it in every
# chunk, so that a stream which is cut off has been counted too: each has the whole prompt and the answer until there.
# LangChain adds up what the chunks say, in `stream` and in `invoke` of a streaming model, and a long answer costs a
# hundred times its prompt. pydantic-ai does so too, if the option is asked for in `extra_body`; asked for by its own
# setting, the last one counts. haystack-ai takes the last. With `include_usage` alone all of them are right.
#
# Seen with: langchain-openai 1.7.4, langchain-core 1.8.3, pydantic-ai-slim 2.68.0, haystack-ai 3.4.1, openai 3.57.0,
# Python 3.11. Prints what each counts, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0 \
    langchain-openai==1.7.4 langchain-core==1.8.3 "pydantic-ai-slim[openai]==2.68.0" haystack-ai==3.4.1
HAYSTACK_TELEMETRY_ENABLED=False "$folder/env/bin/python" -W ignore - <<'PYTHON'
import http.server
import json
import threading

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Server(http.server.BaseHTTPRequestHandler):
    """Answers "abc" to a prompt of 7 tokens, with the usages that are asked for."""

    def do_POST(self):
        options = json.loads(self.rfile.read(int(self.headers["content-length"])))["stream_options"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for tokens, (text, reason) in enumerate([("a", None), ("b", None), ("c", None), ("", "stop"), (None, None)], 1):
            choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            chunk |= {"choices": [] if text is None else [choice]}
            if text is None or options.get("continuous_usage_stats"):
                answer = min(tokens, 3)
                chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": answer, "total_tokens": 7 + answer}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


def langchain(**options):
    model = ChatOpenAI(model="m", api_key="any", base_url=address, streaming=True, **options)
    usage = model.invoke("hi").usage_metadata
    streamed = None
    for chunk in model.stream("hi"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.usage_metadata == usage
    return usage["input_tokens"], usage["output_tokens"]


def pydantic_ai(**options):
    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=address, api_key="any"))
    with Agent(model, model_settings=options).run_stream_sync("hi") as run:
        run.get_output()
        return run.usage.input_tokens, run.usage.output_tokens


def haystack(**options):
    generator = OpenAIChatGenerator(
        model="m", api_key=Secret.from_token("any"), api_base_url=address, streaming_callback=str, generation_kwargs=options
    )
    usage = generator.run([ChatMessage.from_user("hi")])["replies"][0].meta["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}/v1"
last = {"stream_options": {"include_usage": True}}
each = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
for name, found, expected in (
    ("langchain-openai, usage at the end", langchain(extra_body=last), (7, 3)),
    ("langchain-openai, usage in each chunk", langchain(extra_body=each), (35, 12)),
    ("pydantic-ai, usage in each chunk", pydantic_ai(extra_body=each), (35, 12)),
    ("pydantic-ai, asked for by its setting", pydantic_ai(openai_continuous_usage_stats=True), (7, 3)),
    ("haystack-ai, usage in each chunk", haystack(extra_body=each), (7, 3)),
):
    print(f"{name}: {found[0]} tokens of the prompt, {found[1]} of the answer")
    assert found == expected
server.shutdown()
PYTHON
