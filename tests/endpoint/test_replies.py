"""The answers of each API as whole values: every event and line of a stream in its order, and the whole objects."""

import json
import math
import time
from typing import Any
from unittest.mock import ANY

from orca_common.errors import Unavailable
from orca_endpoint.anthropic.answer import MessageReply
from orca_endpoint.calls.events import Accepted, Finished, Prompted, PromptToken, Token, TopToken
from orca_endpoint.ollama.answer import ChatLines, GeneratedLines, Lines
from orca_endpoint.openai.answer import Choice, UsageIn, usage
from orca_endpoint.openai.chat.answer import ChatChunks, Logprobs, chat_completion
from orca_endpoint.openai.completions.answer import CompletionChunks, completion
from orca_endpoint.openai.completions.answer import Logprobs as TextLogprobs
from orca_endpoint.openai.responses.answer import NO_EVENTS, ResponseReply
from orca_endpoint.openai.responses.kept import Kept
from orca_endpoint.text.tool_calls import CallPart, Said
from orca_pool.records import Reason, Times

SCORES = Logprobs(chr, lambda token_id: bytes([token_id]))
TOP = (TopToken(66, "B", -1.0),)
BEGUN = Accepted("r-1", 5, 0)
SCORED: list[dict[str, Any]] = [
    {
        "token": "A",
        "logprob": -0.5,
        "bytes": [65],
        "top_logprobs": [{"token": "B", "logprob": -1.0, "bytes": [66]}],
    },
    {"token": "C", "logprob": -9999.0, "bytes": [67], "top_logprobs": []},
]


def token(at: int, token_id: int, said: Said, logprob: float | None = None, top: Any = ()) -> Token:
    return Token(at, token_id, said.content, logprob, 1, "e", top, said)


# A text, whose second token has a logprob and no text, and a call in pieces.
TEXT = [token(0, 65, Said("A", ()), -0.5, TOP), token(1, 67, Said("", ()), -math.inf)]
CALL = [
    token(2, 68, Said("", (CallPart(0, "call_1", "f", ""),)), -2.0),
    token(3, 69, Said("", (CallPart(0, "", "", '{"a": '),)), -2.0),
    token(4, 70, Said("", (CallPart(0, "", "", "1}"),)), -2.0),
]


def parts(sent: bytes) -> list[Any]:
    """Server-sent events: the names and values of their lines, the data read as JSON. Or the data alone."""
    found = list[Any]()
    for block in sent.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines.pop("data")
        read = data if data == "[DONE]" else json.loads(data)
        found.append((*lines.items(), read) if lines else read)
    return found


