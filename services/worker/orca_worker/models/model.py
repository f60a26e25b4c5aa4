"""What the rest of a rank knows of a model, whatever its family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from orca_common.checkpoint import Checkpoint

    from ..batch import Batch
    from ..data_plane import DataPlane
    from ..kv import KVManager, KVShape
    from ..loading import Loading
    from ..partition import Place, RankShare


class CPU(NamedTuple):
    """How a model uses a CPU."""

    threads: int = 0  # 0: one for each core that the process may use
    kernels: str = "auto"  # an instruction set of orca_kernels.cpu; auto: the best; torch: plain torch, none of them


class Scored(NamedTuple):
    """Logprobs that one row of the batch asks for beyond that of its token, in the form of orca_common.scores."""

    member: int  # row of the batch
    top: bytes  # the most probable tokens at the new token's place
    prompt: bytes  # each token of the prompt


class Output(NamedTuple):
    """What one iteration made on this rank."""

    token_ids: list[int]  # one a request, in the batch's order, on the rank that samples; empty on the others
    logprobs: list[float]  # the same; NaN where none was asked for
    hidden: torch.Tensor | None = None  # at every stage but the last
    # Positions in `token_ids` where there is no token, whatever stands there: the logits give no distribution.
    not_finite: Sequence[int] = ()
    scores: Sequence[Scored] = ()  # of the rows that ask for them, in the batch's order


class Model(Protocol):
    """A rank's slice of a model, ready to run. One thread calls it."""

    @property
    def kv_shape(self) -> KVShape | None:
        """What it keeps for each token; None: nothing."""
        ...

    @property
    def kernels(self) -> str:
        """What computes it, in words for the log."""
        ...

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and type of the hidden states of `tokens` tokens that the stage before sends; None: it sends none."""
        ...

    def run(self, batch: Batch, kv: KVManager, plane: DataPlane, x: torch.Tensor | None) -> Output:
        """Runs one iteration of this stage's layers on the hidden states `x` of the stage before.

        The rank that samples returns when the tokens are on the host. No other rank waits for its device.
        """
        ...


class Family(Protocol):
    """Models of one `model_type`. Its module imports no torch: supervisors and `orca topology` ask it too."""

    @property
    def needs_torch(self) -> bool:
        """Whether even a single rank needs torch."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """What `load` imports. A rank imports it before it is told to form."""
        ...

    def check(self, checkpoint: Checkpoint, tensor_parallel: int, pipeline_parallel: int) -> None:
        """Raises FailedPrecondition with a sentence when the model cannot be cut in this way."""
        ...

    def share(self, checkpoint: Checkpoint, place: Place, dtype: str) -> RankShare:
        """What the rank at a place holds."""
        ...

    def load(
        self,
        checkpoint: Checkpoint,
        place: Place,
        dtype: str,
        device: torch.device | None,
        cpu: CPU,
        loading: Loading,
    ) -> tuple[Model, int]:
        """The slice of a place, and how many bytes of weights were read; `loading` tells how many so far.

        `device` is None only if no torch is needed. Raises FailedPrecondition with a sentence when the weights are
        missing or do not fit.
        """
        ...
