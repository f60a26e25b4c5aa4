"""What a service must know of a Hugging Face checkpoint folder, without torch."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import FailedPrecondition

INDEX = "model.safetensors.index.json"
WEIGHT_NAMES = ("model.safetensors", INDEX)
# What a service may read of a checkpoint, as patterns of file names.
TOKENIZER_FILES = ("config.json", "generation_config.json", "tokenizer.json")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class Checkpoint:
    """A folder with `config.json`, safetensors and, for prompts in text, `tokenizer.json`."""

    folder: Path
    name: str
    config: dict[str, Any]
    model_type: str
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    digest: str  # of config.json and tokenizer.json; all services of a release must have the same

    @property
    def tokenizer_file(self) -> Path | None:
        path = self.folder / "tokenizer.json"
        return path if path.exists() else None


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads the configuration. Raises FailedPrecondition with a sentence when the folder is not a checkpoint."""
    folder = Path(folder)
    path = folder / "config.json"
    try:
        raw = path.read_bytes()
        config = json.loads(raw)
        vocab_size, positions = (
            int(config["vocab_size"]),
            int(config.get("n_positions") or config["max_position_embeddings"]),
        )
        model_type = str(config["model_type"])
    except FileNotFoundError:
        raise FailedPrecondition(f"model: {folder} holds no config.json") from None
    except (KeyError, TypeError, ValueError) as error:
        raise FailedPrecondition(f"model: {path} has a missing or wrong field ({error})") from None
    digest = hashlib.sha256(raw)
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists():
        digest.update(tokenizer.read_bytes())
    generation = folder / "generation_config.json"
    eos = json.loads(generation.read_bytes()).get("eos_token_id") if generation.exists() else None
    eos = config.get("eos_token_id") if eos is None else eos
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return Checkpoint(
        folder=folder,
        name=public_name(folder),
        config=config,
        model_type=model_type,
        vocab_size=vocab_size,
        max_positions=positions,
        eos_token_ids=tuple(int(i) for i in ids if 0 <= int(i) < vocab_size),
        digest=digest.hexdigest()[:16],
    )


def public_name(folder: Path) -> str:
    """A model's name for its users: `owner/model` for a folder in the hub's cache, else the folder's own name.

    The hub's cache keeps a model in `models--OWNER--MODEL/snapshots/COMMIT`.
    """
    path = folder.resolve()
    kind, _, name = path.parent.parent.name.partition("--")
    if path.parent.name == "snapshots" and kind == "models" and name:
        return name.replace("--", "/", 1)
    return path.name


def resolve_model(model: str) -> Path:
    """The folder of a model. `model` is that folder, or a name on the hub; then its files are downloaded first.

    Raises FailedPrecondition when it is neither.
    """
    if (Path(model) / "config.json").exists():
        return Path(model)
    if Path(model).exists() or model.startswith((".", "/")):
        raise FailedPrecondition(f"model: {model} is not a checkpoint folder (it holds no config.json)")
    try:
        return download_from_hub(model, (*TOKENIZER_FILES, *WEIGHT_FILES))
    except FailedPrecondition as error:
        raise FailedPrecondition(f"model: {model} is no folder here, and {error}") from None


def download_from_hub(
    name: str, patterns: Sequence[str], *, revision: str | None = None, local_dir: Path | None = None
) -> Path:
    """The folder with those files of a model on the hub whose names match: `local_dir`, or one in the hub's cache.

    Raises FailedPrecondition when the hub does not provide them.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_dir=local_dir, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FailedPrecondition(f"the hub does not provide {name} ({error})") from None
