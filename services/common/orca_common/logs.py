"""Structured logs on standard error: one line of JSON per event. They never hold the text of a prompt."""

import json
import logging
import sys
import time

from .environment import quiet_grpc

# What is no field of a line; uvicorn adds its message again, in colour.
PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON. Its `extra` fields (request, trace, engine, ..) become fields of the line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        line = {
            "time": moment,
            "level": record.levelname,
            "service": self.service,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in PLAIN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(service: str, level: str) -> None:
    """Sends all logging of this process to standard error. `level` is a name of the logging module, as DEBUG.

    `service` is also the name that its spans have.
    """
    quiet_grpc()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(handlers=[handler], level=level, force=True)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # of the hub's library; it logs each request
