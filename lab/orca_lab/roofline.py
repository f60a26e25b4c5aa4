"""The least time that an iteration of a shard can take: its bytes over the memory's bandwidth, or its arithmetic over
the processor's peak, whichever is longer (Williams, Waterman, Patterson, "Roofline", CACM 2009)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orca_worker.models.gpt2.configuration import GPT2Config
from orca_worker.partition import RankShare


@dataclass(frozen=True)
class Accelerator:
    """The maker's datasheet."""

    name: str  # how torch.cuda.get_device_name begins
    bandwidth: float  # of its memory, bytes a second
    peak: Mapping[str, float]  # by type of the data: FLOP a second, dense


ACCELERATORS = (
    # float32 without TF32, as the tokens' equality asks for: the vector units
    Accelerator("NVIDIA H100", 3.35e12, {"bfloat16": 989e12, "float32": 67e12}),  # SXM
    Accelerator("NVIDIA H200", 4.8e12, {"bfloat16": 989e12, "float32": 67e12}),
)


def accelerator(device_name: str) -> Accelerator | None:
    """None: a device whose numbers are not in the table, such as a CPU."""
    return next((one for one in ACCELERATORS if device_name.startswith(one.name)), None)


@dataclass(frozen=True)
class Work:
    """What an iteration cannot do without."""

    bytes: int
    flop: int

    def floor(self, on: Accelerator, dtype: str) -> float:
        """Seconds."""
        return max(self.bytes / on.bandwidth, self.flop / on.peak[dtype])


def work(config: GPT2Config, share: RankShare, item: int, requests: Iterable[tuple[int, int]]) -> Work:
    """Of one iteration of a rank. `requests`: (tokens before this iteration, tokens in it) of each; `item`: bytes of an
    element.

    Bytes: the weights of the layers and of the head once, each key and value read once, new ones written. Left out,
    since it could stay in caches or is small: activations, rows of the embeddings. FLOP: two for each weight of a
    matrix and each token (of the head: each request), and attention's two products over what a token may see.
    """
    requests = list(requests)
    tokens = sum(new for _, new in requests)
    visible = sum(new * before + new * (new + 1) // 2 for before, new in requests)  # pairs of a query and a key
    kept = sum(before + new for before, new in requests)
    head = ("wte.weight" if config.tied else "lm_head.weight") if "ln_f.weight" in share.slices else None
    read, matrices = 0, 0
    for name, part in share.slices.items():
        if name.startswith(("h.", "ln_f.")) or name == head:
            read += part.elements
        if name.startswith("h.") and len(part.shape) == 2:
            matrices += part.elements
    slot = share.slot_bytes // item  # elements: a key and a value in each layer
    return Work(
        bytes=item * read + share.slot_bytes * (kept + tokens),
        flop=2 * matrices * tokens
        + 2 * (share.slices[head].elements if head else 0) * len(requests)
        + 2 * slot * visible,  # 2 FLOP for q.k and 2 for the sum of values, a key's element and a value's being two
    )
