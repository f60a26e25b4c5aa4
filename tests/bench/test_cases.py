"""The cases are those of every machine and engine, and a file of cases says the same."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from orca_bench.cases import Request, dump, fixed, own_cases, pick, read_cases, vocabulary_of
from orca_common.errors import FailedPrecondition

# SHA-256 of each case as JSON, [[prompt, output], ..]: what the peers' scripts run.
DIGESTS = {
    "b1_32_32": "fec522f07e8d29db",
    "b8_32_32": "120502d03a3abcdb",
    "b8_128_32": "47b6255b54d344fd",
    "b32_32_32": "0ecd49cf5159b8b1",
    "b32_128_32": "12a6eb2b6e938ea1",
    "paper64": "43b5e4b7b1649047",
}


def test_the_ids_of_every_case_are_the_peers() -> None:
    digests = {name: hashlib.sha256(json.dumps(case).encode()).hexdigest()[:16] for name, case in own_cases().items()}
    assert digests == DIGESTS


def test_the_printed_file_holds_the_same_cases(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orca_cli", "bench", "cases"]
    path = tmp_path / "cases.json"
    path.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert read_cases(path) == own_cases()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no JSON", "is not a file of cases"),
        ("[]", "is not a file of cases"),
        ('{"a": [{"prompt": [1]}]}', "KeyError"),
        ("{}", "needs at least one case"),
        ('{"a": [{"prompt": [], "output": 1}]}', "needs at least one case, and tokens"),
        ('{"a": [{"prompt": [1], "output": 0}]}', "needs at least one case, and tokens"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "cases.json").write_text(text)
    with pytest.raises(FailedPrecondition, match=said):
        read_cases(tmp_path / "cases.json")


def test_a_case_is_run_only_by_a_model_that_can(tmp_path: Path) -> None:
    cases = {"short": [Request([1, 2], 3)], "long": [Request([1, 2], 30)], "large": [Request([900], 1)]}
    assert list(pick(cases, [], vocab_size=100, max_positions=8)) == ["short"]
    assert list(pick(cases, ["large", "short"], vocab_size=1000, max_positions=8)) == ["large", "short"]
    for names, said in (
        (["long"], "needs 32 positions; the model has 8"),
        (["large"], "token id 900; the model's vocabulary has 100"),
        (["none"], "there is no none; there are short, long, large"),
    ):
        with pytest.raises(FailedPrecondition, match=said):
            pick(cases, names, vocab_size=100, max_positions=8)
    with pytest.raises(FailedPrecondition, match="positions"):
        pick(cases, [], vocab_size=100, max_positions=1)
    (tmp_path / "cases.json").write_text(dump(cases))
    assert read_cases(tmp_path / "cases.json") == cases


def test_a_small_vocabulary_is_used_whole() -> None:
    assert vocabulary_of(50257) == range(1000, 30000)
    assert vocabulary_of(40) == range(40)
    assert {token for one in fixed(20, 50, 1, vocabulary=range(40)) for token in one.prompt} == set(range(40))