def test_the_events_of_a_response() -> None:
    reply, choice = ResponseReply("resp_1", "m", SCORES, Kept(7, {"metadata": {"a": "b"}}, True, [])), Choice()
    end = Finished(Reason.LENGTH, 5, "", Times(1, 2, 3, 4_000_000), Said("", ()), 2)
    sent = reply.begun(0, choice, BEGUN) + reply.shown(0, choice, [*TEXT, *CALL]) + reply.finished(0, choice, end)
    begun = {
        "id": "resp_1",
        "object": "response",
        "created_at": 7,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": "m",
        "output": [],
        "usage": None,
        "metadata": {"a": "b"},
    }
    message = {"id": "msg_1", "type": "message", "status": "in_progress", "role": "assistant", "content": []}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    whole_part = {"type": "output_text", "text": "A", "annotations": [], "logprobs": SCORED}
    whole_message = message | {"status": "completed", "content": [whole_part]}
    call = {
        "id": "fc_1_0",
        "type": "function_call",
        "status": "in_progress",
        "call_id": "call_1",
        "name": "f",
        "arguments": "",
    }
    whole_call = call | {"status": "incomplete", "arguments": '{"a": 1}'}
    usage = {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }
    ended = begun | {
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [whole_message, whole_call],
        "usage": usage,
    }
    of_text = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    of_call = {"item_id": "fc_1_0", "output_index": 1}
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": message}),
        ("response.content_part.added", {**of_text, "part": part}),
        ("response.output_text.delta", {**of_text, "delta": "A", "logprobs": SCORED[:1]}),
        ("response.output_text.delta", {**of_text, "delta": "", "logprobs": SCORED[1:]}),
        ("response.output_text.done", {**of_text, "text": "A", "logprobs": SCORED}),
        ("response.content_part.done", {**of_text, "part": whole_part}),
        ("response.output_item.done", {"output_index": 0, "item": whole_message}),
        ("response.output_item.added", {"output_index": 1, "item": call}),
        ("response.function_call_arguments.delta", {**of_call, "delta": '{"a": '}),
        ("response.function_call_arguments.delta", {**of_call, "delta": "1}"}),
        ("response.function_call_arguments.done", {**of_call, "name": "f", "arguments": '{"a": 1}'}),
        ("response.output_item.done", {"output_index": 1, "item": whole_call}),
        ("response.incomplete", {"response": ended}),
    ]
    assert parts(sent) == [
        (("event", kind), {"type": kind, "sequence_number": n, **body}) for n, (kind, body) in enumerate(wanted)
    ]
    assert reply.whole() == ended
    described = {"message": "away", "type": "server_error", "param": None, "code": None}
    error = {**described, "type": "error", "sequence_number": 14, "error": described}
    assert parts(reply.failed(Unavailable("away"))) == [(("event", "error"), error)]
    assert reply.ended(None) == b"data: [DONE]\n\n"


def test_the_ends_of_a_response() -> None:
    """The pool says when it was completed; a cancelled one has no usage; an error has its sentence."""
    reply = ResponseReply("resp_1", "m", SCORES, Kept(7, {}, False, []), NO_EVENTS)
    reply.begun(0, Choice(), BEGUN)
    reply.fail(Unavailable("away"))
    assert reply.whole()["error"] == {"code": "server_error", "message": "away"}
    for reason, status, completed in ((Reason.EOS, "completed", 4), (Reason.CANCELLED, "cancelled", None)):
        reply = ResponseReply("resp_1", "m", SCORES, Kept(7, {}, False, []), NO_EVENTS)
        reply.begun(0, Choice(), BEGUN)
        assert reply.shown(0, Choice(), TEXT) == b""
        assert reply.finished(0, Choice(), Finished(reason, 2, "", Times(1, 2, 3, 4_000_000))) == b""
        whole = reply.whole()
        assert (whole["status"], whole["completed_at"], whole["incomplete_details"]) == (status, completed, None)
        assert (whole["usage"] is None) == (status == "cancelled")
        (part,) = whole["output"][0]["content"]
        assert part == {"type": "output_text", "text": "A", "annotations": [], "logprobs": []}


def test_an_answer_without_a_token_is_an_empty_message() -> None:
    reply = ResponseReply("resp_1", "m", SCORES, Kept(7, {}, True, []))
    reply.begun(0, Choice(), BEGUN)
    kinds = [data["type"] for _, data in parts(reply.finished(0, Choice(), Finished(Reason.EOS, 0, "", None)))]
    assert kinds == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_the_events_of_a_message() -> None:
    end = Finished(Reason.LENGTH, 5, "", None, Said("", ()), 2)
    for streams in (True, False):
        reply, choice = MessageReply("msg_1", "m", streams, chr), Choice()
        sent = reply.begun(0, choice, BEGUN) + reply.shown(0, choice, [*TEXT, *CALL]) + reply.finished(0, choice, end)
        begun = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": []}
        begun |= {"stop_reason": None, "stop_sequence": None}
        no_usage = {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        usage = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 5}
        call = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
        pieces = [{"type": "input_json_delta", "partial_json": piece} for piece in ('{"a": ', "1}")]
        wanted: list[dict[str, Any]] = [
            {"type": "message_start", "message": begun | {"usage": no_usage | {"output_tokens": 0}}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "A"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "content_block_start", "index": 1, "content_block": call},
            *({"type": "content_block_delta", "index": 1, "delta": delta} for delta in pieces),
            {"type": "content_block_stop", "index": 1},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
                "usage": usage,
            },
            {"type": "message_stop"},
        ]
        assert parts(sent) == ([(("event", one["type"]), one) for one in wanted] if streams else [])
        content = [{"type": "text", "text": "A"}, call | {"input": {"a": 1}}]
        assert reply.whole() == begun | {"content": content, "stop_reason": "max_tokens", "usage": usage}
        error = {"type": "error", "error": {"type": "overloaded_error", "message": "away"}}
        assert parts(reply.failed(Unavailable("away"))) == [(("event", "error"), error)]
        assert reply.ended(None) == b""


