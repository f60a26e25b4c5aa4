"""The demo model's training: what it is shown, which tokens count as repetitions, and the files that come out."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel

from orca_lab import train_demo
from orca_lab.train_demo import (
    STATEMENT,
    cut,
    encode,
    library_windows,
    loss_of,
    loss_of_repeats,
    new_model,
    prompt_windows,
    read_library,
    repeats,
    save,
    train,
    train_tokenizer,
    validate,
)

CODE = "import os\n\n\ndef walk(folder):\n    for name in os.listdir(folder):\n        yield name\n\n\n" * 120


def test_repeats_are_ends_of_runs_that_came_before() -> None:
    """Those of their own row alone; runs may overlap."""
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1], [5, 5, 5, 5, 5, 1, 2], [1, 2, 3, 4, 5, 6, 7]])
    found = repeats(ids, length=3).nonzero().tolist()
    assert found == [[0, 5], [0, 6], [1, 3], [1, 4]]


def test_everyone_may_read_its_files(tmp_path: Path) -> None:
    """A server runs as another user than the one who has trained."""
    save(
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=5)),
        Tokenizer(models.BPE()),
        tmp_path / "out",
    )
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= modes.keys()
    assert all(mode & 0o444 == 0o444 for mode in modes.values()), modes


def small(vocabulary: int = 7) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=vocabulary, n_positions=64, eos_token_id=None)
    ).eval()


def test_the_library_without_what_is_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        **{f"a{n}.py": f"a = {n}" for n in range(5)},
        **{"pkg/b.py": "b = 1", "pkg/test/c.py": "c", "_sysconfigdata_x.py": "d", "config-3/e.py": "e"},
        **{"site-packages/f.py": "f", "encodings/g.py": "g", "empty.py": " \n", "h.txt": "h"},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# \xff")
    monkeypatch.setattr(train_demo.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    kept = [*(f"a = {n}" for n in range(5)), "b = 1"]
    random.Random(3).shuffle(kept)
    assert read_library(3, 2) == (kept[2:], kept[:2])


def test_texts_are_cut_at_random_places() -> None:
    """Half of them right behind a space."""
    text = " ".join("abcdefgh" for _ in range(4000))
    pieces = cut(text, random.Random(1), 50)
    assert "".join(pieces) == text
    assert 0.4 < sum(piece.endswith(" ") for piece in pieces) / len(pieces) < 0.7
    assert 45 < len(text) / len(pieces) < 62
    assert cut("abc", random.Random(1), 10**9) == ["abc"]


def test_a_stream_has_an_end_of_text_before_each_file() -> None:
    tokenizer = train_tokenizer([CODE])
    assert tokenizer.token_to_id(train_demo.END_OF_TEXT) == train_demo.END_OF_TEXT_ID == 0
    texts = ["def a(", "import é\n"]
    whole = encode(tokenizer, texts)
    ids = [tokenizer.encode(text).ids for text in texts]
    assert whole.tolist() == [0, *ids[0], 0, *ids[1]]
    parts = encode(tokenizer, [CODE], random.Random(2))
    assert tokenizer.decode(parts.tolist()) == CODE
    assert len(parts) > len(encode(tokenizer, [CODE]))


def test_windows_of_the_library() -> None:
    """Every fourth is long; as many tokens each time, anywhere in the stream."""
    torch.manual_seed(4)
    pick = library_windows(torch.arange(5000), 2048)
    for step, shape in ((1, (8, 257)), (2, (8, 257)), (3, (8, 257)), (4, (4, 513)), (8, (4, 513))):
        windows = pick(step)
        assert windows.shape == shape
        assert torch.equal(windows, windows[:, :1] + torch.arange(shape[1]))
        assert len(set(windows[:, 0].tolist())) > 1


def test_windows_that_begin_as_a_user_does() -> None:
    tokenizer = train_tokenizer([CODE])
    windows = prompt_windows(tokenizer, [CODE], random.Random(5))(1)
    assert windows.shape == (8, 257)
    apart = list[bool]()
    for row in windows.tolist():
        text = tokenizer.decode(row)
        match = STATEMENT.match(text)
        assert match is not None
        whole, *halves = (tokenizer.encode(part).ids for part in (text, match[0], text[match.end() :]))
        assert row[:20] in (whole[:20], [*halves[0], *halves[1]][:20])
        apart.append(row[:20] != whole[:20])
    assert {*apart} == {False, True}, "the first word and its space are apart in half of them"
    begins = [tokenizer.decode(row) for row in windows.tolist()]
    assert all(STATEMENT.match(text) for text in begins)
    assert all(text in CODE for text in begins)
    assert len({text.split()[0] for text in begins}) > 1


def test_a_loss_is_the_mean_over_all_whole_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of 512 tokens, two of them at a time. The last one may have fewer rows."""
    monkeypatch.setattr(train_demo, "loss_of", lambda model, part: part[:, 0].float().mean())
    stream = torch.arange(3 * 512 + 100)
    assert validate(small(), stream, batch=2) == (0 + 512 + 1024) / 3


