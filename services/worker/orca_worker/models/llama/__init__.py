"""The Llama shape: Llama, Mistral, Qwen 2 and Qwen 3, as their config.json says (`configuration.py`)."""

from ..recorded import RecordedFamily
from ..tables import Tables
from .configuration import LlamaConfig
from .layers import record

FAMILY = RecordedFamily(LlamaConfig.read, record, "model.", Tables("embed_tokens.weight", "lm_head.weight"))