def test_the_chunks_of_a_chat() -> None:
    """The second choice's: role, text with logprobs, a call, a text that was held back, the end, the usage."""
    began = int(time.time())
    chunks, choice = ChatChunks("chatcmpl-1", "m", UsageIn(end=True), True, SCORES), Choice()
    sent = chunks.begun(1, choice, BEGUN)
    for piece in (TEXT, CALL[:1], [one._replace(logprob=None) for one in CALL[1:]]):
        sent += chunks.shown(1, choice, piece)
    assert chunks.shown(1, choice, [token(5, 71, Said("", ()))]) == b"", "it adds nothing"
    sent += chunks.finished(1, choice, Finished(Reason.EOS, 6, "", None, Said("held", ()), called=True))
    sent += chunks.ended((5, 6, 2))
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": ANY, "model": "m"}

    def chunk(number: str, delta: dict[str, Any], scored: Any = None, reason: str | None = None) -> Any:
        logprobs = None if scored is None else {"content": scored, "refusal": None}
        body = {"index": 1, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return ("id", number), head | {"choices": [body], "usage": None}

    begins = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    third = {"token": "D", "logprob": -2.0, "bytes": [68], "top_logprobs": []}
    counts = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    counted = head | {"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": 2}}}
    assert parts(sent) == [
        chunk("0", {"role": "assistant", "content": ""}),
        chunk("2", {"content": "A"}, SCORED),
        chunk("3", {"tool_calls": [begins]}, [third]),
        chunk("5", {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}),
        chunk("6.1", {"content": "held"}),
        chunk("6.2", {}, reason="tool_calls"),
        counted,
        "[DONE]",
    ]
    assert began <= parts(sent)[-2]["created"] <= time.time()
    for one in (*TEXT, *CALL):
        choice.add(one)
    choice.tokens += TEXT
    choice.end(Finished(Reason.LENGTH, 6, "", None, Said(" end", ())))
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "A end", "refusal": None, "tool_calls": [call]}
    logprobs = {"content": SCORED, "refusal": None}
    whole = chat_completion("chatcmpl-1", "m", [choice], usage(5, 6), SCORES)
    assert whole == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": ANY,
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "length"}],
        "usage": counts,
    }
    assert began <= whole["created"] <= time.time()
    assert chat_completion("", "", [choice], {}, None)["choices"][0]["logprobs"] is None


