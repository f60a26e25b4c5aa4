"""Settings of the service of the live page."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from orca_common.settings import ServiceSettings


class UiSettings(ServiceSettings):
    """Serves the live page: it follows the schedulers, and passes chats on to an endpoint."""

    model_config = SettingsConfigDict(cli_prog_name="orca ui")
    heading = "live page"

    ui_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the live page; 0 takes a free one."""
    ports_kept: bool = False
    """The parent process keeps the port by SO_REUSEPORT, so that no other program takes it during a restart."""
    scheduler_status: str
    """Status ports of the schedulers, host:port separated by commas; a name stands for all its addresses."""
    endpoint_url: str
    """The HTTP door that chats go to, such as http://127.0.0.1:8000."""
    api_keys: str | None = None
    """Keys that may look and chat, as the endpoint's; without keys everybody may."""
    api_keys_file: str | None = None
    """File with such keys, one a line; it is read again when it has changed."""
    host_names: str = ""
    """Names by which the page may be called, separated by commas; `*`: all; empty: on loopback its own."""
    client_certificates: bool = True
    """With tls_dir: only browsers with a certificate of the role client; otherwise API keys say who looks."""
    max_viewers: Annotated[int, Field(ge=1)] = 256
    """Browsers that look at a time; more are refused."""
