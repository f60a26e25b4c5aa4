"""Checks that a release of Orca serves: waits for its engines, generates a text, and prints it.

    python -m orca_client.check orca-endpoint:50051 --engines 2 --timeout 120

Exit codes: 0; 1 with a sentence on standard error; 2 for a wrong command line. `helm test` runs it.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .client import OrcaClient
from .errors import DeadlineExceeded, OrcaError, Unavailable
from .events import Model
from .tls import tls_credentials

POLL = 0.5  # seconds between looks at the engines
ASK = 5.0  # seconds for one look
PROMPT_OF_IDS = (1, 2, 3)  # for a model without a tokenizer


def check(client: OrcaClient, engines: int, timeout: float, prompt: str, max_new_tokens: int) -> str:
    """Waits until `engines` engines have formed, then generates. Returns the text, or token ids as text.

    An engine counts from its first formation until it is retired. Raises OrcaError with a sentence: DeadlineExceeded
    when `timeout` seconds were not enough.
    """
    deadline = time.monotonic() + timeout
    model = _wait_for(client, engines, deadline)
    left = max(0.001, deadline - time.monotonic())
    stream = client.generate(
        prompt if model.has_tokenizer else PROMPT_OF_IDS,
        max_new_tokens=max_new_tokens,
        timeout=left,
        model=model.name,
    )
    text = stream.text()
    return text if model.has_tokenizer else " ".join(str(token.token_id) for token in stream.tokens)


def _wait_for(client: OrcaClient, engines: int, deadline: float) -> Model:
    while True:
        left = deadline - time.monotonic()
        try:
            model = client.get_model(timeout=max(0.001, min(ASK, left)))
        except (Unavailable, DeadlineExceeded) as error:
            missing = f"no endpoint answers: {error}"
        else:
            if len(model.engines) >= engines:
                return model
            missing = f"{len(model.engines)} of {engines} engines have formed"
        if time.monotonic() + POLL >= deadline:
            raise DeadlineExceeded(missing)
        time.sleep(POLL)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m orca_client.check", description=__doc__)
    parser.add_argument("address", help="gRPC target of the endpoints, such as orca-endpoint:50051")
    parser.add_argument("--engines", type=int, default=1, help="engines that must have formed (default: 1)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for everything (default: 60)")
    parser.add_argument("--prompt", default="Once upon a time", help="what to generate from")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="tokens to generate at most (default: 16)")
    parser.add_argument("--tls-dir", type=Path, help="folder with ca.crt, and for mTLS a client's tls.crt and tls.key")
    parser.add_argument("--api-key-file", type=Path, help="file with the API key")
    given = parser.parse_args(arguments)
    try:
        credentials = tls_credentials(given.tls_dir) if given.tls_dir else None
        key = given.api_key_file.read_text().strip() if given.api_key_file else None
        with OrcaClient(given.address, credentials=credentials, api_key=key) as client:
            print(check(client, given.engines, given.timeout, given.prompt, given.max_new_tokens))
    except (OrcaError, OSError) as error:
        print(f"{given.address}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
