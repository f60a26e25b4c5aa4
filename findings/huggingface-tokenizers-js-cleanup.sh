#!/bin/sh
# @huggingface/tokenizers 0.2.0: a model's `git add .` is decoded to `git add.`, if transformers 5 has saved the tokenizer.
#
# Guess before: the same two files give the same text in Python and in JavaScript. `clean_up_tokenization_spaces` takes
# the space before `.`, `,`, `?`, `!`, `'s` and others out of a decoded text. Tokenizers of byte level BPE have all
# spaces in their tokens; transformers 5 leaves the text alone, and writes no such setting into tokenizer_config.json.
# Where the setting is missing, the library of JavaScript cleans up: commands, code and tables lose spaces, while a server
# of Python has streamed the same tokens with them. `"clean_up_tokenization_spaces": false` in the file, or in the call of
# `decode`, gives the text as it was.
#
# Seen with: @huggingface/tokenizers 0.2.0, Node 20.20, transformers 5.23.0, tokenizers 0.23.3, Python 3.11. Prints the
# texts, and fails when both decode alike.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" @huggingface/tokenizers@0.2.0
cat > "$folder/decode.mjs" <<'NODE'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";
const [, , folder, ids] = process.argv;
const read = (name) => JSON.parse(readFileSync(`${folder}/${name}`, "utf8"));
const tokenizer = new Tokenizer(read("tokenizer.json"), read("tokenizer_config.json"));
const whole = (each, options) => each.map((some) => tokenizer.decode(some, options));
const all = JSON.parse(ids);
console.log(JSON.stringify([whole(all), whole(all, { clean_up_tokenization_spaces: false })]));
NODE
cat > "$folder/both.py" <<'PYTHON'
import json
import subprocess
import sys

import tokenizers
from transformers import PreTrainedTokenizerFast

texts = ["git add . && git commit", "x = [1 , 2] ... and 's'", "he said : no !"]
vocabulary = {letter: id for id, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
bytes = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bytes.decoder = tokenizers.decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes)
tokenizer.save_pretrained(sys.argv[2])
with open(f"{sys.argv[2]}/tokenizer_config.json") as file:
    assert "clean_up_tokenization_spaces" not in json.load(file)

ids = [tokenizer.encode(text) for text in texts]
command = ["node", sys.argv[1], sys.argv[2], json.dumps(ids)]
found, as_it_was = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
for text, some, javascript in zip(texts, ids, found, strict=True):
    print(f"Python {tokenizer.decode(some)!r}; JavaScript {javascript!r}")
    assert tokenizer.decode(some) == text
assert found == ["git add. && git commit", "x = [1, 2]... and's'", "he said : no!"]
assert as_it_was == texts
PYTHON
"$folder/env/bin/python" "$folder/both.py" "$folder/decode.mjs" "$folder/tokenizer"
