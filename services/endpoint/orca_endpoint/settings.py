"""The endpoint's settings and the limits of what it accepts."""

from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from orca_common.settings import PoolSettings, ServiceSettings


class EndpointSettings(ServiceSettings, PoolSettings):
    """Runs one endpoint: the gRPC and HTTP doors, which validate, tokenize and stream."""

    model_config = SettingsConfigDict(cli_prog_name="orca endpoint")
    heading = "endpoints"

    model: str
    """Checkpoint folder or hub name. Its configuration and tokenizer are read, never its weights."""
    served_model_name: str | None = None
    """The model's name at the doors; the hub's name or that of its folder if not given."""
    adapters: str = ""
    """LoRA adapters of PEFT beside the model, as `NAME=FOLDER` separated by commas; a request's model is one's name."""
    adapters_file: str = ""
    """File with further such adapters, one a line; it is read again when it has changed. Empty: no file."""
    operators: str = ""
    """Tenants who may load and unload adapters over HTTP, separated by commas; `*`: all callers; empty: no caller."""
    other_models: str = ""
    """Models that other releases serve at the same address, separated by commas: /v1/models lists them, too."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of gRPC; 0 takes a free one."""
    http_port: int = Field(default=0, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""
    ports_kept: bool = False
    """The parent process keeps both ports by SO_REUSEPORT, so that no other program takes them during a restart."""

    client_certificates: bool = True
    """With tls_dir: the doors take only clients with a certificate of the role client; else API keys say who calls."""
    api_keys: str | None = None
    """Keys that may call, as `TENANT sha256:HASH` separated by commas; without keys everybody may. See `orca key`."""
    api_keys_file: str | None = None
    """File with such keys, one a line; it is read again when it has changed."""

    max_waiting: int = Field(default=4096, ge=1)
    """Requests in the pool's queue; more are refused. A tenant, or a host without keys, has as many as are free."""
    max_waiting_bytes: int = Field(default=1 << 30, ge=1)
    """Bytes of the requests in the pool's queue; more are refused. A caller has as many as are free, as above."""
    tenant_requests: int = Field(default=0, ge=0)
    """Requests of one tenant, or host without keys, waiting or running; more are refused. 0: its share of the queue."""
    tenant_waiting_tokens: int = Field(default=0, ge=0)
    """Slots that the waiting requests of one tenant, or host without keys, may need; more are refused. 0: no limit."""
    order: Literal["arrival", "fair"] = "arrival"
    """The order of the queue: by arrival and class, or tenants (hosts without keys) in fair shares by weight."""
    aging: float = Field(default=60.0, ge=0)
    """Seconds that each class of requests is ahead of the next in the queue; inf: the classes are strict."""
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
    max_prompts: int = Field(default=2048, ge=1)
    """Prompts of one HTTP request, each counted `best_of` or `n` times."""
    chat_tokens: int = Field(default=0, ge=0)
    """Tokens of a chat's answer where neither the request nor generation_config.json says; 0: all that fit."""
    control_tokens_in_chats: bool = False
    """Whether special tokens in the texts of a chat's messages are control tokens; otherwise they are text."""
    host_names: str = ""
    """Names by which the HTTP door may be called, separated by commas; `*`: all; empty: on loopback its own."""
    cors_origins: str = ""
    """Origins whose pages may call the HTTP door from a browser, separated by commas; `*`: all; empty: none."""

    pool_patience: float = Field(default=10.0, gt=0)
    """Seconds that a new call waits for an absent Redis."""
    comment_seconds: float = Field(default=10.0, ge=0)
    """Seconds without an event after which an HTTP stream gets a comment, so that proxies see it live; 0: none."""
    call_buffer: int = Field(default=1024, ge=1)
    """Tokens that are kept for a client that does not read."""

    trusted_proxies: str = ""
    """Addresses and networks of proxies, separated by commas, whose `x-forwarded-for` names the client; empty: none."""
    max_connections: int = Field(default=4096, ge=1)
    """Connections of each door; more are closed. Fewer where the limit of descriptors leaves fewer."""
    max_peer_connections: int = Field(default=1024, ge=1)
    """HTTP connections of one host; more are closed. gRPC's are bounded by a proxy, see docs/security.md."""
    max_peer_calls: int = Field(default=2048, ge=1)
    """Calls of one host at one door, twice as many of short gRPC ones; more are refused with RESOURCE_EXHAUSTED."""
    max_open_calls: int = Field(default=16384, ge=1)
    """Calls of all hosts at both doors, twice as many of short gRPC ones; more are refused with RESOURCE_EXHAUSTED."""
    max_streams: int = Field(default=256, ge=1)
    """Calls of one gRPC connection at a time; gRPC's clients hold further ones back."""
    max_header_bytes: int = Field(default=1 << 16, ge=1024)
    """Bytes of a request's header."""
    max_body_bytes: int = Field(default=1 << 28, ge=1)
    """Bytes of all bodies in an endpoint's memory together; requests that would need more are refused."""
    header_seconds: float = Field(default=10.0, gt=0)
    """Seconds for a header to come, before it for a TLS handshake; over gRPC for a connection to be made."""
    connection_idle: float = Field(default=300.0, gt=0)
    """Seconds after which a gRPC connection without a call is closed."""
    body_seconds: float = Field(default=30.0, gt=0)
    """Seconds for a body to come."""
    write_timeout: float = Field(default=30.0, gt=0)
    """Seconds for a client to take what is written to it; then its call ends and detaches."""
    connection_age: float = Field(default=300.0, ge=0)
    """Seconds after which a gRPC connection takes no new calls, so that clients spread again; 0: never."""

    @model_validator(mode="after")
    def _proxies_are_addresses(self) -> Self:
        try:
            _ = self.proxies
        except ValueError as error:
            raise ValueError(f"trusted_proxies: {error}") from None
        return self

    @property
    def proxies(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of `trusted_proxies`."""
        return tuple(ip_network(one.strip()) for one in self.trusted_proxies.split(",") if one.strip())

    @property
    def others(self) -> tuple[str, ...]:
        """The names of `other_models`."""
        return tuple(name.strip() for name in self.other_models.split(",") if name.strip())

    @property
    def max_message_bytes(self) -> int:
        """The transport's bound, well above everything that the validation refuses by name."""
        return max(4 << 20, 4 * self.max_prompt_bytes)
