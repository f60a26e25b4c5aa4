"""Asks a process of this machine how it is, at its status port."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

SECONDS = 5.0  # for an answer


def ask(address: str, path: str = "/readyz", seconds: float = SECONDS) -> dict[str, Any]:
    """Returns the answer of `/readyz`, ready or not, or that of another path. Blocks for at most this many seconds.

    Raises OSError with a sentence when there is no whole answer."""
    try:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=seconds) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:  # it is not ready
            with error:
                return json.load(error)
    except urllib.error.URLError as error:
        why = error.reason.strerror if isinstance(error.reason, OSError) else error.reason
        raise OSError(f"its status port does not answer ({why})") from None
    except TimeoutError:
        raise OSError(f"its status port did not answer within {seconds:g} s") from None
    except (http.client.HTTPException, ValueError) as error:  # it ended meanwhile, or another program has the port
        raise OSError(f"http://{address}{path} gave no answer ({type(error).__name__})") from None
