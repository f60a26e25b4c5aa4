"""Detokenization and stop strings: the pieces make up the whole text, and no piece holds half a character."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from endpoint.harness import VOCABULARY, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from orca_common.errors import FailedPrecondition, Internal
from orca_endpoint.text.vocabulary import WINDOW, StopMatcher, TextStream, Vocabulary, WindowDetokenizer

ROOT = Path(__file__).parents[2]
TOKEN_IDS = st.lists(st.integers(0, VOCABULARY + 3), max_size=80)  # some are beyond the tokenizer's vocabulary
TEXTS = st.text(alphabet="ab the pool é東😀\n", max_size=60)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("text") / "tokenizer.json"
    tokenizer.save(str(path))
    return Vocabulary(path)


@settings(max_examples=examples(300))
@given(ids=TOKEN_IDS)
def test_pieces_make_up_the_decoded_text(vocabulary: Vocabulary, tokenizer: Tokenizer, ids: list[int]) -> None:
    """Any tokens, even if they are no UTF-8 together, give the same text as decoding them at once."""
    stream = TextStream(vocabulary, ())
    pieces = [stream.push(i)[0] for i in ids] + [stream.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=examples(200))
@given(text=TEXTS)
def test_no_piece_holds_half_a_character(vocabulary: Vocabulary, text: str) -> None:
    stream = TextStream(vocabulary, ())
    pieces = [stream.push(i)[0] for i in vocabulary.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.flush() == ""


@settings(max_examples=examples(200))
@given(text=TEXTS)
def test_the_window_gives_the_same(vocabulary: Vocabulary, text: str) -> None:
    """The detokenizer for tokenizers that are not byte-level."""
    window = WindowDetokenizer(vocabulary.decode)
    pieces = [window.push(i) for i in vocabulary.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + window.flush() == text


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    """Llama 2's kind: a space is part of a token, bytes are tokens of their own, the first space is taken away."""
    names = ["<unk>", "▁Hello", "▁world", "!", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)  # type: ignore[arg-type]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(tmp_path / "tokenizer.json")
    stream = TextStream(vocabulary, ())
    assert isinstance(vocabulary.detokenizer(), WindowDetokenizer)
    ids = [1, 2, *(5 + byte for byte in "é😀".encode()), 3]
    pieces = [stream.push(i)[0] for i in ids]
    assert pieces == ["Hello", " world", "", "é", "", "", "", "😀", "!"]
    assert stream.flush() == ""
    stream = TextStream(vocabulary, ())
    ids = [1, *(5 + byte for byte in "😀".encode() + b"\xc3"), 3, *(5 + byte for byte in "😺".encode() + b"\xf0")]
    pieces = [stream.push(i)[0] for i in ids]  # the decoder makes a run of bytes text as a whole, or all of it U+FFFD
    assert "".join(pieces) == "Hello😀\ufffd!😺"
    assert stream.flush() == "\ufffd"


def test_the_first_space_of_a_text_that_follows_another(tmp_path: Path) -> None:
    """The decoder takes the first space of a text away: not that of an answer, whose text is the whole's without the
    prompt's, as with transformers. A stop string that begins with a space is found at once."""
    names = ["<unk>", "<s>", "▁Orca", "▁all", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)  # type: ignore[arg-type]
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary, first = Vocabulary(tmp_path / "tokenizer.json"), 4
    for before, answer in (
        ([1, 2], [3, 3]),
        ([2] * 40, [3]),
        ([1], [3, 3]),
        ([], [3, 3]),
        ([2, first + 0xC3], [first + 0xA9, 3]),  # a character that begins in the prompt
    ):
        stream = TextStream(vocabulary, (), before=before)
        text = "".join([stream.push(i)[0] for i in answer]) + stream.flush()
        if before[-1:] != [first + 0xC3]:
            assert tokenizer.decode(before) + text == tokenizer.decode([*before, *answer])
    stream = TextStream(vocabulary, [" all"], before=[1, 2])
    assert stream.push(3) == ("", True)


