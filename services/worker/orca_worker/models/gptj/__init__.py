"""GPT-J: its config.json (`configuration.py`), and what it computes (`layers.py`)."""

from ..recorded import RecordedFamily
from ..tables import Tables
from .configuration import GPTJConfig
from .layers import record

FAMILY = RecordedFamily(GPTJConfig.read, record, "transformer.", Tables("wte.weight", "lm_head.weight"))
