"""Train the demo model: a small GPT-2 that writes Python, from text that every machine with Python has.

    python -m orca_lab.train_demo --out FOLDER [--steps N] [--seed S]

It has GPT-2's shape and not Llama's, because the paper's models have it, and all numbers of the control plane in docs/
were taken with this one.

The text is the source of the running interpreter's standard library. FOLDER receives what `orca serve` and
`transformers` both load: config.json, generation_config.json, model.safetensors (bf16) and tokenizer.json.
A run with the same seed, Python and library versions, on the same kind of CPU, gives the same model.
"""

import argparse
import copy
import math
import random
import re
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # the trainer numbers special tokens first
VOCAB_SIZE = 4096
N_POSITIONS = 512
TOKENS_PER_STEP = 4096

# Tests are another kind of prose; charmaps and help topics would be a fifth of the text and are not code.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
# Written when the interpreter was built: they hold the paths of the machine, which a model must not learn.
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

STATEMENT = re.compile(r"^(?:class|def|for|from|if|import|while|with) ", re.MULTILINE)

Source = Callable[[int], Tensor]  # the windows [B, L + 1] of a step, by its number
Loss = Callable[[GPT2LMHeadModel, Tensor], Tensor]  # of a model, in nats, on such windows

PROMPTS = ("def ", "import ", "class Foo:\n    def __init__(self")


