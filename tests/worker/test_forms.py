"""Answers that follow a form, on the rank that samples, against all strings of small languages and transformers."""

import json
import mmap
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, product
from pathlib import Path

import jsonschema
import numpy as np
import psutil
import pytest
from checkpoints import make_gpt2, make_tokenizer
from encoder_decoders import make_marian, make_t5
from properties import PART, covering, first
from reference import TIE, Reference
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from worker.driver import Sampled, TinyEngine, make_stage

from orca.v1 import worker_pb2
from orca.v1.sampling_pb2 import SamplingParams
from orca_common.forms import as_grammar
from orca_scheduler.core.core import Member
from orca_scheduler.ranks.members import increment, initiation, put_members
from orca_worker.iteration.model import Output
from orca_worker.sampling import follower
from orca_worker.sampling.follower import (
    ASK,
    BEHIND,
    LENGTH,
    NO_MORE,
    NONE,
    QUICK,
    SAID,
    Question,
    mask_bytes,
    place_of,
)
from orca_worker.sampling.forms import Answer, Form

SLOTS, BLOCK = 2048, 4
KERNELS = pytest.mark.parametrize("kernels", ["auto", "torch"])
LETTERS = "abc "


def byte_level() -> Tokenizer:
    """Letters, pairs and a triple, in GPT-2's spelling: Ġ is the space."""
    vocabulary = {piece: i for i, piece in enumerate(["a", "b", "c", "Ġ", "ab", "bc", "abc", "Ġa", "cĠ"])}
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("Ġ", "a"), ("c", "Ġ")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """The same in Llama 2's form: ▁ is the space, and a byte that no piece has is a token of its own."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "c", "▁", "ab", "bc", "abc", "▁a", "c▁"]
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("▁", "a"), ("c", "▁")]
    vocabulary = {piece: i for i, piece in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


TOKENIZERS = {"bytes": byte_level, "pieces": sentence_pieces}


def texts_of(tokenizer: Tokenizer) -> Mapping[int, bytes]:
    """The bytes of each token that is no special one."""
    found = {}
    for name, i in tokenizer.get_vocab(with_added_tokens=False).items():
        if byte := re.fullmatch("<0x(..)>", name):
            found[i] = bytes([int(byte[1], 16)])
        elif name != "<unk>":
            found[i] = name.replace("Ġ", " ").replace("▁", " ").encode()
    return found


def make_model(folder: Path, tokenizer: Tokenizer) -> tuple[Path, int]:
    """A model with this tokenizer and the id of its end-of-sequence token; two ids behind it have no text."""
    tokenizer.add_special_tokens(["</s>"])
    end = tokenizer.token_to_id("</s>")
    assert end is not None
    make_gpt2(
        folder,
        heads=2,
        layers=2,
        hidden=16,
        vocab=end + 3,
        positions=64,
        seed=7,
        eos_token_id=end,
        initializer_range=0.5,
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, end


def language(regex: str, longest: int) -> set[bytes]:
    """All strings of a language up to a length, by Python's own matcher."""
    strings = ("".join(letters) for n in range(longest + 1) for letters in product(LETTERS, repeat=n))
    return {one.encode() for one in strings if re.fullmatch(regex, one)}


SMALL = {"a{2,5}": 5, "(ab|c){1,3}": 6, "(a|bc)?( a){1,2}": 6, "[abc]{0,3}": 3, "abc( abc)?c": 8}


