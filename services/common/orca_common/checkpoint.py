"""Reads a Hugging Face checkpoint folder for a service, without torch."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .adapters import Adapter
from .bounded_file import SHOWN, json_object, read_bounded, shown
from .errors import FailedPrecondition
from .gguf.folder import gguf_file, unpacked
from .protocol import GROWN, HANDED, OUTPUTS, PARTS, SHARED

INDEX = "model.safetensors.index.json"
WEIGHT_NAMES = ("model.safetensors", INDEX)
# What a service may read of a checkpoint, as patterns of file names.
TOKENIZER_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
OLD_TOKENIZER_FILES = ("vocab.json", "merges.txt")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
# Bounds of what a stranger's checkpoint may make a service read. Those of published models are far below.
CONFIG_BYTES, TOKENIZER_BYTES = 1 << 20, 64 << 20
LARGEST = 1 << 24  # tokens of a vocabulary, positions
MAX_END_TOKENS = 1024
SHAPES = Path(__file__).with_name("shapes")  # folders of models that have a name, a config.json and no weights
RANDOM_WEIGHTS, PREFIX_LM = "orca_random_weights", "orca_prefix_lm"  # our own fields of config.json
# Heads of transformers that are no language model's, as in LlamaForSequenceClassification.
OTHER_HEAD = re.compile(r"For(?!CausalLM$|ConditionalGeneration$|PreTraining$)\w+$|EncoderModel$")
WITH_ENCODER = ("t5", "marian")  # types of models
START = {"t5": 0, "marian": 58100}  # their first tokens, where no file says so
# Fields of config.json that say how the weights in the files were quantized, and the ways that are read.
QUANTIZED = ("quantization_config", "compression_config")
METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
WAYS = (
    f"Orca reads {', '.join(METHODS)}, GGUF, and float32, float16 and bfloat16 in safetensors, of which quantize makes "
    "eight or four bits"
)
STRETCHED = ("linear", "yarn")  # kinds of scaled rotary positions whose files give the length before


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
    digest: str  # of the tokenizer and the sizes: what all services of a release must share. The weights have their own
    quantize: str | None = None  # the format that its weights get when they are loaded, by the setting of this name
    adapters: tuple[Adapter, ...] = ()  # that are served beside it, by the setting of this name
    adapters_folder: Path | None = None  # from which others may be loaded while it runs; None: none may

    @property
    def has_encoder(self) -> bool:
        """Whether a prompt is the input of an encoder: its tokens have no logits."""
        return self.model_type in WITH_ENCODER

    @property
    def start_token(self) -> int | None:
        """The token before the first one of an answer, where there is an encoder: as generation_config.json says it, or
        else config.json. Raises FailedPrecondition."""
        if not self.has_encoder:
            return None
        padding = self.config.get("pad_token_id")
        default = START[self.model_type] if self.model_type == "marian" or padding is None else padding
        name = "decoder_start_token_id"
        given = next(
            (said[name] for said in (generation_fields(self.folder)[1], self.config) if said.get(name) is not None),
            default,
        )
        if type(given) is not int or not 0 <= given < self.vocab_size:
            problem = f"gives {name} {shown(given)}, not a token of a vocabulary of {self.vocab_size}"
            raise FailedPrecondition(f"model: {self.name} {problem}")
        return given

    @property
    def prefix_lm(self) -> bool:
        """Whether the tokens of a prompt see each other, and those of an answer all before them (Raffel et al., 2020,
        "Exploring the Limits of Transfer Learning", section 3.2.1). Raises FailedPrecondition."""
        given = self.config.get(PREFIX_LM)
        if given is not None and type(given) is not bool:
            problem = f"gives {PREFIX_LM} {shown(given)}, not true or false"
            raise FailedPrecondition(f"model: config.json of {self.name} {problem}")
        return bool(given)

    @property
    def can(self) -> tuple[str, ...]:
        """Returns what a policy, or a role, may need of its ranks. Where the tokens of a prompt see each other they run
        together, and their keys and values depend on all of it. A model with an encoder makes one token an
        iteration, and keeps it one slot behind its place among the tokens: the first token of its decoder has a slot,
        too."""
        if self.has_encoder:
            return ()
        return (OUTPUTS, GROWN) if self.prefix_lm else (PARTS, OUTPUTS, SHARED, GROWN, HANDED)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The way in which another tool has quantized the weights, by config.json. Raises FailedPrecondition."""
        return _quantization(self.config, self.folder / "config.json")

    @property
    def random_weights(self) -> int | None:
        """The seed by which the weights are made; None: they are in files. Raises FailedPrecondition."""
        seed = self.config.get(RANDOM_WEIGHTS)
        if seed is not None and not (type(seed) is int and 0 <= seed < 1 << 63):
            problem = f"gives {RANDOM_WEIGHTS} {shown(seed)}, not a seed from 0 to {(1 << 63) - 1}"
            raise FailedPrecondition(f"model: config.json of {self.name} {problem}")
        return seed

    @property
    def tokenizer_file(self) -> Path | None:
        path = self.folder / "tokenizer.json"
        return path if path.exists() else None