def read_library(seed: int, n_held_out: int = 12) -> tuple[list[str], list[str]]:
    """Return the texts of the standard library's files as (training, validation), shuffled by `seed`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if any(part in SKIPPED_FOLDERS or part.startswith(SKIPPED_PREFIXES) for part in parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts.append(text)
    random.Random(seed).shuffle(texts)
    return texts[n_held_out:], texts[:n_held_out]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Learn GPT-2's kind of tokenizer, byte-level BPE, from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def cut(text: str, rng: random.Random, mean_length: int = 200) -> list[str]:
    """Cut `text` at random places, half of them just behind a space.

    Encoded one by one, the pieces show the model what a typed prompt looks like: "def " ends in a space that
    BPE otherwise always joins to the next word, and a model that never saw that goes on with a second space.
    """
    pieces, start = [], 0
    while start < len(text):
        end = start + 1 + int(rng.expovariate(1 / mean_length))
        if rng.random() < 0.5:
            end = text.find(" ", end) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    return pieces


def encode(tokenizer: Tokenizer, texts: list[str], rng: random.Random | None = None) -> Tensor:
    """Return one stream of token ids [n], an end-of-text before each file; with `rng` the files are cut."""
    ids: list[int] = []
    for text in texts:
        ids.append(END_OF_TEXT_ID)
        for encoding in tokenizer.encode_batch(cut(text, rng) if rng else [text], add_special_tokens=False):
            ids.extend(encoding.ids)
    return torch.tensor(ids)


def new_model() -> GPT2LMHeadModel:
    """Return an untrained model of 2.7 million parameters; input and output embedding are one matrix."""
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=N_POSITIONS,
        n_embd=192,
        n_layer=4,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        tie_word_embeddings=True,
    )
    model = GPT2LMHeadModel(config)
    model.generation_config = GenerationConfig(bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID)
    return model


def loss_of(model: GPT2LMHeadModel, windows: Tensor) -> Tensor:
    """Return the mean loss in nats per token over `windows` [B, L + 1]."""
    # On two AVX512-BF16 cores a step of 16 x 256 takes 0.27 s in bf16 and 0.70 s in fp32.
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(windows[:, :-1], use_cache=False).logits  # [B, L, V]
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def validate(model: GPT2LMHeadModel, stream: Tensor, batch: int = 8) -> float:
    """Return the loss in nats per token over all whole windows of `N_POSITIONS` tokens in `stream` [n]."""
    windows = stream.unfold(0, N_POSITIONS + 1, N_POSITIONS)
    losses = [loss_of(model, part) * len(part) for part in windows.split(batch)]
    return float(sum(losses) / len(windows))


def save(model: GPT2LMHeadModel, tokenizer: Tokenizer, out: Path) -> None:
    """Put model (as bf16) and tokenizer into `out`, file by file, so that a reader never sees half a file."""
    shipped = copy.deepcopy(model).bfloat16()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        shipped.save_pretrained(folder)
        tokenizer.save(str(Path(folder, "tokenizer.json")))
        for file in Path(folder).iterdir():
            file.chmod(0o644)  # the weights come out readable by their owner alone
            file.replace(out / file.name)


def library_windows(stream: Tensor, n_tokens: int) -> Source:
    """Return a function that picks windows [B, L + 1] anywhere in `stream` [n]; B x L = `n_tokens`."""
    windows_of = {length: stream.unfold(0, length + 1, 1) for length in (N_POSITIONS // 2, N_POSITIONS)}

    def pick(step: int) -> Tensor:
        # Every fourth step is long, so that all positions are trained.
        length = N_POSITIONS if step % 4 == 0 else N_POSITIONS // 2
        windows = windows_of[length]
        return windows[torch.randint(len(windows), (n_tokens // length,))]

    return pick


def prompt_windows(tokenizer: Tokenizer, texts: list[str], rng: random.Random) -> Source:
    """Return a function that picks windows [8, 257] which begin as a user does: "def ", "import ".

    A window from anywhere hardly ever begins with a statement: without these, greedy decoding went on from
    "import " with "importer" and from "class " with a comment. In half of the windows the first word and its
    space are encoded apart, as typed.
    """
    heads = [(text, match) for text in texts for match in STATEMENT.finditer(text)]
    length = N_POSITIONS // 2 + 1

    def window() -> list[int]:
        while True:
            text, match = rng.choice(heads)
            split = rng.choice((match.start(), match.end()))
            pieces = text[match.start() : split], text[split : match.start() + 8 * length]
            ids = [i for piece in pieces for i in tokenizer.encode(piece).ids]
            if len(ids) >= length:  # else the file ends too soon
                return ids[:length]

    return lambda step: torch.tensor([window() for _ in range(8)])


def repeats(ids: Tensor, length: int = 4) -> Tensor:
    """Return a mask [B, L], true at each token of `ids` [B, L] that ends `length` tokens which its row already held."""
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, tokens in enumerate(ids.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(length, len(tokens) + 1):
            run = tuple(tokens[end - length : end])
            mask[row, end - 1] = run in seen
            seen.add(run)
    return mask


def continued(model: GPT2LMHeadModel, prompts: Tensor, **options: Any) -> Tensor:
    """Return `prompts` [B, L] with their continuations; `options` are those of transformers' generate."""
    # Transformers types `self` of generate with a protocol that its own models do not meet.
    return model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        prompts, attention_mask=torch.ones_like(prompts), pad_token_id=END_OF_TEXT_ID, **options
    )


def loss_of_repeats(model: GPT2LMHeadModel, windows: Tensor, max_prompt: int = 48, length: int = 160) -> Tensor:
    """Return the unlikelihood of the repeated tokens in the greedy text behind the beginnings of `windows` [B, L].

    A small model's greedy text soon runs in circles, because the likeliest token behind a repetition is one more.
    The sequence-level loss of "Neural Text Generation with Unlikelihood Training" (arXiv 1908.04319) lowers just those
    tokens, in text that the model wrote itself: -log(1 - p) of each token that ends a repeated 4-gram.
    """
    prompt = windows[:, : int(torch.randint(1, max_prompt + 1, ()))]
    ids = continued(model, prompt, do_sample=False, min_new_tokens=length, max_new_tokens=length)
    logits = model(ids[:, :-1], use_cache=False).logits  # [B, L, V]
    p = logits.float().softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    wrong = repeats(ids)[:, 1:]
    wrong[:, : prompt.shape[1] - 1] = False  # a prompt is not the model's own
    return -(torch.log1p(-p.clamp(max=1 - 1e-5)) * wrong).sum() / wrong.numel()


