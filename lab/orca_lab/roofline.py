"""The shortest possible time of a shard's iteration: its bytes over the memory's bandwidth, or its arithmetic over the
processor's peak, whichever is longer (Williams, Waterman, Patterson, "Roofline", CACM 2009)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from orca_worker.models.formats.table import FORMATS
from orca_worker.models.recording import (
    Attend,
    Embed,
    Gated,
    Head,
    Linear,
    Matrix,
    Normalize,
    Recording,
    Residual,
)
from orca_worker.partition import Slice


@dataclass(frozen=True)
class Accelerator:
    """A GPU with the numbers of its maker's datasheet."""

    name: str  # the beginning of torch.cuda.get_device_name
    bandwidth: float  # of the memory, in bytes per second
    peak: Mapping[str, float]  # by type of the data, in dense FLOP per second


def _peaks(half: float, single: float) -> dict[str, float]:
    """Peak rates: of 16-bit types on tensor cores, of float32 on the vector units (TF32 would change tokens)."""
    return {"bfloat16": half, "float16": half, "float32": single}


ACCELERATORS = (  # the more special names first
    Accelerator("NVIDIA H100 PCIe", 2.0e12, _peaks(756e12, 51e12)),
    Accelerator("NVIDIA H100 NVL", 3.9e12, _peaks(835e12, 60e12)),
    Accelerator("NVIDIA H100", 3.35e12, _peaks(989e12, 67e12)),  # SXM
    Accelerator("NVIDIA H200 NVL", 4.8e12, _peaks(835e12, 60e12)),
    Accelerator("NVIDIA H200", 4.8e12, _peaks(989e12, 67e12)),
    Accelerator("NVIDIA A100-SXM4-40GB", 1.555e12, _peaks(312e12, 19.5e12)),
    Accelerator("NVIDIA A100-PCIE-40GB", 1.555e12, _peaks(312e12, 19.5e12)),
    Accelerator("NVIDIA A100-SXM4-80GB", 2.039e12, _peaks(312e12, 19.5e12)),
    Accelerator("NVIDIA A100 80GB PCIe", 1.935e12, _peaks(312e12, 19.5e12)),
)
IN_TABLES = tuple(one for one in ACCELERATORS if one.name in ("NVIDIA H100", "NVIDIA H200"))


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


def work(
    recording: Recording,
    item: int,
    requests: Iterable[tuple[int, int]],
    of_matrix: Callable[[int, int, int], int] = FORMATS[None].bytes,
) -> Work:
    """The work of one iteration of a rank.

    `item`: bytes of an element. `requests`: (tokens before this iteration, tokens in it) of each request.
    `of_matrix(outputs, inputs, item)`: bytes of a layer's matrix.

    Bytes: the weights of the layers and of the head once, each key and value that a query sees read once, new ones
    written. Activations could stay in caches and rows of the embeddings are few, so neither counts. FLOP: two for each
    weight of a matrix and each token (in the head: each request), and attention's two products over the tokens that a
    token may see.
    """
    requests = list(requests)
    tokens = sum(new for _, new in requests)
    read: dict[str, int] = {}  # elements of each tensor
    kept, flop = 0, 0  # elements of keys and values, FLOP
    for operation in recording.operations:
        matrices: tuple[Matrix, ...] = ()
        rows = tokens
        match operation:
            case Embed():
                pass
            case Normalize(_, norm):
                read |= elements_of(norm.weight, norm.bias)
            case Linear(_, matrix):
                matrices = (matrix,)
            case Gated(_, gate, up):
                matrices = (gate, up)
            case Residual(terms, norm):
                matrices = tuple(matrix for _, matrix in terms)
                read |= elements_of(norm.weight) if norm is not None else {}
            case Head(_, table):
                matrices, rows = (Matrix((table,)),), len(requests)
            case Attend(_, a):
                for norm in (a.query_norm, a.key_norm):
                    read |= elements_of(norm.weight) if norm is not None else {}
                slot = 2 * a.kv_heads * a.head_size
                kept += slot * (tokens + sum(seen(before, new, a.window) for before, new in requests))
                # an element of a key takes 2 FLOP in q.k, one of a value 2 in the weighted sum, for each query head
                shared = a.heads // a.kv_heads
                flop += 2 * slot * shared * sum(pairs(before, new, a.window) for before, new in requests)
        for matrix in matrices:
            flop += 2 * rows * sum(part.elements for part in matrix.weights)
            read |= elements_of(*matrix.weights, *matrix.biases)
    sizes = recording.matrices
    weights = sum(of_matrix(*sizes[name], item) if name in sizes else item * count for name, count in read.items())
    return Work(weights + item * kept, flop)


def elements_of(*parts: Slice | None) -> dict[str, int]:
    """The elements of slices, by name of the tensor."""
    return {part.name: part.elements for part in parts if part is not None}


def seen(before: int, new: int, window: int) -> int:
    """The keys that `new` queries after `before` tokens see, each counted once. window 0: all."""
    return min(before + new, window + new - 1) if window else before + new


def pairs(before: int, new: int, window: int) -> int:
    """The pairs of a query and a key that it sees."""
    whole = new * before + new * (new + 1) // 2
    if not window:
        return whole
    first = max(before, window)  # the query at this position is the first that does not see all keys before it
    hidden = max(before + new - first, 0)
    return whole - hidden * (first - window) - hidden * (hidden + 1) // 2
