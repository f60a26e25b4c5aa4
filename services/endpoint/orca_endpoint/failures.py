"""A bug's way to the client: INTERNAL with a trace id, and the log line that has the rest."""

import logging
import secrets

from opentelemetry import trace
from opentelemetry.trace import format_trace_id

from orca_common.errors import Internal

log = logging.getLogger(__name__)


def internal(error: Exception) -> Internal:
    """Logs an exception that nobody expected and answers what the client may know of it."""
    context = trace.get_current_span().get_span_context()
    trace_id = format_trace_id(context.trace_id) if context.is_valid else secrets.token_hex(16)
    log.error("internal error", exc_info=error, extra={"trace": trace_id})
    return Internal("internal error", trace_id)