def read_checkpoint(
    folder: str | Path,
    quantize: str | None = None,
    adapters: tuple[Adapter, ...] = (),
    adapters_folder: str = "",
) -> Checkpoint:
    """Reads the configuration. `quantize`, `adapters` and `adapters_folder` are the checkpoint's fields.

    Raises FailedPrecondition with a sentence when the folder is not a checkpoint.
    """
    folder = Path(folder)
    path = folder / "config.json"
    config = _config(path)
    kind = _type(config, path)
    vocab_size = _size(config, "vocab_size", path)
    max_positions = _positions(config, kind, path)
    _check_tokenizer(folder)
    digest = hashlib.sha256(f"{vocab_size} {max_positions} ".encode())
    with suppress(FileNotFoundError):
        digest.update(read_bounded(folder / "tokenizer.json", TOKENIZER_BYTES))
    return Checkpoint(
        folder=folder,
        name=public_name(folder),
        config=config,
        model_type=kind,
        vocab_size=vocab_size,
        max_positions=max_positions,
        eos_token_ids=_end_tokens(folder, config, vocab_size),
        digest=digest.hexdigest()[:16],
        quantize=quantize,
        adapters=adapters,
        adapters_folder=Path(adapters_folder) if adapters_folder else None,
    )


def _check_tokenizer(folder: Path) -> None:
    """Raises FailedPrecondition for GPT-2's old form of a tokenizer, which leaves open how a text is cut into words."""
    old = OLD_TOKENIZER_FILES
    if all((folder / name).exists() for name in old) and not (folder / "tokenizer.json").exists():
        here = str(folder)
        program = f"from transformers import AutoTokenizer as T; T.from_pretrained({here!r}).save_pretrained({here!r})"
        problem = f"{folder} has {old[0]} and {old[1]}, and no tokenizer.json"
        raise FailedPrecondition(f'model: {problem}; transformers makes it: python -c "{program}"')


def _positions(config: Mapping[str, Any], kind: str, path: Path) -> int:
    """Input tokens + max_new_tokens of a request, at most.

    T5 has distances and no positions. `n_positions` is the length of the texts that it was trained on, in and out, and
    512 where a file does not say: both together are the limit. Files whose rotary positions are scaled give the length
    before (transformers goes on beyond it, without a limit of its own).
    """
    if kind == "t5":
        return 2 * (512 if config.get("n_positions") is None else _size(config, "n_positions", path))
    given = _size(config, "n_positions" if config.get("n_positions") is not None else "max_position_embeddings", path)
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if kind == "gemma3_text":  # its files give the length behind
        return given
    if isinstance(scaling, dict) and isinstance(factor := scaling.get("factor"), int | float):
        type_of = scaling.get("rope_type", scaling.get("type"))
        before = scaling.get("original_max_position_embeddings", given) if type_of == "yarn" else given
        if type_of in STRETCHED and type(before) is int and 1 <= factor * before <= LARGEST:
            return max(given, int(factor * before))
    return given


def what_it_is(path: Path) -> str:
    """Names a file or folder without config.json and weights, as the end of a sentence."""
    files = [path] if path.is_file() else [*path.glob("*")]
    if any(file.name == "adapter_config.json" for file in files):
        return "is a LoRA adapter and no whole model: serve its base model, and it beside it (the setting adapters)"
    if path.is_file():
        return "is a file; a checkpoint is a folder with a config.json, or a GGUF file"
    return "is not a checkpoint folder (it holds no config.json)"


def model_type(folder: Path) -> str:
    """The type that a folder's config.json names. Raises FailedPrecondition when it names none."""
    path = folder / "config.json"
    return _type(_config(path), path)


def sort_of(folder: Path) -> str:
    """Names the sort of a model beside its type, by its config.json, as a part of a sentence; empty for a plain one."""
    config = _config(folder / "config.json")
    if config.keys() & {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}:
        return ", a mixture of experts"
    if config.keys() & {"vision_config", "audio_config"}:
        return ", which reads images or sound"
    return ""


def _config(path: Path) -> dict[str, Any]:
    try:
        raw = read_bounded(path, CONFIG_BYTES)
    except FileNotFoundError:
        raise FailedPrecondition(f"model: {path.parent} holds no config.json") from None
    return json_object(raw, path)


def quantization(folder: Path) -> dict[str, Any] | None:
    """The way, one of METHODS, in which a folder's weights were quantized. Raises FailedPrecondition."""
    path = folder / "config.json"
    return _quantization(_config(path), path)


