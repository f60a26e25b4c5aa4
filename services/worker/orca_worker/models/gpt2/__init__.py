"""GPT-2: its config.json (`configuration.py`), and what it computes (`layers.py`)."""

from ..recorded import RecordedFamily
from ..tables import Tables
from .configuration import GPT2Config
from .layers import record

FAMILY = RecordedFamily(GPT2Config.read, record, "transformer.", Tables("wte.weight", "lm_head.weight"))
