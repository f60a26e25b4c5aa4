"""T5 and T5 v1.1: its config.json (`configuration.py`), and what it computes (`layers.py`)."""

from ..recorded import RecordedFamily
from ..tables import PARTS, Tables
from .configuration import T5Config
from .layers import record

FAMILY = RecordedFamily(T5Config.read, record, "transformer.", Tables("shared.weight", "lm_head.weight", PARTS))
