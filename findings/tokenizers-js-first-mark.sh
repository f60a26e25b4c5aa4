#!/bin/sh
# Four tokenizers of JavaScript: a text with U+FEFF has other tokens than in Rust and Python, other ones in each of them.
#
# Guess before: who has the same vocabulary has the same ids for any text, so that a client counts what the server counts.
# Files from Windows begin with U+FEFF, the vocabulary of GPT-4o has a token for it, and even one for `U+FEFFusing`, with
# which C# begins. gpt-tokenizer never finds these tokens: reading its own table loses the mark. ai-tokenizer leaves the
# mark out of the text. For js-tiktoken it is a space, as for JavaScript's expressions, and joins other words. The new
# @huggingface/tokenizers has the ids of the library in Rust, and loses the mark when it decodes single bytes.
#
# Seen with: gpt-tokenizer 4.0.0, ai-tokenizer 1.0.6, js-tiktoken 1.0.21, @huggingface/tokenizers 0.2.0, Node 20.20,
# bpe-openai 0.1.4, tokenizers 0.23.3, Python 3.11, Linux x86-64. Prints the ids, and fails when they change.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check bpe-openai==0.1.4 tokenizers==0.23.3
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" \
    gpt-tokenizer@4.0.0 ai-tokenizer@1.0.6 js-tiktoken@1.0.21 @huggingface/tokenizers@0.2.0
cat > "$folder/encode.mjs" <<'NODE'
import { Tokenizer as HuggingFace } from "@huggingface/tokenizers";
import { Tokenizer } from "ai-tokenizer";
import * as vocabulary from "ai-tokenizer/encoding/o200k_base";
import { encode } from "gpt-tokenizer/encoding/o200k_base";
import { getEncoding } from "js-tiktoken";
const { texts, model, bytes } = JSON.parse(process.argv[2]);
const [ai, js] = [new Tokenizer(vocabulary), getEncoding("o200k_base")];
const all = texts.map((text) => ({ gpt: encode(text), ai: ai.encode(text), js: js.encode(text) }));
console.log(JSON.stringify([all, new HuggingFace(model, {}).decode(bytes)]));
NODE
cat > "$folder/both.py" <<'PYTHON'
import json
import subprocess
import sys

import bpe_openai
import tokenizers

MARK = "\ufeff"
expected = {  # by the text: the ids of Rust, gpt-tokenizer, ai-tokenizer and js-tiktoken
    MARK + "using System;": ([9251, 1219, 26], [5416, 123, 1846, 1219, 26], [1846, 1219, 26], [9251, 1219, 26]),
    MARK + "a": ([5574, 64], [5416, 123, 64], [64], [5574, 64]),
    "x " + MARK + "a": ([87, 71280, 64], [87, 220, 5416, 123, 64], [87, 220, 64], [87, 220, 5574, 64]),
}
model = tokenizers.Tokenizer(tokenizers.models.BPE({"<0xEF>": 0, "<0xBB>": 1, "<0xBF>": 2, "a": 3}, []))
model.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
question = {"texts": list(expected), "model": json.loads(model.to_str()), "bytes": [3, 0, 1, 2, 3]}
command = ["node", sys.argv[1], json.dumps(question)]
found, decoded = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
encoding = bpe_openai.get_encoding("o200k_base")
for (text, ids), javascript in zip(expected.items(), found, strict=True):
    all = (list(encoding.encode(text)), *(javascript[name] for name in ("gpt", "ai", "js")))
    print(f"{ascii(text)}: Rust {all[0]}; gpt-tokenizer {all[1]}; ai-tokenizer {all[2]}; js-tiktoken {all[3]}")
    assert all == ids
print(f"bytes decoded: tokenizers {ascii(model.decode([3, 0, 1, 2, 3]))}, @huggingface/tokenizers {ascii(decoded)}")
assert model.decode([3, 0, 1, 2, 3]) == "a" + MARK + "a"
assert decoded == "aa"
PYTHON
"$folder/env/bin/python" "$folder/both.py" "$folder/encode.mjs"