def _quantization(config: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    given = next((found for name in QUANTIZED if (found := config.get(name))), None)
    if given is None:
        return None
    says: dict[str, Any] = given if isinstance(given, dict) else {}
    method = says.get("quant_method")
    if isinstance(method, str) and method in METHODS:
        return says
    detail = next((f" ({key} {shown(says[key])})" for key in ("format", "bits") if says.get(key)), "")
    way = shown(given if method is None else method) + detail
    raise FailedPrecondition(f"model: {path} says that the weights were quantized by {way}; {WAYS}")


def _type(config: Mapping[str, Any], path: Path) -> str:
    _quantization(config, path)
    found = config.get("model_type")
    if not isinstance(found, str):
        raise FailedPrecondition(f"model: {path} has a missing or wrong field (model_type is {shown(found)})")
    heads = config.get("architectures")
    for head in heads if isinstance(heads, list) else []:
        if isinstance(head, str) and OTHER_HEAD.search(head):
            raise FailedPrecondition(f"model: {path} is of a {shown(head)}, which generates no text")
    return found


def public_name(folder: Path) -> str:
    """A model's name for its users: `owner/model` for a folder in the hub's cache, else the folder's own name.

    The hub's cache keeps a model in `models--OWNER--MODEL/snapshots/COMMIT`.
    """
    path = folder.resolve()
    kind, _, name = path.parent.parent.name.partition("--")
    if path.parent.name == "snapshots" and kind == "models" and name:
        return name.replace("--", "/", 1)
    return path.name


def _size(config: Mapping[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= LARGEST:
        problem = f"{name} is {shown(value)}, not a number from 1 to {LARGEST}"
        raise FailedPrecondition(f"model: {path} has a missing or wrong field ({problem})")
    return value


def generation_fields(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A file and its fields that say how to generate: generation_config.json, or the whole config.json where there is
    none, as transformers reads them. Raises FailedPrecondition."""
    path = folder / "generation_config.json"
    with suppress(FileNotFoundError):
        return path, json_object(read_bounded(path, CONFIG_BYTES), path)
    path = folder / "config.json"
    with suppress(FileNotFoundError):
        return path, json_object(read_bounded(path, CONFIG_BYTES), path)
    return path, {}


def _end_tokens(folder: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """End-of-text tokens, of generation_config.json or else config.json. Ids beyond the vocabulary are left out."""
    path, said = generation_fields(folder)
    given = said.get("eos_token_id")
    if given is None:
        path, given = folder / "config.json", config.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if len(ids) > MAX_END_TOKENS:
        raise FailedPrecondition(
            f"model: {path}: eos_token_id has {len(ids)} ids; at most {MAX_END_TOKENS} are allowed"
        )
    for wrong in (i for i in ids if type(i) is not int):
        raise FailedPrecondition(f"model: {path}: eos_token_id must be token ids, not {shown(wrong)}")
    return tuple(i for i in ids if 0 <= i < vocab_size)


def resolve_model(model: str, accept: Callable[[Path], None] = lambda folder: None) -> Path:
    """The folder of a model. `model` is that folder, one of `shape_names`, or a name on the hub; then its files are
    downloaded first. It may also be a GGUF file, or a folder with one alone: its fields become files first.

    accept: raises FailedPrecondition for a model that is not wanted. It is given a folder with config.json, before
    gigabytes of weights are downloaded. Raises FailedPrecondition also for any other `model`.
    """
    try:
        here, there = (Path(model) / "config.json").exists(), Path(model).exists()
    except OSError as error:  # a name that is too long, a folder that is not ours
        raise FailedPrecondition(f"model: {model[:SHOWN]} cannot be read ({error.strerror})") from None
    if here:
        accept(Path(model))
        return Path(model)
    if not there and model in shape_names():
        accept(SHAPES / model)
        return SHAPES / model
    if not there and model.startswith((".", "/")):
        raise FailedPrecondition(f"model: {model}: there is no such folder")
    if there and (file := gguf_file(Path(model))) is not None:
        folder = unpacked(file)
        accept(folder)
        return folder
    if there:
        raise FailedPrecondition(f"model: {model} {what_it_is(Path(model))}")
    try:
        config = download_from_hub(model, ("config.json",))
    except FailedPrecondition as error:
        why = str(error).removeprefix(f"{model} ")
        raise FailedPrecondition(f"model: {model} is no folder here, and {why}") from None
    accept(config)
    folder = download_from_hub(model, (*TOKENIZER_FILES, *WEIGHT_FILES))
    if not (folder / "tokenizer.json").exists():  # perhaps in the old form, which is refused
        download_from_hub(model, OLD_TOKENIZER_FILES)
    return folder


def shape_names() -> list[str]:
    """The models of the paper's Table 1, with random weights."""
    return sorted(path.name for path in SHAPES.iterdir() if path.is_dir())


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
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        if isinstance(error, LocalEntryNotFoundError) and not isinstance(error.__cause__, HfHubHTTPError):
            why = "is not in the hub's cache, and the hub cannot be reached; give a folder with the model"
            raise FailedPrecondition(f"{name} {why}") from None
        raise FailedPrecondition(f"the hub does not provide {name} ({error})") from None