@KERNELS
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_greedy_answers_are_the_likeliest_of_all_allowed_tokens(tmp_path: Path, kernels: str, kind: str) -> None:
    """transformers' logits, and for each token: does any string of the language go on with it?"""
    tokenizer = TOKENIZERS[kind]()
    folder, end = make_model(tmp_path, tokenizer)
    reference, texts = Reference(folder), texts_of(tokenizer)
    engine = TinyEngine(make_stage(folder, SLOTS, BLOCK, kernels=kernels), SLOTS, BLOCK, seed=1)
    chance, checked, endings = random.Random(2), 0, set()
    for regex, longest in SMALL.items():
        strings = language(regex, longest)
        starts = {one[:n] for one in strings for n in range(len(one) + 1)}
        prompts = [[chance.randrange(end) for _ in range(chance.randint(1, 9))] for _ in range(8)]
        asked = [Sampled(prompt, 10, {"grammar": as_grammar("regex", regex)}) for prompt in prompts]
        engine.run([*asked, Sampled([1, 2], 10)])
        for request in asked:
            said, tokens = b"", []
            while not tokens or tokens[-1] != end:
                made = request.made[len(tokens)]
                allowed = [i for i, text in texts.items() if said + text in starts] + [end] * (said in strings)
                assert made in allowed, (regex, said)
                following = {one[len(said)] for one in starts if one.startswith(said) and len(one) > len(said)}
                if len(following) + (said in strings) > 1:  # otherwise llguidance spells it as the tokenizer would
                    logits = reference.logprobs(request.prompt + tokens)[-1]
                    best, *rest = sorted(allowed, key=lambda i: -float(logits[i]))
                    if rest and float(logits[best] - logits[rest[0]]) < TIE:
                        break
                    assert made == best, (regex, request.prompt, said)
                    checked += 1
                tokens.append(made)
                said += texts.get(made, b"")
            endings.add(said)
    assert checked > 40
    assert len(endings) > 5, "answers of several kinds"


