"""GPT-NeoX, and Pythia: its config.json (`configuration.py`), and what it computes (`layers.py`)."""

from ..recorded import RecordedFamily
from ..tables import Tables
from .configuration import NeoXConfig
from .layers import record

FAMILY = RecordedFamily(NeoXConfig.read, record, "gpt_neox.", Tables("embed_in.weight", "embed_out.weight"))
