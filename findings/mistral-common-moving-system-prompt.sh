#!/bin/sh
# mistral-common 1.13.1: with a system prompt, no prompt of versions 2 and 3 begins as the one of the turn before did.
#
# Guess before: the system prompt stands first, and each turn's prompt goes on where the one before has ended, so that
# a server which keeps keys and values by prefix computes only what is new. Versions 1 and 7 are so. In versions 2 and
# 3 (by its own table those of Mixtral 8x22B, Nemo and Ministral 8B) the system prompt is put before the last message
# of the user, wherever that is: the next turn has it somewhere else, and what the two have in common ends behind the
# first [INST]. Without a system prompt all of them go on.
#
# Seen with: mistral-common 1.13.1 and the tokenizers in it, sentencepiece 0.2.3, Python 3.11. Prints the prompts of
# two turns and how many tokens they have in common, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check mistral-common==1.13.1 sentencepiece==0.2.3
"$folder/env/bin/python" - <<'PYTHON'
from itertools import takewhile

from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

TALK = [UserMessage(content="one"), AssistantMessage(content="two"), UserMessage(content="three")]
TOKENIZERS = {
    "1": MistralTokenizer.v1(),
    "2": MistralTokenizer.v2(),
    "3": MistralTokenizer.v3(),
    "3, tekken": MistralTokenizer.v3(is_tekken=True),
    "7": MistralTokenizer.v7(),
}


def goes_on(version, before):
    """Whether the second turn's prompt begins with all of the first turn's."""
    requests = [ChatCompletionRequest(messages=before + talk) for talk in (TALK[:1], TALK)]
    first, second = (TOKENIZERS[version].encode_chat_completion(request) for request in requests)
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first.tokens, second.tokens))))
    print(f"version {version}: {common} of {len(first.tokens)} tokens in common")
    print(f"    {first.text!r}\n    {second.text!r}")
    return common == len(first.tokens)


for version in TOKENIZERS:
    assert goes_on(version, [])
    assert goes_on(version, [SystemMessage(content="Be kind.")]) == (version in ("1", "7"))
PYTHON
