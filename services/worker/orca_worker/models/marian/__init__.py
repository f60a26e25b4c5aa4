"""Marian, the original Transformer: its config.json (`configuration.py`), and what it computes (`layers.py`)."""

from ..recorded import RecordedFamily
from ..tables import PARTS, Tables
from .configuration import MarianConfig
from .layers import record

FAMILY = RecordedFamily(
    MarianConfig.read, record, "model.", Tables("shared.weight", "lm_head.weight", PARTS), "final_logits_bias"
)
