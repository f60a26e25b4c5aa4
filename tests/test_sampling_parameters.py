"""The one table of sampling parameters: who follows it, and which files a new parameter touches."""

import inspect
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from orca.v1.orca_pb2 import GenerateRequest, Sampling
from orca.v1.sampling_pb2 import SamplingParams
from orca_cli.generate import generate as command
from orca_client import AsyncOrcaClient, OrcaClient
from orca_common.sampling import EVERY, FORMS, LOGPROBS, SAMPLING, Parameter, Range, markdown
from orca_endpoint.openai.completions.request import FIELDS
from orca_endpoint.openai.request import READERS
from orca_worker.iteration.rows import PLAIN

ROOT = Path(__file__).parents[1]

# The files that a new parameter touches: outside tests, pages and generated code.
TOUCHED = {
    "services/common/orca_common/sampling.py": "the table",
    "protos/orca/v1/orca.proto": "the public contract",
    "protos/orca/v1/sampling.proto": "the message for the ranks",
    "client/orca_client/base.py": "the client's signature",
    "cli/orca_cli/generate.py": "the option of `orca generate`",
}
# And what the rank does with it: penalties and biases change logits.
RANK = {
    "services/worker/orca_worker/sampling/adjusting.py",
    "services/worker/orca_worker/iteration/rows.py",
}
# What names some of them for a reason of its own, and need not know a new one.
OTHERS = {
    "chaos/orca_chaos/oracle.py": "requests that use them",
    "bench/orca_bench/kernels.py": "draws that are timed",
    "services/endpoint/orca_endpoint/openai/fields.py": "those that OpenAI has",
    "services/endpoint/orca_endpoint/ollama/fields.py": "those that Ollama has by another name, or not at all",
}


def naming(word: str) -> set[str]:
    """The files of source that name it: what git has or would add, without tests, pages and generated code."""
    skipped = (":!tests", ":!docs", ":!*.md", ":!*_pb2*", ":!*.pb.go", ":!*.binpb")
    command = ["git", "grep", "--untracked", "--files-with-matches", "--word-regexp", word, "--", ".", *skipped]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("name", sorted(set(SAMPLING) - PLAIN))
def test_a_parameter_is_named_in_few_files(name: str) -> None:
    """The plain draw's are in each of its ways; any other one is named where its idea is, and nowhere else."""
    found = naming(name)
    assert found >= set(TOUCHED)
    assert found - set(TOUCHED) - set(OTHERS) <= RANK, "it travels as a part of its message, unnamed"


def test_schedulers_and_the_pool_name_none() -> None:
    named = {path for name in EVERY if name != "logprobs" for path in naming(name)}  # a report has `logprobs`, too
    assert not {path for path in named if path.startswith(("services/scheduler/", "services/pool/"))}


def test_the_messages_have_the_parameters_of_the_table() -> None:
    public = [field.name for field in Sampling.DESCRIPTOR.fields]
    assert public == list(SAMPLING)
    assert {*LOGPROBS, *FORMS} <= set(GenerateRequest.DESCRIPTOR.fields_by_name)
    assert [field.name for field in GenerateRequest.DESCRIPTOR.oneofs_by_name["form"].fields] == list(FORMS)
    # The ranks get every form as one grammar, the model's forced end, the tokens that would end an answer early, and
    # the adapter that the request's model names.
    others = ["grammar", "forced_end", "not_before", "adapter"]
    assert [field.name for field in SamplingParams.DESCRIPTOR.fields] == [*SAMPLING, *LOGPROBS, *others]
    assert set(PLAIN) < set(EVERY)


def field_of(parameter: Parameter) -> Any:
    public = Sampling if parameter.name in SAMPLING else GenerateRequest
    return public.DESCRIPTOR.fields_by_name[parameter.name]


@pytest.mark.parametrize("parameter", [*SAMPLING.values(), *LOGPROBS.values()], ids=lambda parameter: parameter.name)
def test_types(parameter: Parameter) -> None:
    public, mine = field_of(parameter), SamplingParams.DESCRIPTOR.fields_by_name[parameter.name]
    kinds = {
        "number": FieldDescriptor.CPPTYPE_DOUBLE,
        "count": FieldDescriptor.CPPTYPE_UINT32,
        "seed": FieldDescriptor.CPPTYPE_UINT64,
        "biases": FieldDescriptor.CPPTYPE_MESSAGE,
        "flag": FieldDescriptor.CPPTYPE_BOOL,
    }
    assert public.cpp_type == mine.cpp_type == kinds[parameter.kind]
    absent_differs = parameter.kind in {"number", "count", "seed"} and parameter.default != 0
    assert public.has_presence == absent_differs, "optional, where 0 is not what an absent one means"
    if parameter.kind in {"number", "count"}:
        assert parameter.default == "all" or parameter.limits.holds(float(parameter.default))


@pytest.mark.parametrize("parameter", EVERY.values(), ids=lambda parameter: parameter.name)
def test_signatures_of_the_client_and_the_command(parameter: Parameter) -> None:
    """Named alike, of the same type, and absent as the contract says."""
    default = None if field_of(parameter).has_presence or parameter.kind == "biases" else parameter.default
    types: Mapping[str, Any] = {"number": float, "count": int, "seed": int, "flag": bool}
    for function in (OrcaClient.generate, AsyncOrcaClient.generate, command):
        argument = inspect.signature(function).parameters[parameter.name]
        assert argument.default == (False if default == "false" else default), function
        if parameter.kind in types:
            kind = getattr(argument.annotation, "__origin__", argument.annotation)  # of Annotated
            assert kind == (types[parameter.kind] | None if default is None else types[parameter.kind]), function


def test_the_openai_door_has_all_of_sampling() -> None:
    assert {field.name for field in FIELDS} > set(SAMPLING)
    assert {parameter.kind for parameter in SAMPLING.values()} == set(READERS)


def test_the_comments_of_the_contract_have_the_limits_of_the_table() -> None:
    text = (ROOT / "protos/orca/v1/orca.proto").read_text()
    sampling = text[text.index("message Sampling {") : text.index("message GenerateRequest")]
    for name, parameter in SAMPLING.items():
        comment = sampling[sampling.index(f" {name} = ") :]
        comment = comment[: re.search(r"\n  (?=\w)|\n}", comment).start()]  # type: ignore[union-attr]
        limits = parameter.limits
        if limits.low is not None and limits.high is not None:
            assert f"in {'(' if limits.above else '['}{limits.low}, {limits.high}]" in comment, name


def test_the_table_of_the_page_is_this_one() -> None:
    assert markdown() in (ROOT / "docs/call.md").read_text(), "put orca_common.sampling.markdown() there"


def test_limits() -> None:
    nan = float("nan")
    cases = [
        (Range(0, 1), "between 0 and 1", [0, 0.5, 1], [-1e-9, 1.01, nan, float("inf")]),
        (Range(0, 1, above=True), "above 0 and at most 1", [1e-9, 1], [0, 1.01, nan]),
        (Range(1), "at least 1", [1, 1 << 40], [0]),
        (Range(high=20), "at most 20", [0, 20], [21]),
        (Range(), "", [0, -5], []),
    ]
    for limits, words, inside, outside in cases:
        assert str(limits) == words
        assert all(map(limits.holds, inside))
        assert not any(map(limits.holds, outside))
