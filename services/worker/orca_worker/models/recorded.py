"""A family whose models are recordings, as the rest of a rank uses it. Imports torch only to load a model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from orca_common.adapters import Adapter
from orca_common.checkpoint import PREFIX_LM, Checkpoint
from orca_common.errors import FailedPrecondition
from orca_common.gguf.folder import gguf_file

from ..iteration.model import Compute, Loading, Model
from ..partition import ITEM_BYTES, SINGLE, Place, RankShare, Types, check_stages
from .adapters import AdapterFile, check_adapters, elements_of, read_adapter
from .dtype import kernels_are_used
from .formats.layout import layout_of
from .formats.table import CODED, FORMATS, KEPT, Format
from .gguf import kept
from .recording import Attend, Recording
from .tables import Tables, has_own_head
from .weight_files import check_files

if TYPE_CHECKING:
    import torch

    from .cpu import StageOnCPU
    from .formats.pieces import Layout

log = logging.getLogger(__name__)


def format_of(checkpoint: Checkpoint, recording: Recording) -> Format:
    """The format of a rank's matrices: that of `quantize`, or that of their blocks in a GGUF file, or numbers."""
    file = gguf_file(checkpoint.folder) if checkpoint.random_weights is None else None
    found = kept(file, recording) if file is not None and checkpoint.quantize is None else None
    return FORMATS[checkpoint.quantize] if found is None else KEPT[found]


def coded_layout(checkpoint: Checkpoint) -> Layout | None:
    """That in which another tool has written its safetensors. Raises FailedPrecondition for one that is not read."""
    in_safetensors = checkpoint.random_weights is None and gguf_file(checkpoint.folder) is None
    return layout_of(checkpoint.quantization, checkpoint.name) if in_safetensors else None


def obstacle(recording: Recording, device: torch.device, compute: Compute, has_adapters: bool) -> str | None:
    """Why plain torch runs a stage on a GPU; None if Triton's kernels do."""
    import torch

    if compute.kernels == "torch" or not torch.cuda.is_available():
        return "kernels is torch"
    from .cuda import unfit

    problem = unfit(recording, device, has_adapters)
    if problem is not None:
        log.warning("no Triton kernels: plain torch", extra={"reason": problem})
    return problem


