"""Many prompts, a few at a time, with progress: `python examples/many_prompts.py [ADDRESS ..]`."""

import sys

from orca_client import OrcaClient

PROMPTS = [f"def function_{n}(" for n in range(20)]


def progress(ended: int, total: int | None) -> None:
    print(f"\r{ended} of {total}", end="", flush=True)


def main(addresses: list[str]) -> None:
    texts: dict[str, str] = {}
    with OrcaClient(addresses) as client:
        for answer in client.generate_many(PROMPTS, max_new_tokens=12, concurrency=4, progress=progress):
            texts[PROMPTS[answer.position]] = answer.text if answer.error is None else f"failed: {answer.error}"
    print()
    for prompt, text in texts.items():
        print(repr(prompt + text))


if __name__ == "__main__":
    main(sys.argv[1:] or ["127.0.0.1:50051"])