def test_the_loss_of_windows_is_the_cross_entropy_of_what_follows() -> None:
    model, windows = small(), torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    with torch.inference_mode():
        logits = model(windows[:, :-1]).logits.log_softmax(-1)
        wanted = -sum(float(logits[row, at, windows[row, at + 1]]) for row in range(2) for at in range(3)) / 6
        assert float(loss_of(model, windows)) == pytest.approx(wanted, rel=0.02)  # in bfloat16


def test_the_loss_of_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens that the model wrote and that end four tokens which came before: those of the prompt do not count."""
    model, asked = small(), list[tuple[list[list[int]], dict[str, Any]]]()
    written = torch.tensor([[1, 2, 1, 2, 1, 2, 1, 2, 1, 2], [5, 1, 2, 3, 4, 1, 2, 3, 4, 6]])

    def continued(of: object, prompts: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append((prompts.tolist(), options))
        return written

    monkeypatch.setattr(train_demo, "continued", continued)
    length, seed = 0, 0
    while length != 7:  # of the prompt, which holds two of the repetitions
        seed += 1
        torch.manual_seed(seed)
        length = int(torch.randint(1, 8, ()))
    torch.manual_seed(seed)
    loss = loss_of_repeats(model, written, max_prompt=7, length=3)
    assert asked == [
        (written[:, :length].tolist(), {"do_sample": False, "min_new_tokens": 3, "max_new_tokens": 3}),
    ]
    p = model(written[:, :-1]).logits.softmax(-1).detach()
    ends = [(0, at) for at in range(5, 10)] + [(1, 8)]
    wrong = [p[row, at - 1, written[row, at]] for row, at in ends if at >= length]
    assert len(wrong) > 0
    assert float(loss.detach()) == pytest.approx(-sum(float(torch.log1p(-one)) for one in wrong) / (2 * 9))


def test_the_learning_rate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It rises to the highest, and falls along a cosine to a fiftieth. Vectors do not decay."""
    model, seen, made = small(), list[Any](), list[Any]()
    scheduler = torch.optim.lr_scheduler.LambdaLR

    def keep(optimizer: torch.optim.Optimizer, scale: Callable[[int], float]) -> Any:
        made.extend((optimizer, scale))
        return scheduler(optimizer, scale)

    monkeypatch.setattr(torch.optim.lr_scheduler, "LambdaLR", keep)

    def loss(times: float) -> Callable[[GPT2LMHeadModel, torch.Tensor], torch.Tensor]:
        return lambda of, windows: times * windows.sum() * sum(p.sum() for p in of.parameters()) * 1e-6

    def after(step: int) -> None:
        seen.append((step, made[0].param_groups[0]["lr"]))

    shown = [(loss(1.0), lambda step: torch.tensor([step])), (loss(3.0), lambda step: torch.tensor([1.0]))]
    train(model, shown, 50, 0.5, after)
    optimizer, scale = made
    assert [step for step, _ in seen] == list(range(1, 51))
    assert [rate for _, rate in seen] == pytest.approx([0.5 * scale(step) for step in range(1, 51)])
    assert [scale(step) for step in (0, 1, 4, 5, 6, 28, 50)] == pytest.approx(
        [1 / 6, 2 / 6, 5 / 6, 1.0, 1.0, 0.51, 0.02]
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [{p.dim() for p in group["params"]} for group in optimizer.param_groups] == [{2}, {1}]
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("step 50/50  losses ")


def test_the_model_that_is_trained() -> None:
    model = new_model()
    assert (
        sum(p.numel() for p in model.parameters()) == 4096 * 192 + 512 * 192 + 4 * (12 * 192 * 192 + 13 * 192) + 2 * 192
    )
    assert model.lm_head.weight is model.transformer.wte.weight
    config = model.config
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.0, 0.0, 0.0)
    assert (config.n_head, config.bos_token_id, config.eos_token_id) == (6, 0, 0)
    assert model.generation_config is not None
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (0, 0)