class Configuration(Protocol):
    """A config.json that has been read."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def layers(self) -> int: ...

    @property
    def tied(self) -> bool: ...


C = TypeVar("C", bound=Configuration)


@dataclass(frozen=True)
class RecordedFamily(Generic[C]):
    """`Family` by two functions."""

    of_file: Callable[[Checkpoint], C]  # reads config.json; raises FailedPrecondition for what is not supported
    record: Callable[[C, Place], Recording]  # raises FailedPrecondition where the model cannot be cut so
    prefix: str  # of tensors' names, in some files
    tables: Tables
    zero: str = ""  # a tensor that is zeros where the files lack it
    on_cpu: type[StageOnCPU] | None = None  # another one for the compiled kernels

    def read(self, checkpoint: Checkpoint) -> C:
        """The configuration; the files say whether a tied model has a head of its own. Raises FailedPrecondition."""
        config = self.of_file(checkpoint)
        if config.tied and checkpoint.random_weights is None:
            return replace(config, tied=not has_own_head(checkpoint.folder, self.prefix, self.tables))
        return config

    @property
    def needs_torch(self) -> bool:
        return True

    @property
    def modules(self) -> tuple[str, ...]:
        return "orca_worker.sampling.sampling", "orca_worker.models.plain", "orca_worker.models.cpu"

    def check(self, checkpoint: Checkpoint, tensor_parallel: int, pipeline_parallel: int) -> None:
        config, _ = self.read(checkpoint), checkpoint.random_weights
        check_stages(config.layers, tensor_parallel, pipeline_parallel)
        firsts = [Place(tensor_parallel, pipeline_parallel, tensor_rank=rank) for rank in range(tensor_parallel)]
        for place in (SINGLE, *firsts):  # all layers, and what each tensor rank has
            self._recording(checkpoint, config, place)
        if checkpoint.adapters:
            check_adapters(checkpoint.adapters, self.prefix, self._recording(checkpoint, config, SINGLE))

    def _recording(self, checkpoint: Checkpoint, config: C, place: Place) -> Recording:
        """The stage of a place, as a prefix LM where the file says so: with any decoder's weights."""
        made = self.record(config, place)
        made.prefix_lm = checkpoint.prefix_lm
        attentions = [operation.attention for operation in made.operations if isinstance(operation, Attend)]
        other = "an encoder" if made.has_encoder else "windows" if any(a.window for a in attentions) else None
        if made.prefix_lm and other is not None:
            problem = f"asks for {PREFIX_LM}, which a model with {other} here does not have"
            raise FailedPrecondition(f"model: config.json of {checkpoint.name} {problem}")
        return made

    def adapter(self, checkpoint: Checkpoint, adapter: Adapter) -> AdapterFile:
        check_adapters([adapter], self.prefix, self._recording(checkpoint, self.read(checkpoint), SINGLE))
        return read_adapter(adapter, self.prefix)

    def check_weights(self, checkpoint: Checkpoint) -> None:
        check_files(checkpoint.folder)
        if (layout := coded_layout(checkpoint)) is not None:
            from .coded import CodedFiles, parts_of  # numpy, too

            whole = self._recording(checkpoint, self.read(checkpoint), SINGLE)
            files, parts = CodedFiles(checkpoint.folder, self.prefix, layout), parts_of(whole)
            files.check(parts.values())
            files.check_others([name for name in whole.slices if name not in parts])

    def _format(self, checkpoint: Checkpoint, recording: Recording) -> tuple[Format, int | None]:
        """The format of a rank's matrices, and the inputs of a scale where another tool has made their codes."""
        layout = coded_layout(checkpoint)
        if layout is None or checkpoint.quantize is not None:
            return format_of(checkpoint, recording), None
        from .coded import CodedFiles, parts_of, step_of

        parts = parts_of(recording).values()
        try:
            step = CodedFiles(checkpoint.folder, self.prefix, layout).step(parts)
        except FailedPrecondition:  # their reader says why
            step = step_of(layout, parts)
        return (FORMATS[None] if layout.kept is None or step is None else CODED[layout.kept, step]), step

    def _adapters(self, checkpoint: Checkpoint) -> list[AdapterFile]:
        """The files of the adapters that are served beside the model."""
        return [read_adapter(one, self.prefix) for one in checkpoint.adapters]

    def share(self, checkpoint: Checkpoint, place: Place, types: Types) -> RankShare:
        config, item = self.read(checkpoint), ITEM_BYTES[types.weights]
        of = self._recording(checkpoint, config, place)
        form, _ = self._format(checkpoint, of)
        in_adapters = sum(elements_of(one, of) for one in self._adapters(checkpoint))
        return RankShare(
            place.stage,
            place.tensor_rank,
            place.layers(config.layers),
            of.slices,
            weight_bytes=of.weight_bytes(item, form.bytes) + item * in_adapters,
            slot_bytes=of.slot_bytes(types),
        )

    def load(
        self,
        checkpoint: Checkpoint,
        place: Place,
        types: Types,
        device: torch.device | None,
        compute: Compute,
        loading: Loading,
    ) -> tuple[Model, int]:
        import torch

        from ..sampling.sampling import HiddenModel, SamplingModel
        from .low_rank import LowRanks
        from .plain import TorchStage
        from .weights import Weights, check_memory

        assert device is not None
        config = self.read(checkpoint)
        recording, kind = self._recording(checkpoint, config, place), getattr(torch, types.weights)
        added, others = self._adapters(checkpoint), checkpoint.adapters_folder is not None
        adapters = LowRanks(added, kind, device, others) if added or others else None
        problem = None if device.type == "cpu" else obstacle(recording, device, compute, adapters is not None)
        if problem is not None and checkpoint.quantize is not None:
            raise FailedPrecondition(f"quantize: {checkpoint.quantize} needs Triton's kernels on a GPU: {problem}")
        form, step = self._format(checkpoint, recording) if problem is None else (FORMATS[None], None)
        of = recording.slices, kind, device, loading
        if (seed := checkpoint.random_weights) is not None:
            from .random_weights import RandomWeights

            weights = RandomWeights(seed, *of)
        elif (file := gguf_file(checkpoint.folder)) is not None:
            from .gguf_weights import GGUFWeights

            weights = GGUFWeights(file, *of)
        else:
            names = (self.tables.head, *self.tables.others) if config.tied else self.tables.others
            here = checkpoint.folder, self.prefix, *of, {self.tables.tokens: names}, self.zero
            layout = coded_layout(checkpoint)
            if layout is None:
                weights = Weights(*here)
            else:
                from .coded import CodedFiles, parts_of
                from .coded_weights import CodedWeights

                files = CodedFiles(checkpoint.folder, self.prefix, layout)
                weights = CodedWeights(files, parts_of(recording), step, *here)
        in_adapters = kind.itemsize * sum(elements_of(one, recording) for one in added)
        check_memory(recording.weight_bytes(kind.itemsize, form.bytes) + in_adapters, device)
        if device.type == "cpu" and kernels_are_used(compute):
            from .cpu import StageOnCPU

            stage = (self.on_cpu or StageOnCPU)(recording, weights, types, compute, form.reader, adapters)
            return stage, weights.bytes_read
        if device.type == "cuda" and problem is None:
            from .cuda import GPUReader, on_cuda

            stage = TorchStage(recording, weights, types, device, GPUReader(form.reader, device), adapters)
            return on_cuda(stage, compute), weights.bytes_read
        stage = TorchStage(recording, weights, types, device, form.reader, adapters)
        if device.type == "cpu" and compute.kernels == "device-loop" and not (recording.has_encoder or adapters):
            from ..device.replay import Replayed
            from .device_loop import on_cpu

            return on_cpu(stage, Replayed(), compute), weights.bytes_read
        return (SamplingModel(stage) if place.is_last else HiddenModel(stage)), weights.bytes_read
