"""The Llama shape: Llama, Mistral, Qwen 2 and Qwen 3, as their config.json says (`configuration.py`)."""

from ..recorded import RecordedFamily
from .configuration import LlamaConfig
from .layers import record

FAMILY = RecordedFamily(LlamaConfig.read, record, prefix="model.")
