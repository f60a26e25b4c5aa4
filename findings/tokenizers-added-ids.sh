#!/bin/sh
# tokenizers 0.23.3: a new token gets the number of tokens as its id, even if that id is another token's; and the ids of
# added tokens in a tokenizer.json are not kept where they leave a gap.
#
# A vocabulary may leave ids out. The new token is not put above the highest one, but at the count: the two then share an id,
# and the old one decodes to the new one. Loading counts again: added tokens saved at 10 and 20 come back as 2 and 3, and
# nothing is raised, so they name other rows of the model than before.
#
# Seen with: tokenizers 0.23.3, Python 3.11. Prints the ids, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
"$folder/env/bin/python" - <<'PYTHON'
import json

from tokenizers import Tokenizer, models, pre_tokenizers

gap = Tokenizer(models.BPE({"a": 0, "b": 2}, []))
assert gap.add_tokens(["<x>"]) == 1
print("a is 0, b is 2; <x> is", gap.token_to_id("<x>"), "and b decodes to", gap.decode(gap.encode("b").ids))
assert gap.token_to_id("<x>") == gap.token_to_id("b") == 2
assert gap.decode(gap.encode("b").ids) == "<x>"

words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 3}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.add_tokens(["<x>"])
print("[UNK] is 3; <x> is", words.token_to_id("<x>"), "and an unknown word decodes to", words.decode(words.encode("c").ids))
assert words.decode(words.encode("c").ids) == "<x>"

saved = json.loads(Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).to_str())
flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
saved["added_tokens"] = [{"id": 10, "content": "<x>", **flags}, {"id": 20, "content": "<y>", **flags}]
loaded = Tokenizer.from_str(json.dumps(saved))
print("<x> 10 and <y> 20 in tokenizer.json; loaded:", loaded.token_to_id("<x>"), loaded.token_to_id("<y>"))
assert (loaded.token_to_id("<x>"), loaded.token_to_id("<y>")) == (2, 3)
assert loaded.id_to_token(10) is None
PYTHON
