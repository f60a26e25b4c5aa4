"""Gemma 3, its text models: the Llama shape with other numbers, as its config.json says (`configuration.py`)."""

from ..llama.layers import record
from ..recorded import RecordedFamily
from ..tables import Tables
from .configuration import read

FAMILY = RecordedFamily(read, record, "model.", Tables("embed_tokens.weight", "lm_head.weight"))
