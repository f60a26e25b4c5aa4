"""How the CPU kernels are compiled."""

import ctypes
import shutil
from pathlib import Path

import pytest

from orca_kernels.cpu import build


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", tuple(flag for flag in build.FLAGS if flag != "-O3"))


@pytest.mark.skipif(not build.special(), reason="this architecture has no instruction sets of its own")
def test_a_fault_in_one_instruction_sets_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not pass for a compiler that does not know the flags: the machine would quietly run slower kernels."""
    isa, flags = list(build.special().items())[-1]
    shutil.copytree(build.SOURCES, sources := tmp_path / "src")
    (sources / f"isa_{isa}.cpp").write_text("no C++\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "special", lambda: {isa: flags})
    with pytest.raises(build.CannotBuild, match=rf"isa_{isa}\.cpp"):
        build.build(tmp_path / "built")


@pytest.mark.skipif(not build.special(), reason="this architecture has no instruction sets of its own")
def test_instruction_sets_that_the_assembler_does_not_know_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RHEL 9's compiler knows AMX, and its assembler does not."""
    isa, flags = next(iter(build.special().items()))
    shutil.copytree(build.SOURCES, sources := tmp_path / "src")
    (sources / f"isa_{isa}.cpp").write_text('asm("unheard_of");\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "special", lambda: {isa: flags})
    assert build.build(tmp_path / "built").exists()


def test_instruction_sets_that_the_compiler_does_not_know_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "special", lambda: {"unheard_of": ("-munheard-of",)})
    assert build.build(tmp_path).exists()


def test_machines_that_share_a_home_need_not_have_the_same_c_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a newer one was linked with cannot be loaded by an older one, which would run plain torch for ever."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(build, "special", dict)
    build.library_path().write_bytes(b"symbols of a later version")
    monkeypatch.setattr(build.platform, "libc_ver", lambda: ("glibc", "2.17"))
    ctypes.CDLL(str(build.library_path()))
