"""GPT-2: its config.json (`configuration.py`), and what it computes (`layers.py`)."""

from ..recorded import RecordedFamily
from .configuration import GPT2Config
from .layers import record

FAMILY = RecordedFamily(GPT2Config.read, record, prefix="transformer.")
