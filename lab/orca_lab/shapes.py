"""The models of the paper's Table 1 and their partitions: shapes to measure with random weights."""

from dataclasses import dataclass

from orca_common.checkpoint import read_checkpoint, resolve_model
from orca_worker.models.gpt2.configuration import GPT2Config


@dataclass(frozen=True)
class Shape:
    """A model without weights, and how the paper partitioned it."""

    name: str
    config: GPT2Config
    tensor_parallel: int  # intra-layer partitions in the paper
    pipeline_parallel: int  # inter-layer partitions


def gpt(layers: int, hidden: int, heads: int, positions: int = 2048, vocab_size: int = 50257) -> GPT2Config:
    """A configuration of GPT-2 or GPT-3. The paper leaves out GPT-3's sparse attention, so only the sizes differ."""
    return GPT2Config(
        vocab_size=vocab_size,
        positions=positions,
        hidden=hidden,
        layers=layers,
        heads=heads,
        inner=4 * hidden,
        epsilon=1e-5,
        activation="tanh_gelu",
        tied=True,
        scale_attention=True,
        scale_by_layer=False,
    )


PARTITIONS = {"gpt3-13b": (1, 1), "gpt3-101b": (8, 1), "gpt3-175b": (8, 2), "gpt3-341b": (8, 4)}
SHAPES = {
    "gpt2-124m": Shape("gpt2-124m", gpt(12, 768, 12, positions=1024), 1, 1),  # not of the paper: small enough for a CPU
    **{
        name: Shape(name, GPT2Config.read(read_checkpoint(resolve_model(name))), *cut)
        for name, cut in PARTITIONS.items()
    },
}
