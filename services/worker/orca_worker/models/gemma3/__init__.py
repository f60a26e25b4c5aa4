"""Gemma 3, its text models: the Llama shape with other numbers, as its config.json says (`configuration.py`)."""

from ..llama.layers import record
from ..recorded import RecordedFamily
from .configuration import read

FAMILY = RecordedFamily(read, record, prefix="model.")