def json_model(folder: Path) -> Path:
    return make_gpt2(
        folder,
        heads=2,
        layers=2,
        hidden=16,
        vocab=259,
        positions=128,
        seed=3,
        tokenizer=True,
        special=["</s>"],
        eos_token_id=256,
    )


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 4}, "b": {"enum": [1, 22, 333]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = [("json_schema", json.dumps(SCHEMA)), ("regex", "(ab|cd){2,5}[0-9]{3}"), ("grammar", 'start: "x" | "y" start')]


def some(count: int = 12) -> list[Sampled]:
    """Requests with and without a form, drawn and greedy."""
    grammars = [*(as_grammar(kind, text) for kind, text in FORMS), ""]
    return [
        Sampled(
            [n, 7, n * n % 200],
            50,
            {"grammar": grammars[n % 4], "repetition_penalty": 1.1 if n % 5 == 0 else 0}
            | ({"temperature": 1.5, "seed": n, "top_p": 0.9} if n % 3 else {}),
        )
        for n in range(count)
    ]


@KERNELS
def test_the_same_tokens_alone_in_any_batch_and_after_a_recovery(tmp_path: Path, kernels: str) -> None:
    folder = json_model(tmp_path)

    def engine(seed: int) -> TinyEngine:
        return TinyEngine(make_stage(folder, SLOTS, BLOCK, kernels=kernels), SLOTS, BLOCK, seed=seed)

    together = some()
    engine(1).run(together)
    alone = engine(2)
    for request, other in zip(together, some(), strict=True):
        alone.run([other], max_batch=1)
        assert other.made == request.made
    for cut in first(1, [13, 1, 31]):
        again = [Sampled(one.prompt, 50 - cut, one.sampling) for one in together]
        for one, request in zip(again, together, strict=True):
            one.made = request.made[:cut]
            one.new_tokens = 50
        engine(cut).run(again)
        assert [one.made for one in again] == [one.made for one in together]
    answers = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for request, form in zip(together, [*FORMS, None] * 3, strict=True):
        if form is not None and 256 in request.made:
            said = answers.decode(request.made[: request.made.index(256)])
            if form[0] == "json_schema":
                jsonschema.validate(json.loads(said), SCHEMA)
            else:
                assert re.fullmatch("y*x" if form[0] == "grammar" else form[1], said)
    assert all(256 in request.made for n, request in enumerate(together) if n % 4 in (0, 1))


def test_an_answer_that_cannot_go_on_ends_alone(tmp_path: Path) -> None:
    """The vocabulary has no é: after "ab" no token can follow. The others of its batch notice nothing."""
    folder, _ = make_model(tmp_path, byte_level())
    engine = TinyEngine(make_stage(folder, SLOTS, BLOCK), SLOTS, BLOCK)
    without = [Sampled([1, 2, 3], 8), Sampled([2], 8, {"grammar": as_grammar("regex", "[abc]{3,20}")})]
    engine.run(without)
    stuck = Sampled([3], 8, {"grammar": as_grammar("regex", "abé")})
    others = [Sampled([1, 2, 3], 8), Sampled([2], 8, {"grammar": as_grammar("regex", "[abc]{3,20}")})]
    engine.run([stuck, *others])
    assert stuck.stuck
    assert [one.made for one in others] == [one.made for one in without]
    assert not any(one.stuck for one in others)


def test_a_form_that_does_not_compile_ends_its_request_alone(tmp_path: Path) -> None:
    """As of an endpoint with another llguidance."""
    engine = TinyEngine(make_stage(json_model(tmp_path), SLOTS, BLOCK), SLOTS, BLOCK)
    wrong, fine = Sampled([1], 3, {"grammar": "no grammar"}), Sampled([1], 3, {"grammar": as_grammar("regex", "abc")})
    engine.run([wrong, fine])
    assert wrong.stuck
    assert not fine.stuck


def ambiguous(rules: int, letters: str) -> str:
    """A legal grammar whose steps take longer with each token behind its x. Its y is easy."""
    names = [f"n{n}" for n in range(rules)]
    lines = ['start: "x" s | "y" /[a-c]{2,6}/', "s: " + " | ".join(names)]
    lines += [f"n{n}: s s | s n{(n + 1) % rules} | n{n} s | /[{letters}]/" for n in range(rules)]
    return "\n".join(lines)


SLOW = as_grammar("grammar", ambiguous(20, "a"))  # 20 ms for the eleventh token
ENDLESS = as_grammar("grammar", ambiguous(150, "a-z"))  # more than half a second for the second one


def begins_with(letter: str, folder: Path) -> dict[int, float]:
    """A bias by which an answer to `ambiguous` begins so."""
    return dict.fromkeys(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(letter).ids, 90.0)


def late_every_other_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mask is there the second time that it is asked for."""
    allowed, asked = Answer.allowed, set[tuple[int, int]]()

    def late(answer: Answer) -> np.ndarray | None:
        mask, place = allowed(answer), (id(answer), len(answer.tokens))
        if mask is None or place in asked:
            return mask
        asked.add(place)
        answer._waits = True
        return None

    monkeypatch.setattr(Answer, "allowed", late)


def encoder_decoder(folder: Path, make: Callable[..., Path]) -> Path:
    make(folder, seed=5, vocab_size=259, eos_token_id=256)
    make_tokenizer(["</s>"]).save(str(folder / "tokenizer.json"))
    return folder


def prefix_lm(folder: Path) -> Path:
    config = json_model(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"orca_prefix_lm": True}))
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {
    "decoder": json_model,
    "prefix LM": prefix_lm,
    "t5": partial(encoder_decoder, make=make_t5),
    "marian": partial(encoder_decoder, make=make_marian),
}


def guesses(known: list[Sampled], chance: random.Random) -> Callable[[Sampled], list[int]]:
    """Drafts of which each is right with a probability of four fifths, up to ten; wrong ones are often forbidden."""
    streams = {tuple(one.prompt): one.made for one in known}

    def guess(request: Sampled) -> list[int]:
        rest = streams[tuple(request.prompt)][len(request.made) :]
        return [token if chance.random() < 0.8 else chance.randrange(259) for token in rest[: chance.randint(0, 10)]]

    return guess


@pytest.mark.parametrize(("kernels", "late"), covering(("auto", "torch"), (False, True), strength=1))
def test_drafts_change_no_token_of_a_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, late: bool
) -> None:
    """Each output of an iteration has its own mask. late: each iteration waits once for the first one."""
    folder = json_model(tmp_path)
    monkeypatch.setattr("orca_worker.sampling.forms.WAIT", 30.0)
    plain, mine = some(), some()
    slow = TinyEngine(make_stage(folder, SLOTS, BLOCK, kernels=kernels), SLOTS, BLOCK, seed=1)
    slow.run(plain)
    if late:
        late_every_other_time(monkeypatch)
    stage = make_stage(folder, SLOTS, BLOCK, kernels=kernels)
    fast = TinyEngine(stage, SLOTS, BLOCK, seed=1, guess=guesses(plain, random.Random(3)))
    fast.run(mine)
    assert [one.made for one in mine] == [one.made for one in plain]
    assert [one.stuck for one in mine] == [one.stuck for one in plain]
    if not late:
        formed = [one for one in some() if one.sampling["grammar"]]
        fast.number = 0
        fast.run(formed)
        assert fast.number < 0.7 * slow.number, "drafts of answers with forms count, too"


@pytest.mark.parametrize(("kernels", "model"), covering(("auto", "torch"), list(MODELS), strength=1))
def test_masks_that_come_late_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, model: str
) -> None:
    """A request that waits runs its last position again, and its batch goes on without it."""
    folder = MODELS[model](tmp_path / "model")
    monkeypatch.setattr("orca_worker.sampling.forms.WAIT", 30.0)

    def made() -> list[list[int]]:
        engine = TinyEngine(make_stage(folder, SLOTS, BLOCK, kernels=kernels), SLOTS, BLOCK, seed=1)
        asked = some(12 if PART == 1 else 8)
        asked[0].prompt = asked[0].prompt[:1]
        engine.run(asked)
        return [one.made for one in asked]

    in_time = made()
    late_every_other_time(monkeypatch)
    assert made() == in_time


def test_what_is_sent_ahead_of_a_mask_that_is_late_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank says so once more, and the position runs again behind it."""
    monkeypatch.setattr("orca_worker.sampling.forms.WAIT", 30.0)
    late_every_other_time(monkeypatch)
    stage = make_stage(json_model(tmp_path), SLOTS, BLOCK)
    grammar = SamplingParams(grammar=as_grammar("regex", "abcdef"))
    number = count(1)

    def run(member: Member, *admissions: worker_pb2.Admission) -> Output:
        iteration = worker_pb2.Iteration(number=next(number), admissions=admissions)
        put_members(iteration, [member])
        return stage.run(iteration)

    tokens = [5, 7]
    out = run(initiation(0, 2, range(8)), worker_pb2.Admission(row=0, claim=1, token_ids=tokens, sampling=grammar))
    for _ in range(6):
        assert (out.token_ids, out.waiting) == (tokens[-1:], [0])
        ahead = run(increment(0, len(tokens)))
        assert (ahead.token_ids, ahead.waiting) == (tokens[-1:], [0])
        again = run(increment(0, len(tokens) - 1))
        assert not again.waiting
        tokens += again.token_ids
        out = run(increment(0, len(tokens) - 1))
    said = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(tokens[2:])
    assert said == "abcdef"


def test_a_slow_form_keeps_no_other_request_waiting(tmp_path: Path) -> None:
    """Others of its batch have a token in each iteration, and it has the same ones in the end."""
    folder = json_model(tmp_path)

    def request() -> Sampled:
        return Sampled([3], 12, {"grammar": SLOW, "logit_bias": begins_with("x", folder)})

    alone, slow = request(), request()
    TinyEngine(make_stage(folder, SLOTS, BLOCK), SLOTS, BLOCK).run([alone])
    engine = TinyEngine(make_stage(folder, SLOTS, BLOCK), SLOTS, BLOCK)
    other, late = Sampled([1, 2], 1000), 0
    engine.step([slow, other], [])
    while len(slow.made) < 12:
        made = len(other.made)
        engine.step([], [slow, other])
        assert len(other.made) == made + 1
        late += id(slow) in engine.late
        if len(other.made) > 100:
            other.made = other.made[-1:]
            engine.free(other)
            other = Sampled([1, 2], 1000)
            engine.step([other], [])
    assert late > 5, "its masks take longer than an iteration"
    assert slow.made == alone.made


def test_a_form_that_takes_too_much_time_ends_its_request_alone(tmp_path: Path) -> None:
    """Its process is ended. Another answer to the same form goes on in a new one, and the others notice nothing."""
    folder = json_model(tmp_path)

    def others() -> list[Sampled]:
        same = Sampled([9], 5, {"grammar": ENDLESS, "logit_bias": begins_with("y", folder)})
        return [same, Sampled([2], 8, {"grammar": as_grammar("regex", "[abc]{3,20}")}), Sampled([1, 2, 3], 8)]

    without, beside = others(), others()
    TinyEngine(make_stage(folder, SLOTS, BLOCK), SLOTS, BLOCK).run(without)
    engine = TinyEngine(make_stage(folder, SLOTS, BLOCK), SLOTS, BLOCK)
    endless = Sampled([3], 8, {"grammar": ENDLESS, "logit_bias": begins_with("x", folder)})
    engine.run([endless, *beside])
    assert endless.stuck
    assert [one.made for one in beside] == [one.made for one in without]
    assert not any(one.stuck for one in beside)


def test_drafts_that_are_too_much_work_end_no_request(tmp_path: Path) -> None:
    """The form allows them, and its limits end the copy that follows them. The answer would never have gone there."""
    folder = json_model(tmp_path)
    rest = ambiguous(150, "a-z").replace("start:", "rest:")
    fields = {"grammar": as_grammar("grammar", 'start: "y" rest\n' + rest), "logit_bias": begins_with("y", folder)}
    alone, drafted = Sampled([9], 7, fields), Sampled([9], 7, fields)
    TinyEngine(make_stage(folder, SLOTS, BLOCK), SLOTS, BLOCK).run([alone])
    wrong = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("xaaaa").ids
    stage = make_stage(folder, SLOTS, BLOCK)
    TinyEngine(stage, SLOTS, BLOCK, guess=lambda request: wrong).run([drafted])
    assert drafted.made == alone.made
    assert not drafted.stuck
    assert stage._masks is not None
    assert not any(form.drafting for form in stage._masks._forms.values())


class Played:
    """The process of a form, of 8 tokens, which the test plays: it allows the token behind the last one."""

    def __init__(self) -> None:
        self.started = 0

    def fork(self, descriptors: Sequence[int]) -> None:
        self.started += 1
        connection, memory = descriptors
        self.connection, self._masks = socket.socket(fileno=os.dup(connection)), mmap.mmap(memory, 0)
        self._unread = bytearray()

    def questions(self) -> list[Question]:
        """The next ones, without the form."""
        while not (asked := list(follower._questions(self._unread))):
            self._unread += self.connection.recv(1 << 16)
            if self._unread.startswith(LENGTH.pack(4) + b"form"):
                del self._unread[: LENGTH.size + 4]
        return asked

    def answer(self, *questions: Question) -> None:
        """The masks that were asked for, without those behind drafts."""
        for one in questions:
            self._masks[place_of(one.slot, 0, 1)] = 1 << (one.tokens[-1] + 1)
            self.connection.sendall(SAID.pack(one.number, QUICK, 0))

    def dies(self) -> None:
        self.connection.close()


def test_a_process_that_ends_amid_drafts_ends_no_answer() -> None:
    """Both answers have their next masks, one of them in a new process, which is asked for no more drafts. Where that
    ends in a question, too, the answer that asked first ends."""
    played = Played()
    form = Form("form", 8, played.fork)
    drafted, beside = form.answer(form.collect), form.answer(form.collect)

    def ask(answer: Answer, *tokens: int, drafts: Sequence[int] = ()) -> None:
        answer.begin(np.array(tokens), np.array(drafts, np.int32))
        form.flush()

    def allowed(answer: Answer) -> list[int] | None:
        mask = answer.allowed()
        return None if mask is None else np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()

    ask(drafted, 1, drafts=[2, 3])
    ask(beside, 4)
    played.answer(*played.questions())
    assert (allowed(drafted), allowed(beside), drafted.allowed_behind(1)) == ([2], [5], None)
    ask(beside, 4, 5)
    played.dies()
    assert allowed(beside) is None
    assert (played.started, form.drafting, drafted.drafted) == (2, False, False)
    (again,) = played.questions()
    assert (again.read, again.tokens) == (0, [4, 5])
    played.answer(again)
    assert allowed(beside) == [6]
    ask(drafted, 1, 2, drafts=[3])
    (without,) = played.questions()
    assert (without.tokens, without.drafts) == ([1, 2], [])
    ask(beside, 4, 5, 6)
    played.dies()
    assert (allowed(drafted), allowed(beside)) == ([], None)
    played.answer(*played.questions())
    assert allowed(beside) == [7]
    played.dies()


@pytest.mark.parametrize(("kind", "drafts"), [(BEHIND, [3]), (NO_MORE, [])])
def test_a_process_for_which_drafts_are_too_much_work_is_asked_for_no_more(kind: int, drafts: list[int]) -> None:
    played = Played()
    form = Form("form", 8, played.fork)
    answer = form.answer(form.collect)
    answer.begin(np.array([1]), np.array([2], np.int32))
    form.flush()
    (question,) = played.questions()
    played.answer(question)
    played.connection.sendall(SAID.pack(question.number, kind, 0))
    form.collect()
    assert answer.allowed() is not None
    answer.begin(np.array([1, 2]), np.array([3], np.int32))
    form.flush()
    (question,) = played.questions()
    assert (question.tokens, question.drafts) == ([2], drafts)
    played.dies()


def test_an_answer_that_comes_in_parts_is_read_when_it_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    played = Played()
    form = Form("form", 8, played.fork)
    answer = form.answer(form.collect)
    answer.begin(np.array([1]), np.array([], np.int32))
    form.flush()
    (question,) = played.questions()
    said = SAID.pack(question.number, NONE, 8) + b"too hard"
    played.connection.sendall(said[:-1])
    assert answer.allowed() is None
    played.connection.sendall(said[-1:])
    mask = answer.allowed()
    assert mask is not None
    assert not mask.any()
    assert [vars(record)["why"] for record in caplog.records] == ["too hard"]
    played.dies()


def test_a_form_begins_again_where_its_processes_were_killed(tmp_path: Path) -> None:
    """By the kernel, where memory is short."""
    folder, grammar = json_model(tmp_path), as_grammar("regex", "[abc]{30}")
    alone, killed = (Sampled([2], 20, {"grammar": grammar, "temperature": 1.0, "seed": 4}) for _ in range(2))
    TinyEngine(make_stage(folder, SLOTS, BLOCK), SLOTS, BLOCK).run([alone])
    engine = TinyEngine(make_stage(folder, SLOTS, BLOCK), SLOTS, BLOCK)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    engine.step([killed], [])
    while len(killed.made) < 20:
        if len(killed.made) in (3, 11) and id(killed) not in engine.late:
            forks = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
            for process in forks:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            assert not psutil.wait_procs(forks, 10)[1]
        engine.step([], [killed])
    assert killed.made == alone.made
    assert not killed.stuck


def test_the_processes_of_forms_end_at_once_with_their_rank(tmp_path: Path) -> None:
    """Up to 16 are idle beside those of answers. When they took their interpreters apart, a rank that was killed was
    followed by a new one a second later."""
    folder, ends = json_model(tmp_path / "model"), tmp_path / "ends"
    ends.mkdir()
    hook = "import atexit, os, pathlib\natexit.register(lambda: (pathlib.Path({!r}) / str(os.getpid())).touch())\n"
    (tmp_path / "sitecustomize.py").write_text(hook.format(str(ends)))
    control, its_control = socket.socketpair()
    form, its_form = socket.socketpair()
    memory = os.memfd_create("masks")
    os.ftruncate(memory, place_of(1, 0, mask_bytes(259)))
    command = [sys.executable, "-m", follower.__name__, str(folder)]
    with subprocess.Popen(
        command, stdin=its_control.fileno(), env=os.environ | {"PYTHONPATH": str(tmp_path)}
    ) as process:
        socket.send_fds(control, [b"."], [its_form.fileno(), memory])
        grammar = as_grammar("regex", "[abc]{30}").encode()
        form.sendall(LENGTH.pack(len(grammar)) + grammar + ASK.pack(0, 0, 0, 0, 0))
        for theirs in (its_control, its_form):
            theirs.close()
        os.close(memory)
        assert SAID.unpack(form.recv(SAID.size)) == (0, QUICK, 0)
        of_form = psutil.Process(process.pid).children()
        for ours in (form, control):
            ours.close()
        assert not psutil.wait_procs(of_form, 10)[1]
    assert len(of_form) == 1
    assert [path.name for path in ends.iterdir()] == [str(process.pid)]
