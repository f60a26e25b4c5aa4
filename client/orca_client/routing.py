"""Metadata by which a proxy finds a call's model, where several releases share one address."""

from .tracing import Metadata

# The header that llm-d and the Gateway API's inference extension route by. docs/models.md has the rules of proxies.
MODEL = "x-gateway-model-name"


def routed(model: str) -> Metadata:
    """The metadata of a call for this model. Nothing for an empty name, nor for one that a header cannot hold."""
    return ((MODEL, model),) if model.isascii() and model.isprintable() and model else ()