SENTENCEPIECE = ["the pool", "  the pool", " the", "東京 😀 the é", "😺😺", "naïve\n\n the", "the</s>pool", "a\u0000b"]


@pytest.mark.parametrize("text", SENTENCEPIECE)
def test_a_sentencepiece_text_comes_as_it_went(tmp_path: Path, text: str) -> None:
    """With merges, special tokens, a space put before the text, and bytes for all that the vocabulary lacks."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "t", "h", "e", "p", "o", "▁t", "▁th", "▁the", "▁p", "▁▁", "é", "東"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "p"), ("▁", "▁")]
    ids = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)  # type: ignore[arg-type]
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(tmp_path / "tokenizer.json")
    stream, tokens = TextStream(vocabulary, ()), vocabulary.encode(text, special=False)
    pieces = [stream.push(i)[0] for i in tokens] + [stream.flush()]
    assert "".join(pieces) == tokenizer.decode(tokens) == text.replace("</s>", " ")
    assert "\ufffd" not in "".join(pieces)
    assert (vocabulary.token_bytes(ids["<0xE6>"]), vocabulary.spell(ids["<0xE6>"])) == (b"\xe6", "bytes:\\xe6")
    assert vocabulary.token_bytes(ids["▁the"]) == b" the"
    assert vocabulary.token_bytes(ids["</s>"]) == b"</s>"


def test_a_long_run_of_broken_bytes_is_given_out(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """The window is bounded: neither a model that never completes a character nor a long text costs more and more per
    token."""
    sizes: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return vocabulary.decode(ids)

    byte = tokenizer.token_to_id("\u0122")  # 0x80 in the byte alphabet: never a character's first byte
    assert byte is not None
    window = WindowDetokenizer(decode)
    pieces = [window.push(byte) for _ in range(200)]
    assert sum(map(len, pieces)) > 150
    for token in vocabulary.encode("the pool holds every request " * 20):
        window.push(token)
    assert max(sizes) <= 2 * WINDOW


def test_truncation_in_the_file_is_not_obeyed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = json.loads(tokenizer.to_str())
    text["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    assert len(Vocabulary(tmp_path / "tokenizer.json").encode("the request pool holds every request")) > 2


def test_no_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FailedPrecondition, match="is not a tokenizer"):
        Vocabulary(tmp_path / "tokenizer.json")


def test_the_tokenizer_of_another_model(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """It was served, and each prompt failed."""
    largest = max(tokenizer.get_vocab(with_added_tokens=False).values())
    vocabulary.check_fits(largest + 1)
    with pytest.raises(FailedPrecondition, match=f"has a token {largest}, and the model {largest} tokens"):
        vocabulary.check_fits(largest)


def test_tokens_that_were_added_may_lie_beyond(tmp_path: Path) -> None:
    """As the token for images in Gemma 3's, which its models of texts do not have."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    Vocabulary(tmp_path / "tokenizer.json").check_fits(VOCABULARY)


def cut(text: str, stops: list[str]) -> str | None:
    """By definition: the text before the stop string that is complete first; of several at one place, the longest."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return None


@settings(max_examples=examples(500))
@given(
    text=st.text(alphabet="ab", max_size=40),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4),
    borders=st.lists(st.integers(0, 40), max_size=12),
)
def test_stop_strings_by_definition(text: str, stops: list[str], borders: list[int]) -> None:
    """The matcher finds what the definition says, wherever the borders of pieces lie, and takes no text back."""
    at = [0, *sorted(b for b in borders if b < len(text)), len(text)]
    matcher, given_out, found = StopMatcher(stops), "", False
    for start, end in pairwise(at):
        piece, found = matcher.push(text[start:end])
        given_out += piece
        if found:
            break
        held = text[len(given_out) : end]
        assert not held or any(stop.startswith(held) for stop in stops), "only a stop string's beginning is held back"
    expected = cut(text, stops)
    assert found == (expected is not None)
    assert given_out + ("" if found else matcher.flush()) == (text if expected is None else expected)


def test_a_stop_string_over_tokens(vocabulary: Vocabulary) -> None:
    stream = TextStream(vocabulary, ["東京"])
    given_out, stopped = "", False
    ids = vocabulary.encode("the pool 東京 and more")
    left = list(ids)
    while left and not stopped:
        piece, stopped = stream.push(left.pop(0))
        given_out += piece
    assert stopped
    assert left
    assert given_out == "the pool "


def test_byte_level_with_added_tokens(tmp_path: Path) -> None:
    """Added tokens are spelled as themselves; special tokens have no text."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool>", "naïve café"])
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(tmp_path / "tokenizer.json")
    ids = vocabulary.encode("<|im_start|>the <tool> naïve café 😀")
    stream = TextStream(vocabulary, ())
    text = "".join(stream.push(i)[0] for i in ids) + stream.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert "im_start" not in text
    assert "<tool>" in text


