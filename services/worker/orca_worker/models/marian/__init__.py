"""Marian, the original Transformer: its config.json (`configuration.py`), and what it computes (`layers.py`)."""

from ..recorded import RecordedFamily
from .configuration import MarianConfig
from .layers import record

FAMILY = RecordedFamily(MarianConfig.read, record, prefix="model.")