def test_the_chunks_of_a_completion() -> None:
    """An echo with its logprobs, and the usage so far in each chunk."""
    scores, choice = TextLogprobs(chr), Choice("P ")
    choice.input_tokens = 1
    chunks = CompletionChunks("cmpl-1", "m", UsageIn(each=True), False, scores)
    assert chunks.begun(1, choice, BEGUN) == b"", "the echo waits for its logprobs"
    prompted = Prompted([PromptToken(80, "P ", None, ())])
    tokens = [one._replace(text=text) for one, text in zip(TEXT, ("A", "c"), strict=True)]
    sent = chunks.shown(1, choice, [prompted, *tokens])
    sent += chunks.finished(1, choice, Finished(Reason.STOP, 3, " held", None))
    sent += chunks.ended(None)
    head = {"id": "cmpl-1", "object": "text_completion", "created": ANY, "model": "m"}

    def chunk(text: str, logprobs: Any, shown: int, reason: str | None = None) -> dict[str, Any]:
        body = {"index": 1, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return head | {"choices": [body], "usage": usage(1, shown)}

    tops = [{"B": -1.0, "A": -0.5}, {"C": -9999.0}]
    of_prompt = {"tokens": ["P"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    of_tokens = {
        "tokens": ["A", "C"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": tops,
        "text_offset": [2, 3],
    }
    assert parts(sent) == [
        chunk("P ", of_prompt, 0),
        chunk("Ac", of_tokens, 2),
        chunk(" held", None, 2, "stop"),
        "[DONE]",
    ]
    plain = CompletionChunks("cmpl-1", "m", UsageIn(), True, None)
    assert parts(plain.begun(0, Choice("P "), BEGUN))[0][1]["choices"][0]["text"] == "P "
    assert plain.begun(0, Choice(), BEGUN) == b""
    for one in tokens:
        choice.add(one._replace(said=None))
    choice.tokens += [*prompted.tokens, *tokens]
    choice.end(Finished(Reason.LENGTH, 2, "", None))
    logprobs = {
        "tokens": ["P", "A", "C"],
        "token_logprobs": [None, -0.5, -9999.0],
        "top_logprobs": [None, *tops],
        "text_offset": [0, 2, 3],
    }
    assert completion("cmpl-1", "m", [choice], usage(1, 2), scores) == head | {
        "choices": [{"index": 0, "text": "P Ac", "logprobs": logprobs, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }
    assert completion("", "", [choice], {}, None)["choices"][0]["logprobs"] is None


def lines_of(reply: Lines) -> list[Any]:
    """The lines of an answer, a text and a call, that was cut."""
    assert reply.begun(0, Choice(), BEGUN) == b""
    end = Finished(Reason.LENGTH, 5, " end", None, Said(" end", ()))
    sent = reply.shown(0, Choice(), [*TEXT, *CALL]) + reply.finished(0, Choice(), end)
    assert reply.waiting() == reply.ended(None) == b""
    return [json.loads(line) for line in sent.splitlines()]


def test_the_lines_of_ollama() -> None:
    """A piece with its logprobs, a whole call, the end with its counts; and the one object."""
    head = {"model": "m", "created_at": ANY}
    scored = [*SCORED, *({"token": one, "logprob": -2.0, "bytes": [ord(one)], "top_logprobs": []} for one in "DEF")]
    call = {"id": "call_1", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}
    last = {
        "done": True,
        "done_reason": "length",
        "total_duration": ANY,
        "load_duration": 0,
        "prompt_eval_count": 5,
        "prompt_eval_duration": ANY,
        "eval_count": 5,
        "eval_duration": ANY,
    }

    def line(message: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {**head, "message": {"role": "assistant", "content": "", **message}, "done": False, **more}

    texts = [{"content": "A"}, *[{}] * 4]
    assert lines_of(ChatLines("m", True, SCORES)) == [
        *(line(message, logprobs=[one]) for message, one in zip(texts, scored, strict=True)),
        line({"content": " end"}),
        line({"tool_calls": [call]}),
        line({}, **last),
    ]
    reply = ChatLines("m", False, SCORES)
    assert lines_of(reply) == []
    whole = reply.whole()
    assert whole == line({"content": "A end", "tool_calls": [call]}, logprobs=scored, **last)
    assert whole["created_at"].endswith("Z")
    fresh = GeneratedLines("m", True)
    assert json.loads(fresh.waiting()) == {**head, "response": "", "done": False}
    assert fresh.at_once("load") == {**head, "response": "", "done": True, "done_reason": "load"}
    assert json.loads(fresh.failed(Unavailable("away"))) == {"error": "away"}
    assert json.loads(fresh.shown(0, Choice(), TEXT)) == {**head, "response": "A", "done": False}
