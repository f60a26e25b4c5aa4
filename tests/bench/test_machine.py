"""The instruction set that a processor has at best."""

import pytest

from orca_bench.machine import best_isa, field, isa

AVX2 = "sse4_2 fma avx avx2 f16c"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl"


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("sse4_2 avx", "portable"),
        ("sse4_2 avx avx2", "portable"),  # without FMA
        (AVX2, "avx2"),
        (AVX512, "avx512"),
        (f"{AVX512} avx512_bf16", "avx512_bf16"),
        (f"{AVX512} avx512_bf16 amx_bf16 amx_tile amx_int8", "amx"),
    ],
)
def test_best(flags: str, best: str) -> None:
    assert (
        best_isa(f"processor\t: 0\nmodel name\t: A: B\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {AVX512}\n")
        == best
    )


def test_a_processor_without_flags_is_portable() -> None:
    assert best_isa("processor\t: 0\nFeatures\t: asimd\n") == "portable"
    assert field("model name\t: A: B\n", "model name") == "A: B"


def test_this_machine_has_one() -> None:
    assert isa()
