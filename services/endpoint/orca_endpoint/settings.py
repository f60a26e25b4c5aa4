"""The endpoint's settings and the limits of what it accepts."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from orca_common.settings import PoolSettings, ServiceSettings


class EndpointSettings(ServiceSettings, PoolSettings):
    """Runs one endpoint: the gRPC and HTTP doors, which validate, tokenize and stream."""

    model_config = SettingsConfigDict(cli_prog_name="orca endpoint")

    model: str
    """Checkpoint folder or hub name. Its configuration and tokenizer are read, never its weights."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of gRPC; 0 takes a free one."""
    http_port: int = Field(default=0, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""

    api_keys: str | None = None
    """Keys that may call, as `TENANT sha256:HASH` separated by commas; without keys everybody may. See `orca key`."""
    api_keys_file: str | None = None
    """File with such keys, one a line; it is read again when it has changed."""

    max_waiting: int = Field(default=4096, ge=1)
    """Requests in the pool's queue; more are refused with RESOURCE_EXHAUSTED."""
    max_waiting_bytes: int = Field(default=1 << 30, ge=1)
    """Bytes of the requests in the pool's queue; more are refused with RESOURCE_EXHAUSTED."""
    tenant_requests: int = Field(default=0, ge=0)
    """Requests of one tenant, waiting or running; more are refused with RESOURCE_EXHAUSTED. 0: no limit."""
    tenant_waiting_tokens: int = Field(default=0, ge=0)
    """Slots that the waiting requests of one tenant may need together; more are refused. 0: no limit."""
    max_calls: int = Field(default=4096, ge=1)
    """Streams of one endpoint; more new ones are refused with RESOURCE_EXHAUSTED, a Resume at twice as many."""
    max_prompt_bytes: int = Field(default=1 << 20, ge=1)
    """Bytes of a prompt in text."""
    max_stop_strings: int = Field(default=16, ge=0)
    """Stop strings of a request."""
    max_stop_bytes: int = Field(default=256, ge=1)
    """Bytes of one stop string."""
    max_stop_token_ids: int = Field(default=64, ge=0)
    """Stop token ids of a request."""
    max_detach_grace: float = Field(default=3600.0, ge=0)
    """Longest detach_grace of a request, in seconds."""
    max_prompts: int = Field(default=32, ge=1)
    """Prompts of one HTTP request."""

    pool_patience: float = Field(default=10.0, gt=0)
    """Seconds that a new call waits for an absent Redis."""
    call_buffer: int = Field(default=1024, ge=1)
    """Tokens that are kept for a client that does not read."""

    connection_age: float = Field(default=300.0, ge=0)
    """Seconds after which a gRPC connection takes no new calls, so that clients spread again; 0: never."""

    @property
    def max_message_bytes(self) -> int:
        """The transport's bound, well above everything that the validation refuses by name."""
        return max(8 << 20, 8 * self.max_prompt_bytes)
