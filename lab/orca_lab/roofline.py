"""The shortest possible time of a shard's iteration: its bytes over the memory's bandwidth, or its arithmetic over the
processor's peak, whichever is longer (Williams, Waterman, Patterson, "Roofline", CACM 2009)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orca_worker.models.gpt2.configuration import GPT2Config
from orca_worker.partition import RankShare


@dataclass(frozen=True)
class Accelerator:
    """A GPU with the numbers of its maker's datasheet."""

    name: str  # the beginning of torch.cuda.get_device_name
    bandwidth: float  # of the memory, in bytes per second
    peak: Mapping[str, float]  # by type of the data, in dense FLOP per second


ACCELERATORS = (
    # float32 is without TF32, which would change tokens: the peak of the vector units
    Accelerator("NVIDIA H100", 3.35e12, {"bfloat16": 989e12, "float32": 67e12}),  # SXM
    Accelerator("NVIDIA H200", 4.8e12, {"bfloat16": 989e12, "float32": 67e12}),
)


def accelerator(device_name: str) -> Accelerator | None:
    """The accelerator of this name; None when the table does not have the device, such as a CPU."""
    return next((one for one in ACCELERATORS if device_name.startswith(one.name)), None)


@dataclass(frozen=True)
class Work:
    """The bytes that an iteration must at least move, and the FLOP that it must at least compute."""

    bytes: int
    flop: int

    def floor(self, on: Accelerator, dtype: str) -> float:
        """The shortest possible time on an accelerator, in seconds."""
        return max(self.bytes / on.bandwidth, self.flop / on.peak[dtype])


def work(config: GPT2Config, share: RankShare, item: int, requests: Iterable[tuple[int, int]]) -> Work:
    """The work of one iteration of a rank.

    `item`: bytes of an element. `requests`: (tokens before this iteration, tokens in it) of each request.

    Bytes: the weights of the layers and of the head once, each key and value read once, new ones written. Activations
    could stay in caches and rows of the embeddings are few, so neither counts. FLOP: two for each weight of a matrix
    and each token (in the head: each request), and attention's two products over the tokens that a token may see.
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
        + 2 * slot * visible,  # an element of a key takes 2 FLOP in q.k, one of a value 2 in the weighted sum
    )
