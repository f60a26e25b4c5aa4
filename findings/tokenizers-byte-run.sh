#!/bin/sh
# tokenizers 0.23.3: one byte that is no UTF-8 spoils the bytes beside it: a line break decodes to U+FFFD.
#
# A vocabulary of SentencePiece spells characters that it lacks by tokens of single bytes, such as <0x0A>. The decoder
# `ByteFallback` converts a run of them as a whole or not at all: the euro sign before an unfinished character is four
# U+FFFD, and a line break beside one is U+FFFD. SentencePiece itself decodes the same tokens to the euro sign and one U+FFFD. So
# text that a server has sent changes when the next token comes; `DecodeStream`, which takes nothing back, says something
# else than `decode`.
#
# Seen with: tokenizers 0.23.3, sentencepiece 0.2.3, Python 3.11. Prints what is decoded, and fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3 sentencepiece==0.2.3
"$folder/env/bin/python" - <<'PYTHON'
import io

import sentencepiece
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

trained = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["a b", "b a"] * 9),
    model_writer=trained,
    model_type="bpe",
    vocab_size=262,
    byte_fallback=True,
    minloglevel=2,
)
theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
pieces = [theirs.id_to_piece(i) for i in range(len(theirs))]
ours = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
ours.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])


def decoded(text):
    """The text of tokens for its bytes: by SentencePiece, by `decode`, and by a stream."""
    ids, stream = [theirs.piece_to_id(f"<0x{byte:02X}>") for byte in text], DecodeStream()
    streamed = "".join(piece for i in ids if (piece := stream.step(ours, i)) is not None)
    said = theirs.decode(ids), ours.decode(ids), streamed
    print(f"{text!s:22} SentencePiece {said[0]!r:6} tokenizers {said[1]!r:8} as a stream {said[2]!r}")
    return said


BROKEN, EURO = "\ufffd", "€".encode()
assert decoded(EURO + b"\n") == ("€\n", "€\n", "€\n")
assert decoded(b"\n\xc3") == ("\n" + BROKEN, BROKEN * 2, "\n")  # c3 begins a character
assert decoded(EURO + b"\xc3") == ("€" + BROKEN, BROKEN * 4, "€")
assert decoded(b"\xc3\n") == (BROKEN + "\n", BROKEN * 2, "")
PYTHON
