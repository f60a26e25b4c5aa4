"""GPT-NeoX, and Pythia: its config.json (`configuration.py`), and what it computes (`layers.py`)."""

from ..recorded import RecordedFamily
from .configuration import NeoXConfig
from .layers import record

FAMILY = RecordedFamily(NeoXConfig.read, record, prefix="gpt_neox.")
