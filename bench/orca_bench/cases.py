"""The cases of the bench: sets of requests whose prompts and output lengths are the same on every machine and engine.

    python -m orca_bench.cases > cases.json

A file of cases is one JSON object: name -> list of {"prompt": [token ids], "output": tokens to generate}.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from orca_common.errors import FailedPrecondition
from orca_lab.workload import PAPER, Lengths, token_ids

VOCABULARY = range(1000, 30000)
WARM_UP_SEED = 999  # of prompts that no case has


class Request(NamedTuple):
    """The prompt and the length of one request: greedy, and without an end-of-sequence token."""

    prompt: list[int]
    output: int  # tokens to generate

    @property
    def tokens(self) -> int:
        """Input and output tokens: the positions and the slots that it needs."""
        return len(self.prompt) + self.output


Case = Sequence[Request]


def vocabulary_of(size: int) -> range:
    """The token ids that prompts are drawn from, for a model with a vocabulary of `size`.

    Models of GPT-2's size all get the same ids. A smaller vocabulary is used whole.
    """
    return VOCABULARY if size >= VOCABULARY.stop else range(size)


def fixed(requests: int, inputs: int, outputs: int, seed: int = 0, vocabulary: range = VOCABULARY) -> list[Request]:
    """`requests` requests of `inputs` random tokens each, which all generate `outputs` tokens."""
    chance = random.Random(seed)
    return [Request(token_ids(chance, inputs, vocabulary), outputs) for _ in range(requests)]


def drawn(requests: int, lengths: Lengths, seed: int, vocabulary: range = VOCABULARY) -> list[Request]:
    """Requests of these lengths. One seed decides lengths and token ids: a case is the same file in every release."""
    chance = random.Random(seed)
    return [Request(token_ids(chance, n, vocabulary), m) for n, m in lengths.draw(chance, requests)]


def own_cases(vocabulary: range = VOCABULARY) -> dict[str, list[Request]]:
    """The cases that the bench runs when no file is given. bB_I_O: B requests of I input and O output tokens."""
    return {
        "b1_32_32": fixed(1, 32, 32, vocabulary=vocabulary),
        "b8_32_32": fixed(8, 32, 32, vocabulary=vocabulary),
        "b8_128_32": fixed(8, 128, 32, vocabulary=vocabulary),
        "b32_32_32": fixed(32, 32, 32, vocabulary=vocabulary),
        "b32_128_32": fixed(32, 128, 32, vocabulary=vocabulary),
        "paper64": drawn(64, PAPER, seed=1, vocabulary=vocabulary),
    }


def read_cases(path: Path) -> dict[str, list[Request]]:
    """The cases of a file. Raises FailedPrecondition with a sentence when it does not hold any."""
    try:
        cases = {
            str(name): [Request([int(token) for token in one["prompt"]], int(one["output"])) for one in requests]
            for name, requests in json.loads(path.read_text()).items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FailedPrecondition(f"cases: {path} is not a file of cases ({type(error).__name__}: {error})") from None
    if not cases or not all(case and all(one.prompt and one.output > 0 for one in case) for case in cases.values()):
        raise FailedPrecondition(f"cases: {path} needs at least one case, and tokens in and out for each request")
    return cases


def dump(cases: Mapping[str, Case]) -> str:
    """The JSON of a file of cases, a line for each case."""
    lines = [f"{json.dumps(name)}: {json.dumps([one._asdict() for one in case])}" for name, case in cases.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def pick(cases: Mapping[str, Case], names: Sequence[str], vocab_size: int, max_positions: int) -> dict[str, Case]:
    """The cases of these names; without names, all that fit the model.

    Raises FailedPrecondition when there is no such case, when one that was named does not fit, or when none does.
    """
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise FailedPrecondition(f"case: there is no {unknown[0]}; there are {', '.join(cases)}")
    chosen, misfits = dict[str, Case](), list[str]()
    for name in names or cases:
        positions, token = max(one.tokens for one in cases[name]), max(max(one.prompt) for one in cases[name])
        if positions > max_positions:
            misfits.append(f"case: {name} needs {positions} positions; the model has {max_positions}")
        elif token >= vocab_size:
            misfits.append(f"case: {name} has the token id {token}; the model's vocabulary has {vocab_size}")
        else:
            chosen[name] = cases[name]
    if misfits and (names or not chosen):
        raise FailedPrecondition(misfits[0])
    return chosen


if __name__ == "__main__":
    print(dump(own_cases()), end="")
