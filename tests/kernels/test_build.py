"""How the CPU kernels are compiled: which instruction sets, and when."""

import ctypes
from pathlib import Path

import pytest

from orca_kernels.cpu import build

AVX2 = "sse4_2 fma avx avx2 f16c"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl"
BF16 = f"{AVX512} avx512_bf16 avx512_vnni"
ODD = build.InstructionSet(("-munheard-of",), (), "")


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Files that are compiled in a moment, for one instruction set; and a home of their own."""
    monkeypatch.setattr(build, "sets", lambda: {"portable": build.PORTABLE})
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = tmp_path / "src"
    made.mkdir()
    for source in (*build.COMMON, *build.of_set("portable"), "isa_second"):
        (made / f"{source}.cpp").write_text(f"int {source}() {{ return 0; }}\n")
    monkeypatch.setattr(build, "SOURCES", made)
    return made


@pytest.mark.skipif(build.platform.machine() != "x86_64", reason="this architecture has no instruction sets of its own")
@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("sse4_2 avx", []),
        ("sse4_2 avx avx2", []),  # without FMA
        (AVX2, ["avx2"]),
        (AVX512, ["avx512", "avx2"]),
        (f"{AVX512} avx512_bf16", ["avx512", "avx2"]),  # without VNNI
        (BF16, ["avx512_bf16", "avx512", "avx2"]),
        (f"{BF16} amx_bf16 amx_tile amx_int8", ["amx", "avx512_bf16", "avx512", "avx2"]),
    ],
)
def test_instruction_sets_of_a_processor(flags: str, best: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = f"processor\t: 0\nmodel name\t: A: B\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {AVX512}\n"
    assert build.of_processor(text) == [*best, "portable"]
    assert build.of_processor("processor\t: 0\nFeatures\t: asimd\n") == ["portable"]


def test_a_first_start_builds_the_best_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is compiled when a setting names it, and the first is not compiled again."""
    monkeypatch.setattr(build, "sets", lambda: {"portable": build.PORTABLE, "second": build.PORTABLE})
    told = list[str]()
    build.built(told.append)
    (first,) = build.cache().iterdir()
    assert first.name.startswith("kernels-portable-")
    assert [line.partition(" ")[0] for line in told] == ["compiling", "compiled"]
    build.built(told.append)
    build.built(told.append, "second")
    assert {path.name.split("-")[1] for path in build.cache().iterdir()} == {"portable", "second"}
    assert len(told) == 4
    build.all_built(told.append)
    assert len(told) == 4
    with pytest.raises(build.CannotBuild, match="this machine runs portable, second"):
        build.library_path("third")


def test_a_package_has_all_that_its_compiler_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image has no compiler: what was not packaged is not looked for."""
    (made,) = build.build(tmp_path / "package")
    monkeypatch.setattr(build, "PACKAGE", made.parent)
    monkeypatch.setattr(build, "sets", lambda: {"later": ODD._replace(flags=()), "portable": build.PORTABLE})
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build, "name", lambda isa: made.name if isa == "portable" else f"kernels-{isa}-0.so")
    assert list(build.runnable()) == ["portable"]
    assert build.library_path("portable") == made
    made.unlink()
    with pytest.raises(build.CannotBuild, match="no C\\+\\+ compiler"):
        list(build.runnable())


def test_a_fault_in_an_instruction_sets_file_is_an_error(tmp_path: Path, sources: Path) -> None:
    """It must not pass for a compiler that does not know the flags: the machine would quietly run slower kernels."""
    (sources / "isa_portable.cpp").write_text("no C++\n")
    with pytest.raises(build.CannotBuild, match=r"isa_portable\.cpp"):
        build.build(tmp_path / "built")


@pytest.mark.parametrize("odd", [ODD, ODD._replace(flags=(), newest="unheard_of")], ids=["compiler", "assembler"])
def test_instruction_sets_that_are_not_known_are_left_out(
    odd: build.InstructionSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RHEL 9's compiler knows AMX, and its assembler does not."""
    monkeypatch.setattr(build, "sets", lambda: {"odd": odd, "portable": build.PORTABLE})
    (made,) = build.build(tmp_path)
    assert made.name.startswith("kernels-portable-")
    assert list(build.runnable()) == ["portable"]


def test_machines_that_share_a_home_need_not_have_the_same_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a newer one was linked with cannot be loaded by an older one, which would run plain torch for ever."""
    build.library_path("portable").write_bytes(b"symbols of a later version")
    monkeypatch.setattr(build.platform, "libc_ver", lambda: ("glibc", "2.17"))
    ctypes.CDLL(str(build.library_path("portable")))