def test_the_end_token_that_a_tokenizer_puts_behind_each_text(tmp_path: Path) -> None:
    """T5's does, and an encoder expects it. `special` false leaves it out."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581the", -1.0), ("\u2581pool", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(tmp_path / "tokenizer.json")
    assert vocabulary.encode("the pool") == [3, 4, 1]
    assert vocabulary.encode("the pool", special=False) == [3, 4]
    assert vocabulary.decode([3, 4, 1]) == "the pool"


@pytest.fixture(scope="module")
def t5s_form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer in the form of T5's: pieces with likelihoods, learned from our README, and 100 sentinels.

    (No package of a registry was found that ships T5's own.)
    """
    tokenizer = Tokenizer(models.Unigram())
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), spaces])  # type: ignore[arg-type]
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(words), decoders.Metaspace()  # type: ignore[arg-type]
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator((ROOT / "README.md").read_text().splitlines(), trainer)
    tokenizer.add_special_tokens([f"<extra_id_{n}>" for n in reversed(range(100))])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    path = tmp_path_factory.mktemp("t5") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


UNIGRAMS = {  # texts, and as they come back: T5's vocabulary has no bytes, and one space stands for several
    "the pool": "the pool",
    "  two  spaces": "two spaces",
    "engine <extra_id_0> pool": "engine pool",
    "ﬁne ①": "fine 1",
    "the 東京 pool": "the pool",
    "the 😀 pool": "the pool",
    "a\tb\n\nc": "a b c",
}


@pytest.mark.parametrize("text", UNIGRAMS)
def test_a_text_in_t5s_form(t5s_form: Path, text: str) -> None:
    vocabulary, tokenizer = Vocabulary(t5s_form), Tokenizer.from_file(str(t5s_form))
    ids = vocabulary.encode(text)
    assert ids[-1] == 1
    assert ids == tokenizer.encode(text).ids
    stream = TextStream(vocabulary, ())
    streamed = "".join(stream.push(i)[0] for i in ids) + stream.flush()
    assert streamed == tokenizer.decode(ids)
    assert " ".join(streamed.split()) == UNIGRAMS[text]


def test_random_streams_in_t5s_form(t5s_form: Path) -> None:
    vocabulary, tokenizer = Vocabulary(t5s_form), Tokenizer.from_file(str(t5s_form))
    draw = random.Random(5)
    for _ in range(500):
        ids = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(draw.randint(1, 30))]
        stream = TextStream(vocabulary, ())
        assert "".join(stream.push(i)[0] for i in ids) + stream.flush() == tokenizer.decode(ids)


def test_a_panic_of_the_tokenizer_library_is_an_error(tmp_path: Path) -> None:
    """Its `Strip` panics where a token is shorter than what it strips. Before, the caller got no status."""
    path = tmp_path / "tokenizer.json"
    tokenizer = make_tokenizer()
    tokenizer.decoder = decoders.Strip("t", 0, 5)
    tokenizer.save(str(path))
    stream = Vocabulary(path).detokenizer()
    (token,) = Vocabulary(path).encode("t")[:1]
    with pytest.raises(Internal) as raised:
        stream.push(token)
    said = str(raised.value)
    assert said == "the tokenizer library failed to decode tokens (PanicException)", "its own words may quote a prompt"
