"""A model's interface to the rest of a rank, whatever its family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from orca_common.adapters import Adapter
    from orca_common.checkpoint import Checkpoint

    from ..data_plane.plane import DataPlane
    from ..partition import Place, RankShare, Types
    from .batch import Batch
    from .device_tokens import DeviceTokens
    from .kv import KVManager, KVShape


class Loading:
    """Counted by the GPU thread; any thread may ask."""

    def __init__(self) -> None:
        self.read = 0  # bytes
        self.whole = 0  # bytes that will be read; 0: not known yet

    @property
    def sentence(self) -> str | None:
        """Says how much of the weights is read; None: none is being read, or all of it is."""
        read, whole = self.read, self.whole
        if read >= whole:
            return None
        size = f"{whole / 1e9:.1f} GB" if whole >= 1e9 else f"{whole / 1e6:.1f} MB"
        return f"{read / whole:.0%} of {size} of weights are read"


class Compute(NamedTuple):
    """A model's use of its machine."""

    threads: int = 0  # of a CPU; 0: one for each core that the process may use
    kernels: str = "auto"  # an instruction set of orca_kernels.cpu; auto: the best; torch: plain torch, none of them
    graphs: bool = True  # CUDA graphs of increments, on a CUDA device
    graphs_tp: bool = False  # also where tensor ranks add up in them


class Later(Protocol):
    """Tokens that are on their way from the device. Any thread may ask and wait."""

    @property
    def tokens(self) -> torch.Tensor:
        """[O] int64, on the device: what the device's next work reads. Only until the model runs again."""
        ...

    def is_there(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def result(self) -> Output:
        """Waits for the device. Raises RuntimeError when it has failed."""
        ...


class Output(NamedTuple):
    """The results of one iteration on this rank."""

    token_ids: list[int]  # [O] of the outputs, on the rank that samples; empty on the others
    logprobs: list[float]  # [O]; NaN where none was asked for
    hidden: torch.Tensor | None = None  # at every stage but the last
    # Positions in `token_ids` where there is no token, whatever stands there: the logits give no distribution.
    not_finite: Sequence[int] = ()
    stuck: Sequence[int] = ()  # the same: no token can follow by the form that the request gives its answer
    # The same: its mask was not there in time. In `token_ids` stands the last token again, from which it goes on.
    waiting: Sequence[int] = ()
    # Logprobs beyond those of the chosen tokens, in the form of orca_common.scores, for those that ask for them:
    tops: Mapping[int, bytes] = {}  # the most probable tokens at the place of a token, by position in `token_ids`
    prompts: Mapping[int, bytes] = {}  # each token of a part of a prompt, by member of the batch
    later: Later | None = None  # the iteration has been launched, no more; there are no tokens here until it has run
    made: Sequence[int] = ()  # how many tokens each member with outputs has; empty: one each

    @property
    def without(self) -> set[int]:
        """Positions in `token_ids` where there is no token."""
        return {*self.not_finite, *self.stuck, *self.waiting}

    def of(self, kept: np.ndarray, members: np.ndarray) -> Output:
        """The outputs alone that are `kept` [O]. members [O]: whose each is."""
        places = {old: n for n, old in enumerate(old for old, is_kept in enumerate(kept.tolist()) if is_kept)}
        return self._replace(
            token_ids=[self.token_ids[n] for n in places],
            logprobs=[self.logprobs[n] for n in places],
            not_finite=[places[n] for n in self.not_finite if n in places],
            stuck=[places[n] for n in self.stuck if n in places],
            waiting=[places[n] for n in self.waiting if n in places],
            tops={places[n]: scores for n, scores in self.tops.items() if n in places},
            made=list(Counter(members[kept].tolist()).values()),
        )


class Model(Protocol):
    """A rank's slice of a model, ready to run. One thread calls it."""

    @property
    def kv_shape(self) -> KVShape | None:
        """The keys and values that it keeps for each token; None: it keeps no such thing."""
        ...

    @property
    def kernels(self) -> str:
        """Names the kernels that compute it, for the log."""
        ...

    @property
    def tokens(self) -> DeviceTokens | None:
        """The table of the tokens of increments that come without any; None: the host sends it all tokens."""
        ...

    def prepare(self, kv: KVManager, plane: DataPlane) -> None:
        """Called when the memory of keys and values has been allocated, before the first iteration with it.

        The other ranks of the stage prepare at the same time. Raises as `run` when the plane no longer works.
        """

    def release(self) -> None:
        """Frees what `prepare` made. Called when the epoch is left, and before the next one's memory is measured."""

    def incoming(self, tokens: int) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and type of the hidden states of `tokens` tokens that the stage before sends; None: it sends none, or
        `run` receives them itself."""
        ...

    def run(self, batch: Batch, kv: KVManager, plane: DataPlane, x: torch.Tensor | None) -> Output:
        """Runs one iteration of this stage's layers on the hidden states `x` of the stage before.

        No rank waits for its device, except the one that samples: it returns when the tokens are on the host, unless it
        says that they come later.
        """
        ...


class ReadAdapter(Protocol):
    """The file of an adapter, as its family has read it for its models."""

    @property
    def name(self) -> str:
        """The adapter's name."""
        ...


@runtime_checkable
class Adaptable(Protocol):
    """A model, or a stage of one, that takes adapters while it runs."""

    def adapter_bytes(self, file: ReadAdapter) -> int:
        """About how many bytes of memory `adapt` takes for an adapter."""
        ...

    def adapt(self, number: int, file: ReadAdapter | None) -> None:
        """Adds this adapter's products for rows that have its number, from the next iteration on; None: no more.

        Raises FailedPrecondition where the file ends too early, and MemoryError or torch's RuntimeError where memory is
        short. Then rows of the number get nothing.
        """


class Family(Protocol):
    """Models of one `model_type`. Its module imports no torch: supervisors and `orca topology` ask it too."""

    @property
    def needs_torch(self) -> bool:
        """Whether even a single rank needs torch."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that `load` imports. A rank imports them before a master asks it to form."""
        ...

    def check(self, checkpoint: Checkpoint, tensor_parallel: int, pipeline_parallel: int) -> None:
        """Raises FailedPrecondition with a sentence when the model cannot be cut in this way."""
        ...

    def check_weights(self, checkpoint: Checkpoint) -> None:
        """Raises FailedPrecondition with a sentence when a file of the weights is missing or wrong."""
        ...

    def adapter(self, checkpoint: Checkpoint, adapter: Adapter) -> ReadAdapter:
        """The adapter's file. Raises FailedPrecondition where it is wrong, or does not fit the model."""
        ...

    def share(self, checkpoint: Checkpoint, place: Place, types: Types) -> RankShare:
        """The part of the model that the rank at a place holds."""
        ...

    def load(
        self,
        checkpoint: Checkpoint,
        place: Place,
        types: Types,
        device: torch.device | None,
        compute: Compute,
        loading: Loading,
    ) -> tuple[Model, int]:
        """Loads a place's slice. Returns it and the bytes of weights that were read, which `loading` counts meanwhile.

        `device` is None only if no torch is needed. Raises FailedPrecondition with a sentence when the weights are
        missing or do not fit.
        """
        ...
