#!/bin/sh
# tokenizers 0.23.3: a limit of one token truncates nothing, where two special tokens are added.
#
# Guess before: a limit below what the template adds is an error, or leaves the special tokens alone. With two of them
# the limits 4, 3 and 2 leave two, one and no token of the text. At 1 and 0 the limit is dropped, and the whole text
# comes back: 1,002 tokens. So a limit that is computed from what is left is no bound any more where little is left.
# Without special tokens 1 is kept to, and 0 leaves nothing.
#
# Seen with: tokenizers 0.23.3, Python 3.11. Prints the counts of tokens by limit, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
"$folder/env/bin/python" - <<'PYTHON'
from tokenizers import Tokenizer, models, pre_tokenizers, processors

tokenizer = Tokenizer(models.WordLevel({"a": 0, "[CLS]": 1, "[SEP]": 2}))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
)


def counts(limit):
    """Tokens of a text of 1,000 words: with special tokens, and without."""
    tokenizer.enable_truncation(limit)
    found = [len(tokenizer.encode("a " * 1000, add_special_tokens=special)) for special in (True, False)]
    print(f"at most {limit}: {found[0]} with special tokens, {found[1]} without")
    return found


assert counts(4) == [4, 4]
assert counts(3) == [3, 3]
assert counts(2) == [2, 2]
assert counts(1) == [1002, 1]
assert counts(0) == [1002, 0]
PYTHON
