"""One stream, with the Python client for threads: `python examples/one_stream.py [ADDRESS ..]`."""

import sys

from orca_client import OrcaClient, Token


def main(addresses: list[str]) -> None:
    with OrcaClient(addresses) as client:
        stream = client.generate("def main(", max_new_tokens=32, temperature=0.7, seed=1)
        for event in stream:
            if isinstance(event, Token):
                print(event.text, end="", flush=True)
        assert stream.finished is not None
        print(f"\n{stream.finished.output_tokens} tokens, {stream.finished.reason.name}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["127.0.0.1:50051"])
