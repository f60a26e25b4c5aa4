"""The names of a rank's tensors in a GGUF file, and whether their blocks can stay as they are; without torch."""

import re
from pathlib import Path

from orca_common.errors import FailedPrecondition
from orca_common.gguf.configuration import HEAD, TOKENS
from orca_common.gguf.header import BY_NAME, gguf_header

from .formats.table import KEPT
from .recording import Recording

LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
WHOLE = {"embed_tokens.weight": TOKENS, "norm.weight": "output_norm.weight", "lm_head.weight": HEAD}
PARTS = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def name_in_file(name: str) -> str:
    """Returns the file's name for one of our names of tensors."""
    found = LAYER.fullmatch(name)
    return WHOLE[name] if found is None else f"blk.{found[1]}.{PARTS[found[2]]}.{found[3]}"


def kept(file: Path, recording: Recording) -> str | None:
    """The format, one of KEPT, in which a rank keeps its matrices: where all have one type, and its inputs begin and
    end between blocks. None, too, for a file that cannot be read: its reader says why."""
    try:
        tensors = gguf_header(file).tensors
    except (FailedPrecondition, FileNotFoundError):
        return None
    found = {tensors[theirs].kind for name in recording.matrices if (theirs := name_in_file(name)) in tensors}
    if len(found) != 1 or (kind := found.pop()) not in KEPT:
        return None
    cuts = (recording.slices[name] for name in recording.matrices)
    block = BY_NAME[kind].block
    whole = all(
        part.axis == 0 or not any(one.start % block or one.stop % block for one in part.ranges) for part in cuts
    )
    return kind if whole else None
