"""The endpoint's settings and the limits of what it accepts."""

from pydantic import Field

from orca_common.settings import PoolSettings, ServiceSettings


class EndpointSettings(ServiceSettings, PoolSettings):
    """`ORCA_MODEL`, `ORCA_PORT`, .. (see `orca_common.settings`)."""

    model: str  # checkpoint folder or hub name: its configuration and tokenizer are read, never its weights
    port: int = Field(default=0, ge=0, le=65535)  # gRPC; 0 takes a free one
    http_port: int = Field(default=0, ge=0, le=65535)  # the OpenAI door; 0 takes a free one

    max_waiting: int = Field(default=4096, ge=1)  # requests in the pool's queue; above it RESOURCE_EXHAUSTED
    max_calls: int = Field(default=4096, ge=1)  # streams of this endpoint at one time; above it RESOURCE_EXHAUSTED
    max_prompt_bytes: int = Field(default=1 << 20, ge=1)  # of a prompt in text
    max_stop_strings: int = Field(default=16, ge=0)
    max_stop_bytes: int = Field(default=256, ge=1)  # of one stop string
    max_stop_token_ids: int = Field(default=64, ge=0)
    max_detach_grace: float = Field(default=3600.0, ge=0)  # seconds
    max_prompts: int = Field(default=32, ge=1)  # of one HTTP request with a list of prompts

    pool_patience: float = Field(default=10.0, gt=0)  # seconds that a new call waits for an absent Redis
    call_buffer: int = Field(default=1024, ge=1)  # tokens kept for a client that does not read

    @property
    def max_message_bytes(self) -> int:
        """The transport's bound, well above everything that the validation refuses by name."""
        return max(8 << 20, 8 * self.max_prompt_bytes)
