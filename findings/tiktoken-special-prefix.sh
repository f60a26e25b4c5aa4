#!/bin/sh
# tiktoken 0.14.0: of two special tokens that begin alike the shorter one may be taken; the order of the dict decides.
#
# Hugging Face's tokenizers take the longest of them, wherever it stands. tiktoken looks for them in the order of a hash
# map: the same tokens with the same ids, given in another order, make other ids of a text, and it is not the first one
# given that wins either. Of three such tokens the longest is never found, even if it alone is allowed: then the text
# is encoded as plain text.
#
# Seen with: tiktoken 0.14.0, tokenizers 0.23.3, Python 3.11, Linux x86-64. Prints what is taken, and fails when all orders
# take the longest.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check tiktoken==0.14.0 tokenizers==0.23.3
"$folder/env/bin/python" - <<'PYTHON'
from itertools import permutations

from tiktoken import Encoding
from tokenizers import AddedToken, Tokenizer, models

NAMES = ("<a>", "<a>x", "<a>xy")
BYTES = {bytes([byte]): byte for byte in range(256)}


def taken(order, allowed="all"):
    """What tiktoken makes of the longest name. order: of the dict; the ids are the same in all."""
    special = {name: 256 + NAMES.index(name) for name in order}
    encoding = Encoding("bytes", pat_str="(?s).", mergeable_ranks=BYTES, special_tokens=special)
    ids = encoding.encode("<a>xy", allowed_special=allowed, disallowed_special=())
    return [encoding.decode([i]) for i in ids]


found = {order: taken(order) for order in permutations(NAMES)}
for order, tokens in found.items():
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.add_tokens([AddedToken(name, special=True, normalized=False) for name in order])
    theirs = words.encode("<a>xy").tokens
    print(f"{order}: tiktoken {tokens}, tokenizers {theirs}")
    assert theirs == ["<a>xy"]
assert len({*map(tuple, found.values())}) > 1, "the order of the dict does not matter"
assert ["<a>xy"] not in found.values(), "the longest is found"

alone = [taken(order, {"<a>xy"}) for order in found]
print("with <a>xy alone allowed:", alone)
assert alone == [list("<a>xy")] * 6
PYTHON
