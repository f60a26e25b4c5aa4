#!/bin/sh
# mistral-common 1.13.1: a tool answers "0.10", and the model of version 3 reads 0.1.
#
# Guess before: a tool's answer is text, and goes into the prompt as it is. For version 3 (by its own table that of
# Mixtral 8x22B, Nemo and Ministral 8B) the text is read as JSON, where it happens to be JSON, and written anew: a
# price loses its last digit, a number of twenty digits becomes one of seventeen with an exponent, and of two equal
# keys the first one is gone. 007 is no JSON and stays. Version 7 takes all as they are.
#
# Seen with: mistral-common 1.13.1 and the tokenizers in it, sentencepiece 0.2.3, Python 3.11. Prints what stands in
# the prompts, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check mistral-common==1.13.1 sentencepiece==0.2.3
"$folder/env/bin/python" - <<'PYTHON'
from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

CALL = ToolCall(id="a1b2c3d4e", function=FunctionCall(name="price", arguments="{}"))
ANSWERS = {
    "0.10": "0.1",
    "12345678901234567890.0": "1.2345678901234567e+19",
    '{"a": 1, "a": 2}': '{"a": 2}',
    "007": '"007"',
}


def prompt(tokenizer, answer):
    said = ToolMessage(content=answer, tool_call_id=CALL.id)
    messages = [UserMessage(content="how much"), AssistantMessage(tool_calls=[CALL]), said]
    text = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages)).text
    return text.replace("▁", " ").partition("[TOOL_RESULTS]")[2].removesuffix("[/TOOL_RESULTS]").strip()


for answer, rewritten in ANSWERS.items():
    third, seventh = prompt(MistralTokenizer.v3(is_tekken=True), answer), prompt(MistralTokenizer.v7(), answer)
    print(f"{answer}: version 3 {third}, version 7 {seventh}")
    assert third == f'{{"content": {rewritten}, "call_id": "{CALL.id}"}}'
    assert seventh == f"{CALL.id}[TOOL_CONTENT] {answer}"
PYTHON
