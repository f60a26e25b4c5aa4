"""T5 and T5 v1.1: its config.json (`configuration.py`), and what it computes (`layers.py`)."""

from ..recorded import RecordedFamily
from .configuration import T5Config
from .layers import record

FAMILY = RecordedFamily(T5Config.read, record, prefix="transformer.")