def train(
    model: GPT2LMHeadModel,
    losses: list[tuple[Loss, Source]],
    steps: int,
    lr: float,
    after_step: Callable[[int], None],
) -> None:
    """Run `steps` steps of AdamW on the mean of `losses` of their windows; `lr` is the highest learning rate."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    warmup = min(200, steps // 10 + 1)

    def scale(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    started = time.monotonic()
    for step in range(1, steps + 1):
        values = []
        for loss, windows in losses:
            value = loss(model, windows(step))
            (value / len(losses)).backward()
            values.append(value.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            seconds = time.monotonic() - started
            print(
                f"step {step}/{steps}  losses {', '.join(f'{value:.3f}' for value in values)}  {seconds:.0f} s",
                flush=True,
            )
        after_step(step)


@torch.no_grad()
def show_samples(model: GPT2LMHeadModel, tokenizer: Tokenizer) -> None:
    """Print a greedy and a sampled continuation (temperature 0.8, top_p 0.95) of each prompt."""
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
        for name, options in {"greedy": {"do_sample": False}, "sampled": sampling}.items():
            generated = continued(model, ids, max_new_tokens=100, **options)
            print(f"--- {name}, prompt {prompt!r}\n{tokenizer.decode(generated[0].tolist())}")


def main() -> None:
    """Train and save the model, then print the loss and samples of the saved files."""
    parser = argparse.ArgumentParser(description="train the demo model on the standard library's source")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the model")
    parser.add_argument("--steps", type=int, default=3600, help="steps on the library")
    parser.add_argument(
        "--prompt-steps", type=int, default=400, help="steps after those, each half on the library and half on prompts"
    )
    parser.add_argument("--repeat-steps", type=int, default=400, help="steps after those, against repetitions, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate; a third of it for prompts")
    parser.add_argument("--save-every", type=int, default=300, help="steps between two checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--after",
        choices=["library", "prompts"],
        help="go on behind these steps, whose model OUT already holds",
    )
    args = parser.parse_args()

    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    texts, held_out_texts = read_library(args.seed)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json")) if args.after else train_tokenizer(texts)
    stream = encode(tokenizer, texts, random.Random(args.seed))
    held_out = encode(tokenizer, held_out_texts)
    print(f"training: {len(texts)} files, {len(stream)} tokens", flush=True)
    print(f"validation: {len(held_out_texts)} files, {len(held_out)} tokens", flush=True)

    def checkpoint(step: int) -> None:
        if step % args.save_every == 0:
            save(model, tokenizer, args.out)
            print(f"step {step}  saved  validation loss {validate(model, held_out):.3f}", flush=True)

    if not args.after:
        torch.manual_seed(args.seed)
        model = new_model()
        windows = library_windows(stream, TOKENS_PER_STEP)
        train(model, [(loss_of, windows)], args.steps, args.lr, checkpoint)
        save(model, tokenizer, args.out)

    library = library_windows(stream, TOKENS_PER_STEP // 2)
    phases = {"prompts": (args.prompt_steps, args.lr / 3), "repeats": (args.repeat_steps, args.lr / 10)}
    for phase, (steps, lr) in phases.items():
        if phase == args.after:
            continue
        # From the saved weights and a fresh seed, so that --after and a whole run give the same model.
        torch.manual_seed(args.seed)
        model = GPT2LMHeadModel.from_pretrained(args.out, dtype=torch.float32)
        prompts = prompt_windows(tokenizer, texts, random.Random(args.seed))
        losses: list[tuple[Loss, Source]] = [(loss_of, library), (loss_of, prompts)]
        if phase == "repeats":
            losses.append((loss_of_repeats, prompts))
        train(model, losses, steps, lr, checkpoint)
        save(model, tokenizer, args.out)

    shipped = GPT2LMHeadModel.from_pretrained(args.out, dtype=torch.float32)
    loss = validate(shipped, held_out)
    print(f"validation loss {loss:.4f} nats per token, perplexity {math.exp(loss):.2f}")
    show_samples(shipped, tokenizer)


if __name__ == "__main__":
    main()
